"""All adapters of one rank: the places of their matrices, layer by layer, and how they are filled.

An adapter changes some linear modules of some layers. The modules of one product (q, k and v, gate and up) are of one
rank, the highest of any, and have rows of the first matrix behind each other: one pair of products serves them all.
Knows which rows and columns are this rank's; what a file holds is `adapter_file.py`'s matter.

Shape suffixes: A adapters, Q rank of a module, R of a product's modules, K its reduced size, N its output size on this
rank.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import torch

from tercet.model.adapter_file import AdapterFile
from tercet.model.blocks import Delta, Mamba
from tercet.model.config import ModelConfig
from tercet.model.delta_shard import delta_rows
from tercet.model.linear import Pairs, reorder_pairs
from tercet.model.places import HeadsInPairs, Move, Rows
from tercet.model.shard import ShardBuilder, Stack
from tercet.model.step_shape import round_up
from tercet.model.weights import fill
from tercet.triton_kernels.low_rank import RANK_MULTIPLE, LowRank


@dataclass(frozen=True)
class Ranks:
    """What kernels depend on."""

    num_adapters: int
    of_modules: Mapping[str, int]
    """By module, such as "self_attn.q_proj": the highest of any adapter in any layer. Others are changed by none."""


@dataclass(frozen=True)
class LayerAdapters:
    """One layer's; None where no adapter changes a product."""

    qkv: Pairs | None = None
    o: Pairs | None = None
    gate_up: Pairs | None = None
    down: Pairs | None = None

    @property
    def count(self) -> int:
        """Of adapters."""
        pairs = self.qkv, self.o, self.gate_up, self.down
        return max((len(some) for some in pairs if some is not None), default=0)


@dataclass(frozen=True)
class _Rows:
    """Rows of a module's output that this rank has, and which of the product's they are."""

    first: int
    place: slice
    heads: HeadsInPairs | None = None
    """If they come in another order there."""


@dataclass(frozen=True)
class _Module:
    """One linear module of a layer on this rank. Sizes are of the whole."""

    name: str
    num_in: int
    num_out: int
    first_in: int
    rows: tuple[_Rows, ...]


@dataclass(frozen=True)
class _Product:
    """Modules that one product computes, whose sizes are this rank's."""

    modules: tuple[_Module, ...]
    num_in: int
    num_out: int

    def rank(self, ranks: Ranks) -> int:
        """Of each module; 0 where no adapter changes any."""
        return round_up(max(ranks.of_modules.get(module.name, 0) for module in self.modules), RANK_MULTIPLE)

    @property
    def starts(self) -> tuple[int, ...]:
        """The first row of each module."""
        return tuple(module.rows[0].place.start for module in self.modules)


def module_sizes(config: ModelConfig, layer: int) -> dict[str, tuple[int, int]]:
    """Rows and columns of the linear modules of a layer that an adapter may change, by their names in it."""
    dense = config.has_mlp(layer)
    return {
        module.name: (module.num_out, module.num_in)
        for product in _products(config, layer, 0, 1, interleaved=False).values()
        for module in product.modules
        if dense or not module.name.startswith("mlp.")
    }


def ranks_of(adapters: Sequence[AdapterFile], config: ModelConfig) -> Ranks:
    """ValueError names what an adapter changes that this model does not have, or of another size."""
    if isinstance(config.carried, Mamba):
        raise ValueError(f"--adapter: models of family {config.family} with Mamba layers take none; want none")
    sizes = [module_sizes(config, layer) for layer in range(config.num_layers)]
    highest: dict[str, int] = {}
    for adapter in adapters:
        shapes = adapter.tensors.shapes()
        for (layer, name), pair in adapter.pairs.items():
            if layer >= config.num_layers or name not in sizes[layer]:
                dense = ", ".join(dict.fromkeys(module for modules in sizes for module in modules))
                wanted = f"modules {dense} of layers 0 to {config.num_layers - 1}, and no experts"
                raise ValueError(f"{adapter.tensors.source}: tensor {pair.down} fits no linear layer; want {wanted}")
            shape = shapes[pair.up][0], shapes[pair.down][1]
            if shape != sizes[layer][name]:
                raise ValueError(
                    f"{adapter.tensors.source}: tensors {pair.up} and {pair.down} change a matrix {list(shape)}; the "
                    f"model's is {list(sizes[layer][name])}"
                )
            highest[name] = max(highest.get(name, 0), pair.rank)
    return Ranks(len(adapters), dict(sorted(highest.items())))


def empty_adapters(
    ranks: Ranks, config: ModelConfig, *, rank: int, size: int, dtype: torch.dtype, device: torch.device,
    interleaved: bool,
) -> tuple[LayerAdapters, ...]:  # fmt: skip
    """Of each layer, with nothing in it. `rank`: the process's, of `size`."""

    def place(product: _Product) -> LowRank | None:
        count, columns = ranks.num_adapters, product.rank(ranks)
        if not columns:
            return None
        down_ARK = torch.zeros(count, columns * len(product.modules), product.num_in, dtype=dtype, device=device)
        up_ANQ = torch.zeros(count, product.num_out, columns, dtype=dtype, device=device)
        return LowRank(down_ARK, up_ANQ, product.starts)

    return tuple(
        LayerAdapters(**{
            name: None if name in ("gate_up", "down") and not config.has_mlp(layer) else place(product)
            for name, product in _products(config, layer, rank, size, interleaved=interleaved).items()
        })
        for layer in range(config.num_layers)
    )  # fmt: skip


