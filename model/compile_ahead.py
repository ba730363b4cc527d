"""The kernels of an engine's steps, compiled before anybody launches them: by processes without a GPU, each some.

What a runner launches is launched here for tensors without memory, so that Triton's cache has it; what should be
missing there all the same is compiled when it is first launched. Knows what steps there are; which processes do this,
and when, is the engine's matter.
"""

import hashlib
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

import tercet.model
import tercet.triton_kernels
from tercet.model.adapters import Ranks, empty_adapters
from tercet.model.cache_tables import CacheTables, of_few_layers
from tercet.model.config import ModelConfig
from tercet.model.decoder import Decoder
from tercet.model.eagle_config import EagleConfig
from tercet.model.eagle_shard import OFFSETS, EagleShard
from tercet.model.extras import Extras
from tercet.model.forward_step import forward_step
from tercet.model.guess_head import with_guess_head
from tercet.model.image_slots import ImageSlots
from tercet.model.kv_cache import make_kv_cache
from tercet.model.padded_shapes import Shapes
from tercet.model.parallel import Group
from tercet.model.rounded_rows import with_rounded_rows
from tercet.model.runner_settings import GuessSettings
from tercet.model.sampler import sample_step_into
from tercet.model.scaled_rows import Kept, StoredAs
from tercet.model.shard import LAYERS
from tercet.model.slots import make_slot_table
from tercet.model.states import make_states, num_places
from tercet.model.step_buffers import StepBuffers, max_row_words
from tercet.model.step_end import StepEnd
from tercet.model.token_logs import warm_up_prompt_logs
from tercet.model.trial_shapes import TrialShapes
from tercet.model.vision import empty_vision
from tercet.model.vision_config import VisionConfig
from tercet.model.weights import empty_weights
from tercet.triton_kernels.compile_only import compiling_for
from tercet.triton_kernels.copy_pages import copy_pages
from tercet.triton_kernels.dispatch import Gpu
from tercet.triton_kernels.inbox import WordInboxes
from tercet.triton_kernels.sample import TokenRing
from tercet.triton_kernels.write_plan import RunSizes, write_plan, write_small_plan

_META = torch.device("meta")
_NUM_PAGES = 1024
"""Any: no kernel is another for another number, and there is no memory behind them."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What a rank's steps depend on; names as in the engine's configuration."""

    config: ModelConfig
    tables: CacheTables
    tensor_parallel_size: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    deterministic: bool
    kept: Kept
    """As `load_weights` is told."""
    guesses: GuessSettings | None
    eagle: EagleConfig | None
    """Of a layer that guesses from another checkpoint."""
    adapters: Ranks | None
    rounds_rows: bool
    """As `Opened` has it."""
    num_landings: int
    """Places for the tokens of steps, as `num_landings` in landings.py has it."""
    vision: VisionConfig | None = None
    """Of a model that sees."""
    most_image_tokens: int = 0
    """As `RunnerSettings` has it."""


class Claims:
    """Who compiles what, of processes with a folder in common: whoever asks first. Some kernels take ten times as long
    as others."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mine: dict[str, bool] = {}

    def __call__(self, what: str) -> bool:
        if what not in self._mine:
            name = hashlib.sha256(what.encode()).hexdigest()
            try:
                self._folder.joinpath(name).touch(exist_ok=False)
                self._mine[what] = True
            except FileExistsError:
                self._mine[what] = False
        return self._mine[what]


class _AbsentRanks(Group):
    """What one rank launches, of several of which none is there: NCCL's part is left out."""

    def all_reduce(self, x_TD: Tensor, *, deterministic: bool = False) -> Tensor:
        if self.inboxes_for(x_TD) or (deterministic and self.size > 2):
            return super().all_reduce(x_TD, deterministic=deterministic)
        return x_TD

    def stack(self, x: Tensor) -> Tensor:
        if x.dtype == torch.int32 and isinstance(self.inboxes_for(x), WordInboxes):
            return super().stack(x)
        return x.new_empty(self.size, *x.shape)

    def min(self, value: int) -> int:
        return value


def kernel_cache() -> Path:
    """Where Triton keeps what it has compiled."""
    return Path(triton.knobs.cache.dir)


def fingerprint(steps: Steps, gpu: Gpu) -> str:
    """Of all that decides which kernels there are, this code included."""
    digest = hashlib.sha256(repr((triton.__version__, steps, gpu)).encode())
    for package in (tercet.model, tercet.triton_kernels):
        for folder in package.__path__:
            for file in sorted(Path(folder).rglob("*")):
                if file.suffix in (".py", ".json"):
                    digest.update(file.read_bytes())
    return digest.hexdigest()[:32]


def compile_ahead(steps: Steps, gpu: Gpu, claims: Claims) -> int:
    """Compile what no other process has claimed; returns how many kernels those are."""
    with torch.inference_mode(), compiling_for(gpu, claims) as kernels:
        for rank in range(steps.tensor_parallel_size):  # sums over ranks are other kernels on each
            launch_all(steps, rank)
    return len({kernel.hash for kernel in kernels})


