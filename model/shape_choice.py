"""Which shape the steps of a plan have, by what its rows want: padded on a GPU, exact on a CPU.

Knows on the host what each slot's request wants of its logits; computes nothing.
"""

from collections.abc import Iterable

import numpy as np

from tercet.ipc.step_messages import Enter
from tercet.model.extras import Extras
from tercet.model.image_slots import ImageSlots
from tercet.model.padded_shapes import Shapes
from tercet.model.plan_rows import PlanRows
from tercet.model.sampler import needs_whole_logits
from tercet.model.step_shape import StepShape
from tercet.model.trial_shapes import TrialShapes


class ShapeChoice:
    """Of one runner."""

    def __init__(
        self, shapes: Shapes, trials: TrialShapes | None, extras: Extras, max_num_seqs: int, images: ImageSlots | None
    ) -> None:
        """`trials`: where plans may have guesses; `images`: where prompts may have some."""
        self._shapes = shapes
        self._trials = trials
        self._extras = extras
        self._whole_logits_S = np.zeros(max_num_seqs, np.bool_)
        self._adapted_S = np.zeros(max_num_seqs, np.bool_)
        self._images = images

    def note(self, entering: Iterable[Enter]) -> None:
        """Who takes a slot."""
        for enter in entering:
            self._whole_logits_S[enter.slot] = needs_whole_logits(enter.sampling)
            self._adapted_S[enter.slot] = enter.sampling.adapter >= 0

    def padded(self, rows: PlanRows) -> StepShape:
        """On a GPU."""
        whole_logits = bool(self._whole_logits_S[rows.decodes].any())
        if rows.num_guesses:
            assert self._trials is not None
            shape = self._trials.fit(len(rows.decodes), whole_logits, self._adjusted(rows), self._logged(rows)[0])
        else:
            sizes = len(rows.decodes), rows.chunks.shape[1], rows.num_prefill_tokens
            depth = int(rows.chunks[1].max(initial=0))
            shape = self._shapes.fit(*sizes, whole_logits, self._adjusted(rows), *self._logged(rows), depth=depth)
        return self._special(shape, rows)

    def exact(self, rows: PlanRows, num_alive: int) -> StepShape:
        """On a CPU, where so many of the slots that decode are not done. What is wanted is over all rows, as on a GPU:
        there the host does not know which are done."""
        whole_logits = bool(self._whole_logits_S[rows.decodes].any() or self._whole_logits_S[rows.chunks[0]].any())
        if rows.num_guesses:
            assert self._trials is not None
            shape = self._trials.exact(num_alive, whole_logits, self._adjusted(rows), self._logged(rows)[0])
        else:
            sizes = num_alive, rows.chunks.shape[1], rows.num_prefill_tokens
            shape = StepShape(*sizes, whole_logits, self._adjusted(rows), *self._logged(rows))
        return self._special(shape, rows)

    def of_step(self, shape: StepShape, rows: PlanRows, index: int) -> StepShape:
        """Of step `index` of a plan that was padded."""
        return self._shapes.of_length(shape, rows.longest + index * rows.width)

    def _special(self, shape: StepShape, rows: PlanRows) -> StepShape:
        """With what models of some kinds have besides."""
        adapted = self._adapted_S[rows.decodes].any() or self._adapted_S[rows.chunks[0]].any()
        with_images = self._images is not None and self._images.are_among(rows.chunks)
        return shape._replace(adapted=self._shapes.always_adapted or bool(adapted), with_images=with_images)

    def _adjusted(self, rows: PlanRows) -> bool:
        return self._extras.wanted(rows.decodes, rows.chunks[0])

    def _logged(self, rows: PlanRows) -> tuple[bool, bool]:
        """Whether log-probabilities of tokens and of prompts are wanted of the step."""
        return self._extras.any_logged(rows.decodes, rows.chunks[0]), self._extras.any_logged_prompt(rows.chunks)