def load_adapters(
    adapters: Sequence[AdapterFile | None], ranks: Ranks, config: ModelConfig, *, rank: int, size: int,
    dtype: torch.dtype, device: torch.device, interleaved: bool,
) -> tuple[LayerAdapters, ...]:  # fmt: skip
    """The same, read from their files, for which `ranks` have room; None: a place with nothing in it. Scales go into
    the second matrix of each pair."""
    sizes = {"rank": rank, "size": size}
    layers = empty_adapters(ranks, config, **sizes, dtype=dtype, device=device, interleaved=interleaved)
    for layer, places in enumerate(layers):
        for name, product in _products(config, layer, **sizes, interleaved=interleaved).items():
            if (low_rank := getattr(places, name)) is not None:
                for index, adapter in enumerate(adapters):
                    if adapter is None:
                        continue
                    _fill_product(adapter, index, layer, product, ranks, low_rank)
    return layers


def adapters_for_cpu(layers: Sequence[LayerAdapters]) -> tuple[LayerAdapters, ...]:
    """The same in the order the CPU reads fastest; on a GPU as they are."""

    def reordered(pairs: Pairs | None) -> Pairs | None:
        return reorder_pairs(pairs) if isinstance(pairs, LowRank) else pairs

    return tuple(
        LayerAdapters(reordered(one.qkv), reordered(one.o), reordered(one.gate_up), reordered(one.down))
        for one in layers
    )


def _fill_product(
    adapter: AdapterFile, index: int, layer: int, product: _Product, ranks: Ranks, low_rank: LowRank
) -> None:
    shapes = adapter.tensors.shapes()
    for place, module in enumerate(product.modules):
        if (pair := adapter.pairs.get((layer, module.name))) is not None:
            first = place * product.rank(ranks)
            ends = module.first_in, module.first_in + product.num_in
            down = low_rank.down_ARK[index, first : first + pair.rank]
            fill(Move(pair.down, shapes[pair.down], 1, *ends, down), adapter.tensors)
            for rows in module.rows:
                into = low_rank.up_ANQ[index, rows.place, : pair.rank]
                ends = rows.first, rows.first + len(into)
                up = Move(pair.up, shapes[pair.up], 0, *ends, into, factor=pair.scale, heads=rows.heads)
                fill(up, adapter.tensors)


def _products(config: ModelConfig, layer: int, rank: int, size: int, *, interleaved: bool) -> dict[str, _Product]:
    """Of a layer, by their names in `LayerAdapters`."""
    builder = ShardBuilder(config, rank, size, torch.float32, torch.device("meta"), {})
    heads = config.layer_heads[layer]
    mlp_size = config.mlp_size(heads)
    hidden, name, attended = config.hidden_size, "self_attn.o_proj", config.attended_dim(heads)
    first: dict[str, _Product] = {}
    if (delta := config.carried_of(layer)) is not None:
        assert isinstance(delta, Delta)  # `ranks_of` refuses adapters for others
        first["qkv"] = _of_rows(delta_rows(builder.places, delta, "linear_attn."), hidden)
        name, attended = "linear_attn.out_proj", delta.value_heads * delta.value_dim
    elif config.gated_attention:
        first["qkv"] = _of_rows(builder.gated_rows("self_attn.", heads), hidden)
    elif config.latent is None:  # what makes latents, and queries of them, is left to the model
        first["qkv"] = _stacked(config, "self_attn.", builder.qkv(heads), in_turns=False)
    return first | {
        "o": _of_columns(name, hidden, attended, rank, size),
        "gate_up": _stacked(
            config, "mlp.", builder.gate_up(mlp_size), in_turns=interleaved and config.gates_in_product
        ),
        "down": _of_columns("mlp.down_proj", hidden, mlp_size, rank, size),
    }


def _of_rows(rows: Iterable[Rows], num_in: int) -> _Product:
    """Of rows of modules that read the same numbers. A module of which others' rows lie in between counts twice."""
    modules, first = [], 0
    for (name, whole), own in groupby(rows, key=itemgetter(0, 1)):
        places = []
        for _, _, start, count in own:
            places.append(_Rows(start, slice(first, first + count)))
            first += count
        modules.append(_Module(name.removesuffix(".weight"), num_in, whole, 0, tuple(places)))
    return _Product(tuple(modules), num_in, first)


def _stacked(config: ModelConfig, prefix: str, stack: Stack, *, in_turns: bool) -> _Product:
    """Of projections of the same numbers: modules of their own, or one module."""
    places, above, first, is_one = [], 0, 0, stack.name in config.stacked
    for index, part in enumerate(stack.parts):
        rows = slice(index, None, len(stack.parts)) if in_turns else slice(first, first + part.count)
        places.append(_Rows(part.start + (above if is_one else 0), rows, part.heads))
        above += part.whole
        first += part.count
    hidden = config.hidden_size
    if is_one:
        modules = [_Module(f"{prefix}{stack.name}_proj", hidden, above, 0, tuple(places))]
    else:
        modules = [
            _Module(f"{prefix}{part.name}_proj", hidden, part.whole, 0, (rows,))
            for part, rows in zip(stack.parts, places, strict=True)
        ]
    return _Product(tuple(modules), hidden, stack.count)


def _of_columns(name: str, num_out: int, whole: int, rank: int, size: int) -> _Product:
    """Of a product whose K is divided among ranks."""
    count = whole // size
    module = _Module(name, whole, num_out, rank * count, (_Rows(0, slice(0, num_out)),))
    return _Product((module,), count, num_out)
