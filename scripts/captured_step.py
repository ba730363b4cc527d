"""One rank's whole step of a model on its GPU, captured and timed: no scheduler, no plan, random weights.

Ranks of a group do all of it together. One GPU can play one of several: `share_of_rank` is what each computes as a
model of its own, with nothing to sum.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from tercet.model.adapters import LayerAdapters, Ranks, empty_adapters
from tercet.model.config import ModelConfig
from tercet.model.decoder import Decoder
from tercet.model.dummy import DummyCheckpoint
from tercet.model.eagle_config import EagleConfig
from tercet.model.eagle_shard import OFFSETS, EagleShard
from tercet.model.extras import Extras
from tercet.model.forward_step import forward_step
from tercet.model.guess_head import with_guess_head
from tercet.model.kv_cache import cache_dtype, make_kv_cache
from tercet.model.load import kept_as_stored, resolve_dtype
from tercet.model.padded_shapes import Shapes
from tercet.model.parallel import Group
from tercet.model.quantization import Quantization
from tercet.model.rounded_rows import with_rounded_rows
from tercet.model.runner_settings import GuessSettings
from tercet.model.sampler import sample_step_into
from tercet.model.slots import make_slot_table
from tercet.model.states import make_states, num_places
from tercet.model.step_buffers import StepBuffers, write_rows
from tercet.model.step_end import StepEnd
from tercet.model.step_shape import StepShape
from tercet.model.trial_shapes import TrialShapes
from tercet.model.weights import carry_out, load_weights
from tercet.triton_kernels.low_rank import LowRank
from tercet.triton_kernels.sample import TokenRing

_PAGE_SIZE = 64
MOST_TOKENS = 8192
"""Of a prompt."""
_GROWTH = 512
"""A step's rows get longer by a token each time that it runs."""
_RUN_MS = 20.0
_ROUNDS = 4
_FAR = 1.05
"""By how much a round may exceed the least of several."""


