"""A step's tokens on their way through the layers: all of them, or from where nobody reads the others the rows alone.

Of a prompt only the last token is sampled from. So the last layer computes K and V of all tokens, but no more than that
of those that no row samples from. Where layers borrow K and V from layers ahead of them, the rows go on alone from the
first that does: the others are not read by anybody there.

Shape suffixes: T tokens, R rows that sample, of those tokens, D hidden size, H q heads of this rank times head size, X
numbers that layers are told of a token, S slots, M pages of a slot.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from tercet.model.attention_plan import AttentionPlan
from tercet.model.layer_inputs import Told
from tercet.model.layers import Layer
from tercet.model.residual import Residual
from tercet.model.states import LayerState
from tercet.triton_kernels.embedding import embedding
from tercet.triton_kernels.image_rows import place_image_rows
from tercet.triton_kernels.prepare import StepInputs

Hear = Callable[[int, Tensor], None]


@dataclass(frozen=True)
class Passage:
    """Tokens of one step, and what layers read beside them."""

    layers: Sequence[Layer]
    held: Sequence[Tensor | LayerState]
    """Of each layer, its part of the cache, or its states."""
    page_table_SM: Tensor
    inputs: StepInputs
    plan: AttentionPlan
    residual: Residual
    told_TX: Tensor | None
    """Of all tokens of the step."""
    rows_R: Tensor | None = None
    """Which of the step's tokens go this way; None: all."""
    hear: Hear | None = None

    def through(self, first: int, end: int) -> "Passage":
        """Go through layers from `first` to that ahead of `end`."""
        for index in range(first, end):
            self._add(index, self._attend(index))
        return self

    def rows_alone(self, inputs: StepInputs, plan: AttentionPlan) -> "Passage":
        """The rows from here on. `inputs`, `plan`: theirs."""
        rows_R = self.inputs.sample_rows_R
        residual = self.residual.of_rows(rows_R)
        return replace(self, inputs=inputs, plan=plan, residual=residual, rows_R=rows_R, hear=None)

    def through_last(self, *, whole: bool) -> Tensor:
        """Hidden states of the rows behind the last layer: [R, D]. Only if `whole` all other tokens go there too."""
        last, inputs = len(self.layers) - 1, self.inputs
        attended_TH = self._attend(last, last_queries=not whole)
        if not len(inputs.chunk_slots_C):  # each token is a row
            self._add(last, attended_TH)
            return self.residual.end()
        rows = self.rows_alone(replace(inputs, groups_T=inputs.groups_R), self.plan)
        rows._add(last, embedding(inputs.sample_rows_R, attended_TH))
        if whole:
            self._add(last, attended_TH)
        return rows.residual.end()

    def _attend(self, index: int, *, last_queries: bool = False) -> Tensor:
        images, layer = self.inputs.image_rows, self.layers[index]
        if images is not None and 0 < index <= len(images.deep):
            place_image_rows(self.residual.whole(), self.inputs.input_ids_T, images.deep[index - 1], add=True)
        attended_TH = layer.attend(
            self.residual, self.inputs, self.page_table_SM, self.held[index], self.plan, last_queries=last_queries
        )
        if self.hear is not None:
            self.hear(index, self.residual.ahead_of_layer)
        return attended_TH

    def _add(self, index: int, attended_TH: Tensor) -> None:
        told = None if self.told_TX is None else Told(self.told_TX, index, self.rows_R)
        self.layers[index].add(self.residual, attended_TH, self.inputs.groups_T, told)
