"""Weights of eight bits or four beside their scales, and the plain numbers that they stand for.

One in FP8 stands for itself times the scale of its row and its group of columns; one of four bits, 0 to 15, for itself
less that group's zero, times its scale: rounded once. In MXFP4, which experts may be in, 0 to 15 are codes of numbers,
and a group of 32 columns has a power of two: what they stand for is exact. Kernels that read such weights make those
numbers on the way (`widen.py`), and so give the bits of products with plain weights.

Shape suffixes: N output size (rows), K reduced size (columns), J bytes of a row, G groups of columns, I columns of one.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tercet.triton_kernels.checks import FP8, check_contiguous, check_device, check_dtype, check_same, check_shape

BYTES = 64
"""Of a row, which have an order of their own: those are together that one thread brings to the matrix units."""
UNITS = {torch.bfloat16: 0x43, torch.float16: 0x64}
"""Bytes behind which the bits of a byte are units of a large number: 128 of bfloat16, 1024 of float16."""
E8M0 = torch.float8_e8m0fnu
"""Powers of two, by their exponents: scales of MXFP4."""
MX_GROUP = 32
MX_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""By three bits; the fourth is the sign."""
MX_MOST = 128
"""The largest exponent of a group, as E8M0 has it, that kernels know: numbers beyond are no weights."""
TILE = 128
"""Rows and columns of which scales are looked up together, where products round rows, too."""
_MX_ORDER = [0, 2, 1, 3]
_MX_PLACES = (15, 6), (12, 3), (13, 0), (14, 9)
"""Bits of half a word, of four numbers: where each one's sign is, and where the three others begin. The first are where
bfloat16 has them, and so are the second once they are moved by three."""
_MX_FIRST = 126
"""What is added to exponents: a number's bits, moved into a bfloat16, are 2^126 times too small."""


@dataclass(frozen=True, eq=False)
class ScaledWeight:
    """`numbers_NJ`: in FP8 as `stored` has them, or of four bits as `packed` or `packed_mx` does. `scales_GN`: in fp32,
    or beside four bits as `with_zeros` has them; of groups that follow each other, K / G columns each, of whole rows
    where G is one. `dtype`: of the numbers that it stands for; `of_scales`: those beside four bits, that or fp16.

    In MXFP4 `of_scales` is E8M0, scales are as `with_powers` has them, four in a word, and columns are filled up to
    whole blocks: `columns` of them are the matrix's.

    `tile_scales`: of FP8, where products of many rows may round those, too (`matmul_fp8.py`): of each 128 rows those of
    even rows and of odd ones, which are the same, [tiles, G, 2]; or where G is one, each row's, [N]."""

    numbers_NJ: Tensor
    scales_GN: Tensor
    dtype: torch.dtype
    of_scales: torch.dtype = torch.float32
    columns: int = 0
    """0: as many as there are."""
    tile_scales: Tensor | None = None

    @property
    def four_bits(self) -> bool:
        return self.numbers_NJ.dtype == torch.uint8

    @property
    def kind(self) -> int:
        """As kernels are told: 0 is FP8, 1 of four bits, 2 of four bits with scales of another type, 3 MXFP4."""
        if self.is_mx:
            return 3
        return (1 if self.of_scales == self.dtype else 2) if self.four_bits else 0

    @property
    def is_mx(self) -> bool:
        return self.of_scales == E8M0

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.numbers_NJ), self.columns or self.stored_columns))

    @property
    def stored_columns(self) -> int:
        """With those that fill up."""
        return self.numbers_NJ.shape[1] * (2 if self.four_bits else 1)

    @property
    def device(self) -> torch.device:
        return self.numbers_NJ.device

    @property
    def group(self) -> int:
        """Columns that share a scale, or of MXFP4 a word of them."""
        return self.stored_columns // len(self.scales_GN)

    @property
    def widest(self) -> int:
        """Columns of the widest tiles that K is made of."""
        return next(BYTES * blocks for blocks in (4, 2, 1) if self.stored_columns % (BYTES * blocks) == 0)

    @property
    def widest_of_one_scale(self) -> int:
        """The same, of two such blocks at most, whose rows have one scale each, or of four bits one for each half."""
        return min(self.widest, 2 * BYTES if self.four_bits or self.group % (2 * BYTES) == 0 else BYTES)

    @property
    def nbytes(self) -> int:
        return self.numbers_NJ.nbytes + self.scales_GN.nbytes

    def __len__(self) -> int:
        return len(self.numbers_NJ)

    def __getitem__(self, rows: slice) -> "ScaledWeight":
        """Some rows: a view."""
        return replace(self, numbers_NJ=self.numbers_NJ[rows], scales_GN=self.scales_GN[:, rows], tile_scales=None)