def launch_all(steps: Steps, rank: int) -> None:
    """Each kind of step that a rank may run, and what a runner launches beside its steps."""
    config, kept = _few_layers(steps.config, steps.kept)
    size, dtype, max_rows = steps.tensor_parallel_size, steps.dtype, steps.max_num_seqs
    where: dict[str, Any] = {"dtype": dtype, "device": _META}
    group = _AbsentRanks(rank, size, _META)
    longest = Shapes(max_rows, steps.max_num_batched_tokens).max_tokens
    group.connect(config.hidden_size, dtype, longest, 2 * config.num_layers)
    on_rank: dict[str, Any] = {"rank": rank, "size": size, "interleaved": True, **where}
    weights = empty_weights(config, kept=kept, **on_rank)
    if steps.eagle is not None:
        few = replace(steps.eagle, hears=tuple(range(config.num_layers))[:3])
        weights = replace(weights, guesser=EagleShard(few, (OFFSETS,), **on_rank).empty())
    weights = with_guess_head(weights)
    if steps.rounds_rows:
        weights = with_rounded_rows(weights)
    adapters = () if steps.adapters is None else empty_adapters(steps.adapters, config, **on_rank)
    guesses = steps.guesses
    ways: dict[str, Any] = {"deterministic": steps.deterministic, "guesses": guesses is not None, "adapters": adapters}
    vision = see = None
    if steps.vision is not None:
        vision = empty_vision(steps.vision, dtype, _META, deterministic=steps.deterministic)
        vision.warm_up(steps.most_image_tokens)
    tables = of_few_layers(steps.tables, config)
    decoder = Decoder(config, weights, group, steps.max_model_len, vision=vision, tables=tables, **ways)
    if vision is not None:
        see = ImageSlots(decoder, vision, longest, with_graphs=False).attach
    kv_cache = make_kv_cache(config, _NUM_PAGES, steps.page_size, steps.cache_dtype, _META, size, tables)
    table = make_slot_table(max_rows, steps.max_model_len, steps.page_size, _META, len(tables.windows))
    trials = None if guesses is None else TrialShapes(guesses)
    most_tried = 0 if trials is None else trials.max_rows
    states = make_states(config, num_places(max_rows, 0), dtype, _META, size, most_tried)
    of_model = kv_cache.layers[: config.num_caching_layers]
    shapes = decoder.shapes(of_model, max_rows, steps.max_num_batched_tokens, trials)
    extras = Extras(max_rows + 1, _META, config.vocab_size)
    base = max_row_words(shapes.max_rows)
    words_W = torch.empty(2 * base, dtype=torch.int32, device=_META)
    buffers = StepBuffers(shapes.max_rows, shapes.max_tokens, words_W, table.num_page_tables)
    places_KR = torch.empty(steps.num_landings, shapes.max_rows, dtype=torch.int32, device=_META)
    ring = TokenRing(places_KR, torch.empty(1, dtype=torch.int32, device=_META))
    end = StepEnd(decoder, guesses, table, kv_cache, shapes, states)
    for shape in shapes.for_compilers():
        hearing = end.hearing()
        sees = see if shape.with_images else None
        forwarded = forward_step(decoder, of_model, table, buffers, shape, guesses, states, hearing, sees)
        sample_step_into(ring, decoder, forwarded, table, shape=shape, extras=extras)
        end.run(forwarded, shape)
    warm_up_prompt_logs(decoder, table)
    write_plan(words_W, words_W, RunSizes(0, base, 0, 0, 0), table, _NUM_PAGES)
    write_small_plan(words_W, words_W, base, table, _NUM_PAGES)
    pairs_P2 = words_W[base : base + 2].view(-1, 2)
    for block in kv_cache.blocks:
        copy_pages(block, pairs_P2)
    if states is not None:
        states.copy(pairs_P2)
    extras.apply(words_W, base, 1)
    extras.masks.compile()


def _few_layers(config: ModelConfig, kept: Kept) -> tuple[ModelConfig, Kept]:
    """The same model with one layer of each kind, and the last: kernels are the same for all rotary tables. Of the
    first one's kind another where blocks' ends are normed: it finds what was added ahead of it still to be added."""
    of_layers: defaultdict[str, dict[str, StoredAs]] = defaultdict(dict)
    for name, way in kept.items():
        layer, _, matrix = name.removeprefix(LAYERS).partition(".")
        of_layers[layer][matrix] = way
    *others, last = (
        (
            (window, config.layer_heads[layer]),
            config.experts_of(layer),
            config.carried_of(layer),
            layer in config.bare_layers,
            tuple(sorted(of_layers[str(layer)].items())),
        )
        for layer, window in enumerate(config.layer_windows)
    )
    again = others[:1] if config.norms.behind_attention is not None and others[:1] != [last] else []
    few = (*again, *dict.fromkeys(others), last)
    experts = config.experts
    if experts is not None:
        experts = replace(experts, layers=frozenset(layer for layer, (_, many, *_) in enumerate(few) if many))
    carrying = frozenset(layer for layer, (_, _, carries, *_) in enumerate(few) if carries)
    bare_layers = frozenset(layer for layer, (*_, bare, _) in enumerate(few) if bare)
    carried = None if config.carried is None else replace(config.carried, layers=carrying)
    windows, heads = zip(*(attending for attending, *_ in few), strict=True)
    few_kept = {f"{LAYERS}{n}.{matrix}": way for n, (*_, ways) in enumerate(few) for matrix, way in ways}
    if (guesser := config.guesser_read) is not None:
        names = guesser.layer, guesser.join
        few_kept |= {name: way for name, way in kept.items() if name.startswith(names)}
    config = replace(
        config, num_layers=len(few), layer_windows=windows, layer_heads=heads, layer_ropes=(), experts=experts,
        carried=carried, bare_layers=bare_layers,
    )  # fmt: skip
    return config, few_kept
