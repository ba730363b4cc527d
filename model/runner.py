"""Runs plans on one rank: apply what a plan changes, then prepare, forward, sample and append, step by step.

Knows the order of things; what a step computes is the decoder's and the kernels' matter, and which requests it serves
is the scheduler's. On the CPU a step is done when `launch` returns; on a GPU nothing here waits for the device.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tercet.ipc.process_messages import Limits
from tercet.ipc.step_messages import Draw, Step
from tercet.model.beyond_tokens import BeyondTokens
from tercet.model.decoder import Decoder
from tercet.model.extras import Extras
from tercet.model.forward_step import Forwarded, forward_step
from tercet.model.graphs import StepGraphs
from tercet.model.image_slots import ImageSlots
from tercet.model.kv_cache import KvCache, num_pages_of, page_size_of
from tercet.model.landings import DoneLanding, DoneMidway, Landing, LandingRing, Midway, num_landings
from tercet.model.plan_copies import PlanCopies
from tercet.model.plan_rows import PlanRows
from tercet.model.plan_writer import PlanWriter
from tercet.model.runner_settings import RunnerSettings
from tercet.model.sampler import sample_step, sample_step_into
from tercet.model.shape_choice import ShapeChoice
from tercet.model.slots import NO_CHANGES, PlanBuffer, make_slot_table, split_changes
from tercet.model.states import States, state_tile
from tercet.model.step_buffers import StepBuffers, max_row_words, write_rows
from tercet.model.step_end import StepEnd
from tercet.model.step_shape import Part, StepShape
from tercet.model.token_logs import warm_up_prompt_logs
from tercet.model.trial_shapes import TrialShapes
from tercet.triton_kernels.write_plan import HEADER_WORDS

_CHANGE_WORDS = 2**18
"""Words of changes in one copy to the device; more go in several."""

Progress = Callable[[int, int], None]
"""Called with graphs captured and graphs to capture."""


class _Begun(NamedTuple):
    """A step on the CPU before its draw."""

    shape: StepShape
    computed: NDArray[np.intp]
    """Rows of its results that something is computed for."""
    forwarded: Forwarded | None
    """None without any."""


class Runner:
    """One rank's model, cache and slot table. On a GPU, the thread that makes it runs it, on a stream of its own."""

    def __init__(
        self, decoder: Decoder, kv_cache: KvCache, settings: RunnerSettings, progress: Progress | None = None,
        states: States | None = None,
    ) -> None:  # fmt: skip
        """`kv_cache`: as `make_kv_cache` makes it, a layer that guesses the last; `states`: as `make_states` does, for
        slots, padding and copies."""
        self._decoder = decoder
        self._kv_cache, self._states = kv_cache.layers[: decoder.config.num_caching_layers], states
        num_pages, page_size = num_pages_of(self._kv_cache), page_size_of(self._kv_cache)
        device, num_tables = kv_cache.device, len(decoder.tables.windows)
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            torch.cuda.set_stream(torch.cuda.Stream(device))
        self.table = make_slot_table(settings.max_num_seqs, settings.max_model_len, page_size, device, num_tables)
        self._dummy, self._guesses = settings.max_num_seqs, settings.guesses
        self._most_image_tokens = settings.most_image_tokens
        trials = None if self._guesses is None else TrialShapes(self._guesses)
        self._shapes = decoder.shapes(self._kv_cache, settings.max_num_seqs, settings.max_num_batched_tokens, trials)
        self._extras = Extras(settings.max_num_seqs + 1, device, decoder.config.vocab_size, settings.run_ahead)
        self._beyond = BeyondTokens(decoder, self.table, self._extras)
        self._images = None if decoder.vision is None else ImageSlots(
            decoder, decoder.vision, self._shapes.max_tokens, with_graphs=self._on_gpu and not settings.enforce_eager
        )  # fmt: skip
        self._choice = ShapeChoice(self._shapes, trials, self._extras, settings.max_num_seqs, self._images)
        self._row_words = max_row_words(self._shapes.max_rows)
        self._plan = PlanBuffer(self._row_words + HEADER_WORDS + _CHANGE_WORDS, device, settings.run_ahead + 2)
        self._writer = PlanWriter(self._plan, self._row_words, self.table, num_pages)
        self._copies = PlanCopies(self._plan, self._row_words, kv_cache, states)
        self._buffers = StepBuffers(self._shapes.max_rows, self._shapes.max_tokens, self._plan.words_W, num_tables)
        self._end = StepEnd(decoder, self._guesses, self.table, kv_cache, self._shapes, states)
        self._hidden_RD = decoder.room_for_rows(self._shapes.max_decodes)
        """Of the step that awaits its draw, or of the last step's chunks: graphs share what memory they have."""
        self._rows = PlanRows(np.zeros(0, np.int32), np.zeros((3, 0), np.int32))
        self._has_masks = False
        self._begun: _Begun | None = None
        """On the CPU: the step that awaits its draw."""
        self._shape = StepShape(0, 0, 0)
        self._rows_on_device = self._shape, b"", b""
        dtype, config = str(decoder.dtype).removeprefix("torch."), decoder.config
        of_model = config.vocab_size, dtype, device.type, config.hidden_size, config.generates, config.classifier
        at_once = 0 if decoder.vision is None else decoder.vision.config.at_once
        sizes = num_pages, settings.max_model_len, *of_model, state_tile(config)
        self.limits = Limits(*sizes, image_tokens=at_once, windows=decoder.tables.windows)
        if self._on_gpu:
            depth = num_landings(settings.run_ahead, settings.max_lease)
            self._landings = LandingRing(depth, self._shapes.max_rows, device, timed=settings.timed)
            if settings.only_largest:
                self._run_largest()
            else:
                # It refers to this object, which without it goes as soon as nobody needs it.
                self._graphs = StepGraphs(self._run_on_gpu)
                self._warm_up(settings.enforce_eager, progress)

    def begin(self, step: Step) -> None:
        """Apply what a plan changes and remember its rows: one replay or launch, unless the changes are long."""
        self._rows, self._has_masks = PlanRows.of(step), bool(step.masks)
        self._choice.note(step.enter)
        shifts = {} if self._images is None else self._images.note(step)
        self._extras.masks.take(step)
        adjustments = list(self._extras.pack(step, self._row_words, _CHANGE_WORDS))
        if self._on_gpu:
            shape = self._choice.padded(self._rows)
            self._shape = self._graphs.shape_to_run(shape, self._shapes.stand_ins(shape))
            rows = self._shape, step.decodes, step.chunks
            if rows == self._rows_on_device and not (step.enter or step.pages or step.kept):
                return  # most of a long decode: the device has it all
            self._rows_on_device = rows
        words, num_rows = self._plan.begin(), 0
        if self._on_gpu:
            num_rows = write_rows(words, self._shape, self._rows.decodes, self._rows.chunks, self._dummy)
        rows_alone = [NO_CHANGES] if self._on_gpu else []
        for index, changes in enumerate(split_changes(step, _CHANGE_WORDS, shifts) or rows_alone):
            if index:  # more than one run
                words, num_rows = self._plan.begin(), 0
            self._writer.write(changes.write(words, self._row_words, num_rows))
        self._copies.make(step)
        for packed, num_records in adjustments:
            self._plan.put(self._row_words, packed)
            self._extras.apply(self._plan.words_W, self._row_words, num_records)

    def launch(self, index: int) -> Landing:
        """Run step `index` of the plan's lease."""
        self._beyond.begin()
        if not self._on_gpu:
            self._run_model_on_cpu()
            return self._draw_on_cpu(np.zeros(0, np.int32))
        shape = self._reserve(index)
        self._see(shape)
        if self._has_masks:
            self._extras.masks.fetch(self._buffers.cut(shape)[1].slots_R)
        return self._land(self._graphs.run(shape))

    def launch_model(self) -> Midway:
        """Run the step of a plan that awaits masks up to its draw, which `draw` runs."""
        self._beyond.begin()
        if not self._on_gpu:
            self._run_model_on_cpu()
            return DoneMidway()
        self._graphs.run(self._reserve(0).model)
        return self._landings.midway() if self._answers else DoneMidway()

    def draw(self, draw: Draw) -> Landing | None:
        """Run the rest of a step that awaits masks; None while it awaits more of them."""
        self._extras.masks.take_named(draw)
        if draw.more_come:
            return None
        late = np.frombuffer(draw.late, np.int32)
        return self._draw_on_gpu(late) if self._on_gpu else self._draw_on_cpu(late)

    def use_lull(self) -> bool:
        """Nobody wants a step just now: capture one of the graphs that starting left out. False once there is none."""
        if not self._on_gpu:
            return False
        return not torch.cuda.current_stream().query() or self._graphs.capture_one()

    def _run_model_on_cpu(self) -> None:
        """Exact shapes, and no work for rows that are done: the tables of all ranks agree on them."""
        alive = np.flatnonzero(self.table.done_S.numpy()[self._rows.decodes] == 0)
        shape, computed = self._choice.exact(self._rows, len(alive)), self._rows.results_of(alive)
        write_rows(self._plan.begin(), shape, self._rows.decodes[alive], self._rows.chunks, self._dummy)
        self._see(shape)
        self._begun = _Begun(shape, computed, self._forward(shape) if len(computed) else None)

    @torch.inference_mode()
    def _draw_on_cpu(self, late: NDArray[np.int32]) -> Landing:
        assert self._begun is not None
        shape, computed, forwarded = self._begun
        self._begun = None
        token_ids_R = np.full(self._rows.num_results, -1, np.int32)
        if forwarded is None:
            return DoneLanding(token_ids_R)
        self._extras.masks.leave_out(np.flatnonzero(np.isin(computed, late)), forwarded.rows.positions_R)
        tokens_N, logs_NW = sample_step(self._decoder, forwarded, self.table, shape=shape, extras=self._extras)
        self._end.run(forwarded, shape)
        token_ids_R[computed] = tokens_N.numpy()
        hidden_CD = forwarded.hidden_RD[shape.num_decodes :]
        places = np.arange(len(computed))
        extra = self._beyond.copied(self._rows, shape, logs_NW, hidden_CD, computed, places)
        return DoneLanding(token_ids_R, extra)

    def _reserve(self, index: int) -> StepShape:
        """Before each launch on a GPU; the shape of step `index`."""
        if self._answers:
            self._landings.reserve()
            self._landings.launching()
        return self._choice.of_step(self._shape, self._rows, index)

    def _draw_on_gpu(self, late: NDArray[np.int32]) -> Landing:
        self._extras.masks.leave_out(late, self._buffers.cut(self._shape)[1].positions_R)
        return self._land(self._graphs.run(self._shape.draw))

    @property
    def _answers(self) -> bool:
        """What the other ranks sample is the same, and nobody waits for it."""
        return self._decoder.group.rank == 0

    def _land(self, logs_RW: Tensor | None) -> Landing:
        """The tokens of the step that is launched, and what it says beyond them."""
        if not self._answers:
            return DoneLanding(np.zeros(0, np.int32))
        if not (num_chunks := self._rows.chunks.shape[1]) and not self._shape.logged:
            return self._landings.launched(slice(self._rows.num_results))
        places = self._rows.places(self._shape)
        extra = self._beyond.copied(
            self._rows, self._shape, logs_RW, self._hidden_RD[:num_chunks], np.arange(len(places)), places
        )
        return self._landings.launched(places, extra)

    @torch.inference_mode()
    def _forward(self, shape: StepShape) -> Forwarded:
        """Hidden states of the step's rows; where prompts' log-probabilities are wanted, of all tokens on the way."""
        tables = self._kv_cache, self.table, self._buffers
        extra = self._guesses, self._states, self._end.hearing()
        see = self._images.attach if shape.with_images and self._images is not None else None
        forwarded = forward_step(self._decoder, *tables, shape, *extra, see)
        if shape.of_prompts:
            assert forwarded.hidden_TD is not None
            self._beyond.log_prompts(forwarded.hidden_TD, self._rows, shape)
        return forwarded

    @torch.inference_mode()
    def _run_on_gpu(self, shape: StepShape) -> Tensor | None:
        """Launch a step, or a part of it; returns its rows' log-probabilities, if it is to have them."""
        kept_RD = self._hidden_RD[: shape.num_decodes]
        if shape.part == Part.DRAW:
            forwarded = self._end.resumed(kept_RD, *self._buffers.cut(shape))
            self._extras.masks.fetch(forwarded.rows.slots_R)
        else:
            forwarded = self._forward(shape)
        if shape.part == Part.MODEL:
            kept_RD.copy_(forwarded.hidden_RD)
            self._end.keep(forwarded)
            return None
        ring, extras = self._landings.ring, self._extras
        logs_RW = sample_step_into(ring, self._decoder, forwarded, self.table, shape=shape, extras=extras)
        self._end.run(forwarded, shape)
        if shape.num_chunks:
            self._hidden_RD[: shape.num_chunks].copy_(forwarded.hidden_RD[shape.num_decodes :])
        return logs_RW

    def _run_largest(self) -> None:
        self._warm_up_vision()
        for shape in (*self._shapes.for_warm_up(), self._shapes.for_graphs()[0]):
            self._run_on_gpu(shape)
        torch.cuda.current_stream().synchronize()  # kernels write into pinned memory that goes with this object

    @torch.inference_mode()
    def _see(self, shape: StepShape) -> None:
        if shape.with_images:
            assert self._images is not None
            self._images.prepare(shape, self._rows.chunks)

    @torch.inference_mode()
    def _warm_up_vision(self) -> None:
        if self._decoder.vision is not None:
            self._decoder.vision.warm_up(self._most_image_tokens)

    def _warm_up(self, enforce_eager: bool, progress: Progress | None) -> None:
        """Compile, capture some. Meanwhile all rows are padding: words are zero, slot 0 is done, chunks are empty."""
        shapes = self._shapes.for_graphs()
        self._warm_up_vision()
        warm_up_prompt_logs(self._decoder, self.table)
        for shape in (*self._shapes.for_warm_up(), *(shapes if enforce_eager else ())):
            self._run_on_gpu(shape)
        if not enforce_eager:
            # Ranks would send each other all rows of what stands in, which takes as long as to capture.
            alone = self._decoder.group.size == 1
            self._graphs.capture(self._shapes.for_start() if alone else self._shapes.plain(), progress)
            self._graphs.capture_later(self._shapes.for_lulls() if alone else (), self._shapes.can_have_graph)
        # A change of slot -1 is dropped, and a copy of page -1, but their kernels are compiled.
        self._plan.words_W.fill_(-1)
        self._writer.compile()
        if not enforce_eager:
            self._writer.capture()
        self._copies.warm_up()
        for num_rows in (1, len(self._hidden_RD)):
            self._decoder.head.normed(self._hidden_RD[:num_rows])
        self._extras.apply(self._plan.words_W, self._row_words, 1)
        self._extras.masks.warm_up()
        self._landings.restart()
        torch.cuda.current_stream().synchronize()