Weight = Tensor | ScaledWeight
"""What a product takes."""


def with_tile_scales(w_NK: ScaledWeight) -> ScaledWeight:
    """The same with `tile_scales`, if it is in FP8 and has such; on the meta device as if it had."""
    G, N = w_NK.scales_GN.shape
    if w_NK.four_bits or w_NK.shape[1] % TILE or N % 8:
        return w_NK
    if G == 1:
        return replace(w_NK, tile_scales=w_NK.scales_GN[0])
    if w_NK.group % TILE:
        return w_NK
    each = w_NK.group // TILE  # a scale for each block of columns
    padded_GN = torch.cat((w_NK.scales_GN, w_NK.scales_GN[:, -2:].repeat(1, -(N // 2) % (TILE // 2))), 1)
    pairs_GTR2 = padded_GN.view(G, -1, TILE // 2, 2)
    if not w_NK.scales_GN.is_meta and not torch.equal(pairs_GTR2, pairs_GTR2[:, :, :1].expand_as(pairs_GTR2)):
        return w_NK
    pairs_TG2 = pairs_GTR2[:, :, 0].transpose(0, 1).repeat_interleave(each, 1)
    return replace(w_NK, tile_scales=pairs_TG2.contiguous())


def stored(numbers_NJ: Tensor) -> Tensor:
    """Bytes in the order of products: four times of 16, from both halves of those, a thread's two."""
    ordered_NJ: Tensor = numbers_NJ.unflatten(1, (-1, 4, 2, 4, 2)).permute(0, 1, 4, 2, 3, 5).flatten(1)
    return ordered_NJ


def packed(numbers_NK: Tensor) -> Tensor:
    """Numbers of four bits, 0 to 15, in that order: of 128 columns the first 64 in the low bits of 64 bytes."""
    halves_NBHJ = numbers_NK.to(torch.uint8).unflatten(1, (-1, 2, BYTES))
    return stored((halves_NBHJ[:, :, 0] | (halves_NBHJ[:, :, 1] << 4)).flatten(1))


def packed_mx(codes_NK: Tensor) -> Tensor:
    """The same of MXFP4, bits of eight numbers moved within a word, so that fewer instructions make numbers of them.
    Half a word has one of each two neighbours, those in low bits of `packed` first."""
    bytes_NW22 = packed(codes_NK).unflatten(1, (-1, 2, 2)).int()
    four = [bits_NW22[:, :, half] for bits_NW22 in (bytes_NW22 & 15, bytes_NW22 >> 4) for half in range(2)]
    halves_NW2 = torch.zeros_like(four[0])
    for codes_NW2, (sign, rest) in zip(four, _MX_PLACES, strict=True):
        halves_NW2 |= codes_NW2 >> 3 << sign | (codes_NW2 & 7) << rest
    return halves_NW2.to(torch.int16).flatten(1).view(torch.uint8)


def _unmoved(numbers_NJ: Tensor) -> Tensor:
    """Bytes of `packed` from those of `packed_mx`."""
    halves_NW2 = numbers_NJ.contiguous().view(torch.int16).int().unflatten(1, (-1, 2))
    a, b, c, d = ((halves_NW2 >> sign & 1) << 3 | halves_NW2 >> rest & 7 for sign, rest in _MX_PLACES)
    return torch.stack((a | c << 4, b | d << 4), 2).flatten(1).to(torch.uint8)


def with_zeros(scales_GN: Tensor, zeros_GN: Tensor, dtype: torch.dtype) -> Tensor:
    """Words of int32: the bits of a scale of 16, and above them those of its zero, a large number of `dtype`."""
    words_GN = scales_GN.view(torch.int16).to(torch.int32) & 0xFFFF
    return words_GN | (zeros_GN.to(torch.int32) | UNITS[dtype] << 8) << 16


def with_powers(powers_NG: Tensor) -> Tensor:
    """Words of int32 for E8M0's bytes: [blocks, N]. Of a block's four groups of columns they are in the order 0, 2, 1
    and 3: two of them lie in the same bytes."""
    N, G = powers_NG.shape
    bytes_NB4 = powers_NG.new_full((N, -(-G // 4), 4), _MX_FIRST)
    bytes_NB4.view(N, -1)[:, :G] = powers_NG + _MX_FIRST
    return bytes_NB4[..., _MX_ORDER].view(torch.int32)[..., 0].t().contiguous()


def expand_reference(w_NK: ScaledWeight) -> Tensor:
    """The numbers that it stands for, in PyTorch."""
    scales_GN = w_NK.scales_GN
    numbers_NJ = _unmoved(w_NK.numbers_NJ) if w_NK.is_mx else w_NK.numbers_NJ
    numbers_NK = numbers_NJ.unflatten(1, (-1, 4, 4, 2, 2)).permute(0, 1, 3, 4, 2, 5).flatten(1)
    if w_NK.four_bits:
        halves_NBJ = numbers_NK.unflatten(1, (-1, BYTES))
        numbers_NK = torch.stack((halves_NBJ & 15, halves_NBJ >> 4), 2).flatten(1)
        if w_NK.is_mx:
            bytes_NB4 = scales_GN.t().flatten().view(torch.uint8).view(len(w_NK), -1, 4)[..., _MX_ORDER]
            numbers_NK = mx_numbers(numbers_NK, bytes_NB4.flatten(1) - _MX_FIRST)
            return numbers_NK[:, : w_NK.shape[1]].to(w_NK.dtype)
        zeros_GN = scales_GN >> 16 & 0xFF
        scales_GN = scales_GN.to(torch.int16).view(w_NK.of_scales).float()
    numbers_NGI = numbers_NK.float().unflatten(1, (len(scales_GN), -1))
    if w_NK.four_bits:
        numbers_NGI = numbers_NGI - zeros_GN.t()[:, :, None]
    expanded_NK: Tensor = (numbers_NGI * scales_GN.t()[:, :, None]).flatten(1).to(w_NK.dtype)
    return expanded_NK


def mx_numbers(codes_NK: Tensor, powers_NG: Tensor) -> Tensor:
    """What numbers of MXFP4 stand for, in fp32: by 0 to 15 and E8M0's bytes."""
    table = torch.tensor(MX_NUMBERS + tuple(-number for number in MX_NUMBERS), device=codes_NK.device)
    numbers_NGI = table[codes_NK.int()].unflatten(1, (-1, MX_GROUP))
    return torch.ldexp(numbers_NGI, powers_NG[..., None].int() - 127).flatten(1)


def check_weight(name: str, w_NK: Weight, x: Tensor, N: int | None, K: int, *, of_experts: bool = False) -> None:
    """[N, K], contiguous, on x's device; of x's type, or of eight bits or four beside scales for it. Of experts it may
    be MXFP4."""
    if isinstance(w_NK, Tensor):
        check_shape(name, w_NK, N, K)
        check_same(name, w_NK, x)
        return
    numbers, scales, four = w_NK.numbers_NJ, w_NK.scales_GN, w_NK.four_bits
    if w_NK.is_mx and (not of_experts or x.dtype != torch.bfloat16 or K % MX_GROUP):
        wanted = f"wanted those of experts, for bfloat16, {MX_GROUP} or a multiple of them"
        raise ValueError(f"{name}: got {K} columns of MXFP4 for {x.dtype}, {wanted}")
    if w_NK.shape[1] != K or numbers.ndim != 2 or N not in (None, len(w_NK)):
        raise ValueError(f"{name}: got {list(w_NK.shape)} numbers, wanted [{'*' if N is None else N}, {K}]")
    check_shape(f"{name}'s scales", scales, None, len(w_NK))
    stored_columns = w_NK.stored_columns
    if not len(scales) or stored_columns % len(scales) or (w_NK.is_mx and len(scales) * 2 * BYTES != stored_columns):
        wanted = f"one for {2 * BYTES} columns" if w_NK.is_mx else f"a number that divides {stored_columns}"
        raise ValueError(f"{name}'s scales: got {len(scales)} groups, wanted {wanted}")
    if w_NK.dtype != x.dtype:
        raise ValueError(f"{name}: got numbers that stand for {w_NK.dtype}, wanted {x.dtype}")
    if four:
        check_dtype(name, x, *UNITS)
        known = dict.fromkeys((x.dtype, torch.float16, E8M0))
        if w_NK.of_scales not in known:
            raise ValueError(f"{name}'s scales: got {w_NK.of_scales}, wanted {' or '.join(map(str, known))}")
    least = 2 * BYTES if four else BYTES
    if stored_columns % least or w_NK.group % BYTES:
        wanted = f"wanted multiples of {least} and {BYTES}"
        raise ValueError(f"{name}: got {K} columns in groups of {w_NK.group}, {wanted}")
    for part, tensor, *dtypes in (
        (name, numbers, FP8, torch.uint8),
        (f"{name}'s scales", scales, torch.int32 if four else torch.float32),
    ):
        check_dtype(part, tensor, *dtypes)
        check_device(part, tensor, x)
        check_contiguous(part, tensor)
