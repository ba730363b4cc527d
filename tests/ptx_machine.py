"""A block of a compiled kernel on the CPU: PTX, instruction by instruction, all threads side by side, up to what the
matrix units are given, or to its end. Registers are int64 with a value for each thread; copies are there at once, and
nothing waits.

Knows the instructions that products with scaled weights are made of, and no others: it says which it lacks.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ptx_meanings import meaning

_SHARED = 1 << 18
"""Bytes, of all that a block has."""
_IGNORED = (
    "bar.sync", "bar.warp.sync", "mbarrier.", "griddepcontrol.", "wgmma.fence", "wgmma.commit_group",
    "wgmma.wait_group", "fence.", "cp.async.commit_group", "cp.async.wait_group", "cp.async.bulk.prefetch",
)  # fmt: skip


@dataclass(frozen=True)
class Copied:
    """What a tensor map describes: rows of bytes, and the box that one copy brings, swizzled as wide as its rows."""

    rows_RB: Tensor
    box: tuple[int, int]
    itemsize: int


@dataclass(frozen=True)
class Product:
    """Of all warps, which have rows of their own: A [rows, 16] and B [16, columns], as bits of 16."""

    a: Tensor
    b: Tensor


class Machine:
    """`parameters`: of the kernel by their number: numbers, tensors of which it gets a pointer, or tensor maps. What it
    writes is in these tensors."""

    def __init__(self, ptx: str, parameters: dict[int, int | Tensor | Copied], block: int) -> None:
        threads = re.search(r"\.reqntid (\d+)", ptx)
        assert threads
        self._threads = torch.arange(int(threads[1]))
        self._lines, self._labels = _parse(ptx)
        self._shared = torch.zeros(_SHARED, dtype=torch.uint8)
        self._maps: dict[int, Copied] = {}
        self._memory: dict[int, Tensor] = {}
        self._registers: dict[str, Tensor] = {"%tid.x": self._threads, "%ctaid.x": self._all(block)}
        self._registers["global_smem"] = self._all(0)
        self._registers["complete"] = self._all(1)  # what waits for a barrier asks for it
        names = {int(name.rpartition("_")[2]): name for name in re.findall(r"\w+_param_\d+", ptx)}
        self._registers.update(dict.fromkeys(names.values(), self._all(0)))
        for number, given in parameters.items():
            place = (number + 1) << 40
            if isinstance(given, Copied):
                self._maps[place] = given
            elif isinstance(given, Tensor):
                assert given.is_contiguous()
                self._memory[number + 1] = given.view(-1).view(torch.uint8)
            else:
                place = given
            self._registers[names[number]] = self._all(place)

    def products(self) -> Iterator[Product]:
        """The block's, in order."""
        at = 0
        while True:
            condition, opcode, operands = self._lines[at]
            at += 1
            active = self._active(condition)
            if opcode == "ret":
                return
            if opcode.startswith("bra"):
                assert active.all() or not active.any(), "threads part"
                at = self._labels[operands[0]] if active.all() else at
            elif "mma" in opcode and not opcode.startswith(_IGNORED):
                yield self._product(opcode, operands)
            elif not opcode.startswith(_IGNORED):
                self._run(opcode, operands, active)

    def run(self) -> None:
        """To the end, without matrix units."""
        assert list(self.products()) == []

    def _all(self, value: int) -> Tensor:
        return torch.full_like(self._threads, value)

    def _active(self, condition: str) -> Tensor:
        if not condition:
            return torch.ones_like(self._threads, dtype=torch.bool)
        known = self._registers[condition.lstrip("!")].bool()
        return ~known if condition[0] == "!" else known

    def _value(self, name: str) -> Tensor:
        name = name.strip("[] ")
        if bits := re.fullmatch(r"0f([0-9A-F]{8})", name):  # of a number in fp32
            return self._all(int(bits[1], 16))
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", name):
            return self._all(int(name.rstrip("U"), 0))
        return self._registers[name]

    def _address(self, name: str) -> Tensor:
        base, _, offset = name.strip("[] ").partition("+")
        return self._value(base.strip()) + int(offset or "0")

    def _put(self, name: str, value: Tensor, active: Tensor) -> None:
        before = self._registers.get(name)
        self._registers[name] = value if before is None or active.all() else torch.where(active, value, before)

    def _run(self, opcode: str, operands: list[str], active: Tensor) -> None:
        last = opcode.rpartition(".")[2]
        names = _names(operands[0])
        if opcode.startswith("cp.async.bulk.tensor"):
            self._copy_box(operands, active)
        elif opcode.startswith("cp.async"):
            self._copy(operands, active)
        elif opcode.startswith(("ld.shared", "ld.global")):
            size = int(last[1:]) // 8
            address = self._address(operands[1])
            for number, name in enumerate(names):
                place = address + size * number
                value = _load(self._shared, place, size) if "shared" in opcode else self._read(place, size, active)
                self._put(name, value, active)
        elif opcode.startswith(("st.shared", "st.global")):
            self._store("shared" in opcode, operands, int(last[1:]) // 8, active)
        elif opcode.startswith("ldmatrix.sync.aligned.m8n8.x4"):
            # Each eight threads tell where a matrix's rows are; a thread gets two neighbours of a row of each.
            rows = self._address(operands[1]).view(-1, len(names), 8)[self._threads // 32, :, self._threads % 32 // 4]
            for number, name in enumerate(names):
                self._put(name, _load(self._shared, rows[:, number] + self._threads % 4 * 4, 4), active)
        elif opcode == "elect.sync":
            self._put(operands[0].split("|")[1], (self._threads % 32 == 0).long(), active)
        elif opcode.startswith("shfl.sync.idx"):
            self._put(names[0], self._value(operands[1])[self._threads // 32 * 32], active)
        elif opcode.startswith("shfl.sync.bfly"):
            self._put(names[0], self._value(operands[1])[self._threads ^ self._value(operands[2])], active)
        elif opcode.startswith("mov") and len(names) > 1:
            whole, width = self._value(operands[1]), int(last[1:]) // len(names)
            for number, name in enumerate(names):
                self._put(name, (whole >> (width * number)) & ((1 << width) - 1), active)
        elif opcode.startswith("mov") and operands[1].startswith("{"):
            parts = _names(operands[1])
            width = int(last[1:]) // len(parts)
            self._put(names[0], sum((self._value(part) << width * n for n, part in enumerate(parts))), active)
        else:
            self._put(names[0], meaning(opcode, *(self._value(name) for name in operands[1:])), active)

    def _read(self, address: Tensor, size: int, active: Tensor) -> Tensor:
        if not active.any():
            return torch.zeros_like(address)
        (number,) = set((address[active] >> 40).tolist())
        return _load(self._memory[number], torch.where(active, address & ((1 << 40) - 1), 0), size)

    def _store(self, shared: bool, operands: list[str], size: int, active: Tensor) -> None:
        address = self._address(operands[0])[active]
        memory = self._shared
        if not shared and len(address):
            (number,) = set((address >> 40).tolist())
            memory, address = self._memory[number], address & ((1 << 40) - 1)
        for number, name in enumerate(_names(operands[1])):
            value = self._value(name)[active]
            for place in range(size):
                memory[address + size * number + place] = (value >> (8 * place) & 0xFF).to(torch.uint8)

    def _copy(self, operands: list[str], active: Tensor) -> None:
        to, source = self._address(operands[0]), self._address(operands[1])
        size = int(operands[2], 0)
        for thread in active.nonzero().flatten().tolist():
            place = int(source[thread])
            if self._value(operands[3])[thread] if len(operands) > 3 else True:
                memory, start = self._memory[place >> 40], place & ((1 << 40) - 1)
                self._shared[int(to[thread]) :][:size] = memory[start:][:size]

    def _copy_box(self, operands: list[str], active: Tensor) -> None:
        to = self._address(operands[0])
        parts = _names(operands[1].strip("[]").split(",", 1)[1])
        source = self._value(operands[1].strip("[] ").split(",")[0])
        for thread in active.nonzero().flatten().tolist():
            of = self._maps[int(source[thread])]
            column, row = (int(self._value(part)[thread]) for part in parts)
            height, width = of.box
            box = of.rows_RB[row : row + height, column * of.itemsize :][:, :width]
            rows, bytes_of_row = torch.arange(len(box))[:, None], torch.arange(width)[None, :]
            self._shared[_swizzled(int(to[thread]) + rows * width + bytes_of_row, width)] = box

    def _product(self, opcode: str, operands: list[str]) -> Product:
        """A thread's numbers of A are two neighbours each: of its row, 8 rows below; the same of 8 columns later."""
        warps = self._two_each(operands[1]).view(-1, 8, 4, 2, 2, 2)  # row of 8, thread of 4, column half, row half
        a = warps.permute(0, 4, 1, 3, 2, 5).reshape(-1, 16)
        if wide := re.match(r"wgmma.*m64n(\d+)k16", opcode):
            return Product(a, self._described(int(self._value(operands[2])[0]), int(wide[1])))
        warps = self._two_each(operands[2]).view(-1, 8, 4, 2, 2)  # column of 8, thread of 4, row half
        b = warps.permute(0, 3, 2, 4, 1).reshape(-1, 16, 8)
        assert (b == b[0]).all(), "warps have parts of B"
        return Product(a, b[0])

    def _two_each(self, names: str) -> Tensor:
        registers = torch.stack([self._value(name) for name in _names(names)], 1)
        return torch.stack((registers & 0xFFFF, registers >> 16), 2)

    def _described(self, description: int, columns: int) -> Tensor:
        """B in shared memory, rows of 128 bytes, eight of them in a swizzled block."""
        start, apart = (description & 0x3FFF) << 4, (description >> 32 & 0x3FFF) << 4
        assert description >> 62 & 3 == 1, "128 bytes"
        n, k = torch.arange(columns)[None, :], torch.arange(16)[:, None]
        address = start + n // 8 * apart + n % 8 * 128 + 2 * k
        return _load(self._shared, _swizzled(address, 128), 2)


def _parse(ptx: str) -> tuple[list[tuple[str, str, list[str]]], dict[str, int]]:
    """Instructions, each with its condition and operands, and where labels are."""
    lines: list[tuple[str, str, list[str]]] = []
    labels: dict[str, int] = {}
    body = ptx[ptx.index("// %bb.0:") :]
    for line in re.sub(r"//.*", "", body).splitlines():
        if label := re.fullmatch(r"\s*(\S+):\s*", line):
            labels[label[1]] = len(lines)
            continue
        for statement in line.split(";"):
            found = re.fullmatch(r"\s*(?:\{\s*)?(?:@(!?[%\w]+)\s+)?([a-z][\w.:]*)\s*(.*?)\s*", statement)
            if found:
                lines.append((found[1] or "", found[2], _operands(found[3])))
    return lines, labels


def _operands(text: str) -> list[str]:
    """Parted by commas that are in no brackets."""
    return [part.strip() for part in re.findall(r"(?:\[[^\]]*\]|\{[^}]*\}|[^,\[{])+", text) if part.strip()]


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.strip(" {}").split(",")]


def _load(memory: Tensor, address: Tensor, size: int) -> Tensor:
    return sum((memory[address + place].long() << (8 * place) for place in range(size)), torch.zeros_like(address))


def _swizzled(address: Tensor, width: int) -> Tensor:
    """Sixteen bytes change places in rows of 128, or of 64 or 32."""
    places = {128: 7, 64: 3, 32: 1}[width]
    return address ^ (address >> 7 & places) << 4