def share_of_rank(config: ModelConfig, size: int, num_layers: int) -> ModelConfig:
    """What one of `size` ranks computes of a model cut to its first layers, as a model."""
    config.check_tensor_parallel(size)
    experts = config.experts
    if experts is not None:
        experts = replace(experts, intermediate_size=experts.intermediate_size // size)
    carried = config.carried
    if carried is not None:
        layers = frozenset(layer for layer in carried.layers if layer < num_layers)
        carried = replace(carried.of_rank(size), layers=layers)
    return replace(
        config,
        experts=experts,
        carried=carried,
        bare_layers=frozenset(layer for layer in config.bare_layers if layer < num_layers),
        num_layers=num_layers,
        num_heads=config.num_heads // size,
        num_kv_heads=config.heads.of_rank(size),
        intermediate_size=config.intermediate_size // size,
        vocab_size=config.vocab_per_rank(size),
        layer_windows=config.layer_windows[:num_layers],
        layer_ropes=config.layer_ropes[:num_layers],
        layer_heads=tuple(replace(heads, count=heads.of_rank(size)) for heads in config.layer_heads[:num_layers]),
    )


def _random_adapters(ranks: Ranks, config: ModelConfig, group: Group, dtype: torch.dtype) -> tuple[LayerAdapters, ...]:
    sizes = {"rank": group.rank, "size": group.size}
    layers = empty_adapters(ranks, config, **sizes, dtype=dtype, device=group.device, interleaved=True)
    for layer in layers:
        for pairs in (layer.qkv, layer.o, layer.gate_up, layer.down):
            if isinstance(pairs, LowRank):
                pairs.down_ARK.normal_(std=0.01)
                pairs.up_ANQ.normal_(std=0.01)
    return layers


class StepModel:
    """A model with random weights, and memory for its steps: that of the one captured last, whose plan it holds."""

    def __init__(
        self,
        config: ModelConfig,
        group: Group,
        max_rows: int,
        context: int,
        kv_cache_dtype: str = "auto",
        quantization: Quantization | None = None,
        num_guesses: int = 0,
        adapters: Ranks | None = None,
        eagle: EagleConfig | None = None,
        rounds_rows: bool = False,
    ) -> None:
        """For steps of up to `max_rows` rows with `context` tokens behind each, or of prompts. `num_guesses`: for steps
        in which each row tries so many; `adapters`: rows go through these by turns; `eagle`: of a layer
        that guesses."""
        self._group = group
        self._guesses = None
        if num_guesses:
            looked_up = None if config.guesses else (2, 4)
            self._guesses = GuessSettings(num_guesses=num_guesses, looked_up=looked_up, most_slots=max_rows)
        device = group.device
        dtype = resolve_dtype("auto", config, device)
        group.connect(config.hidden_size, dtype)
        tensors = DummyCheckpoint(config, 0, dtype, device, quantization)
        weights = load_weights(
            tensors, config, rank=group.rank, size=group.size, dtype=dtype, device=device,
            kept=kept_as_stored(tensors, dtype, device, size=group.size), interleaved=True,
        )  # fmt: skip
        if eagle is not None:
            shard = EagleShard(eagle, (OFFSETS,), group.rank, group.size, dtype, device, interleaved=True)
            carry_out(shard.moves, DummyCheckpoint({move.name: move.shape for move in shard.moves}, 0, dtype, device))
            weights = replace(weights, guesser=shard.filled())
        length = max(context + _GROWTH, MOST_TOKENS)
        self._num_adapters = adapters.num_adapters if adapters else 0
        of_layers = _random_adapters(adapters, config, group, dtype) if adapters else ()
        weights = with_guess_head(with_rounded_rows(weights) if rounds_rows else weights)
        self._decoder = Decoder(config, weights, group, length, adapters=of_layers)
        self._context = context
        pages_each = -(-(context + _GROWTH) // _PAGE_SIZE)
        num_pages = max(max_rows * pages_each, MOST_TOKENS // _PAGE_SIZE) + 1
        cells = cache_dtype(kv_cache_dtype, dtype, device)
        self._kv_cache = make_kv_cache(config, num_pages, _PAGE_SIZE, cells, device, group.size)
        for layer in self._kv_cache.layers:  # to read zeros takes a fifth less power, and the clock follows power
            layer.copy_(torch.randn(layer.shape, dtype=dtype, device=device))
        most_tried = 0 if self._guesses is None else TrialShapes(self._guesses).max_rows
        self._of_model = self._kv_cache.layers[: config.num_caching_layers]
        self._states = make_states(config, num_places(max_rows, 0), dtype, device, group.size, most_tried)
        self._table = make_slot_table(max_rows, length, _PAGE_SIZE, device)
        shuffled = 1 + torch.randperm(num_pages - 1, dtype=torch.int32, device=device)
        self._table.page_table_SM[0, : MOST_TOKENS // _PAGE_SIZE] = shuffled[: MOST_TOKENS // _PAGE_SIZE]
        self._decode_pages = shuffled[: max_rows * pages_each].view(max_rows, pages_each)
        self._table.token_ids_SL.random_(0, min(10_000, config.vocab_size))
        self._table.max_length_S.fill_(length)
        self._table.done_S[:max_rows] = 0  # the last slot is the padding's
        self._words_W = torch.zeros(8 * (max_rows + 64), dtype=torch.int32, device=device)
        most = max_rows * (1 + num_guesses) + 64
        self._buffers = StepBuffers(most, max_rows + MOST_TOKENS, self._words_W)
        trials = None if self._guesses is None else TrialShapes(self._guesses)
        shapes = self._decoder.shapes(self._of_model, max_rows, MOST_TOKENS, trials)
        self._end = StepEnd(self._decoder, self._guesses, self._table, self._kv_cache, shapes, self._states)
        self._extras = Extras(max_rows + 1, device, config.vocab_size)
        places = torch.zeros(2, most, dtype=torch.int32, pin_memory=True)
        self._ring = TokenRing(places, torch.zeros(1, dtype=torch.int32, device=device))
        self._stream = torch.cuda.Stream(device)

    def decode(self, num_rows: int) -> "CapturedStep":
        """A step of one more token for each of so many rows."""
        self._table.page_table_SM[:num_rows, : self._decode_pages.shape[1]] = self._decode_pages[:num_rows]
        shapes = self._decoder.shapes(self._of_model, num_rows, MOST_TOKENS)
        shape = shapes.of_length(StepShape(num_rows, 0, 0), self._context + _GROWTH)
        if self._num_adapters:
            turns = torch.arange(num_rows, dtype=torch.int32, device=self._group.device) % self._num_adapters
            self._table.adapter_S[:num_rows] = turns
            shape = shape._replace(adapted=True)
        return self._capture(shape, range(num_rows), [])

    def trial(self, num_slots: int) -> "CapturedStep":
        """A step in which each of so many slots tries guesses, which are seldom right here."""
        assert self._guesses is not None
        self._table.page_table_SM[:num_slots, : self._decode_pages.shape[1]] = self._decode_pages[:num_slots]
        trials = TrialShapes(self._guesses)
        shapes = self._decoder.shapes(self._of_model, num_slots, MOST_TOKENS, trials)
        shape = shapes.of_length(trials.exact(num_slots), self._context + _GROWTH)
        return self._capture(shape, range(num_slots), [])

    def prompt(self, num_tokens: int) -> "CapturedStep":
        """A step of one prompt, as the engine pads it."""
        return self._capture(Shapes(64, MOST_TOKENS).fit(0, 1, num_tokens), [], [(0, 0, num_tokens)])

    def _capture(
        self, shape: StepShape, decodes: Sequence[int], chunks: Sequence[tuple[int, int, int]]
    ) -> "CapturedStep":
        lengths_S = torch.full_like(self._table.length_S, self._context)
        for slot, start, length in chunks:
            lengths_S[slot] = start + length
        words = np.zeros(len(self._words_W), np.int32)
        rows = np.array(chunks, np.int32).reshape(-1, 3).T
        write_rows(words, shape, np.array(decodes, np.int32), rows, len(self._table.length_S) - 1)
        self._words_W.copy_(torch.from_numpy(words))
        self._table.num_prompt_S.copy_(lengths_S)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream), torch.inference_mode():
            graph.capture_begin(capture_error_mode="relaxed")  # new kernels are loaded on the way
            try:
                self._run(shape)
            finally:
                graph.capture_end()
        return CapturedStep(graph, lambda: self._table.length_S.copy_(lengths_S), self._group)

    def _run(self, shape: StepShape) -> None:
        tables = self._of_model, self._table, self._buffers
        forwarded = forward_step(self._decoder, *tables, shape, self._guesses, self._states, self._end.hearing())
        sample_step_into(self._ring, self._decoder, forwarded, self._table, shape=shape, extras=self._extras)
        self._end.run(forwarded, shape)


class CapturedStep:
    """A graph that can be timed again and again, on all ranks as often."""

    def __init__(self, graph: torch.cuda.CUDAGraph, rewind: Callable[[], object], group: Group) -> None:
        """`rewind`: makes rows as long again as they were."""
        self._graph = graph
        self._rewind = rewind
        self._group = group
        self._replays = group.min(max(2, min(40, int(_RUN_MS / self.milliseconds(1) + 1))))

    def microseconds(self, at_most: float = math.inf) -> float:
        """Of one step: the least of some rounds of replays, of the slowest rank; one round if far above `at_most`."""
        least = self._round()
        if least > at_most * _FAR:
            return least
        return min(least, *(self._round() for _ in range(_ROUNDS - 1)))

    def _round(self) -> float:
        """Of the slowest rank, so that all do the same."""
        return -self._group.min(-round(self.milliseconds(self._replays) * 1e5)) / 100

    def milliseconds(self, replays: int) -> float:
        """Of one step: the mean of so many in a row, behind one that is not timed."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._rewind()
        self._graph.replay()
        start.record()
        for _ in range(replays):
            self._graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / replays
