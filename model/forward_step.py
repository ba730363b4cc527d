"""One step's launches, from its rows in the plan to their hidden states: what graphs capture and what starts compile.

Knows the order of things; what is sampled from hidden states is the sampler's matter.

Shape suffixes: R rows that sample, T tokens of the step, D hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from tercet.model.decoder import Decoder
from tercet.model.guesser import Hearing
from tercet.model.kv_cache import num_pages_of, page_size_of
from tercet.model.runner_settings import GuessSettings
from tercet.model.states import States
from tercet.model.step_buffers import StepBuffers
from tercet.model.step_shape import StepShape
from tercet.triton_kernels.guess import guess
from tercet.triton_kernels.prepare import StepInputs, StepRows, prepare
from tercet.triton_kernels.slot_table import SlotTable
from tercet.triton_kernels.token_adapters import with_adapters
from tercet.triton_kernels.trials import Trials, lay_out


class Forwarded(NamedTuple):
    """What a step has come to before it samples."""

    hidden_RD: Tensor
    rows: StepRows
    inputs: StepInputs
    hidden_TD: Tensor | None = None
    """Of all tokens, where there are others than rows and somebody wants them."""
    guessed_from_TD: Tensor | None = None
    """Of all tokens, what a layer that guesses is to read."""
    trials: Trials | None = None
    """Of a step with guesses."""


def forward_step(
    decoder: Decoder,
    kv_cache: Sequence[Tensor],
    table: SlotTable,
    buffers: StepBuffers,
    shape: StepShape,
    guesses: GuessSettings | None = None,
    states: States | None = None,
    hearing: Hearing | None = None,
    see: Callable[[StepInputs], StepInputs] | None = None,
) -> Forwarded:
    """Prepare a step and run the model. `kv_cache`: of the model's own layers, see `Decoder.forward`;
    `guesses`: of an engine that tries any; `states`: of a model whose layers carry some;
    `hearing`: what hears the step's stream on the way; `see`: of a step with images, adds them to what layers read."""
    sizes = {"page_size": page_size_of(kv_cache), "num_pages": num_pages_of(kv_cache)}
    trials, whole = None, shape.of_prompts
    if shape.num_trials:
        assert guesses is not None
        trials, num_guesses = buffers.cut_trials(shape), shape.num_guesses
        if guesses.looked_up is None:
            lay_out(trials, table, num_guesses=num_guesses, **sizes)
        else:
            guess(trials, table, num_guesses=num_guesses, repeated=guesses.looked_up, **sizes)
        inputs, rows = trials.inputs(apart=decoder.tries_apart), trials.rows
    else:
        inputs, rows = buffers.cut(shape)
        prepare(rows, table, inputs, **sizes)
        by_layer = guesses is not None and guesses.looked_up is None
        whole = whole or (shape.num_chunks > 0 and by_layer and hearing is None)
    if decoder.turns_by_axes:
        inputs = replace(inputs, shifts_S=table.shift_S)
    if see is not None:
        inputs = see(inputs)
    if shape.adapted:
        inputs = with_adapters(inputs, table.adapter_S, decoder.num_adapters, deterministic=decoder.deterministic)
    tables = inputs, kv_cache, table.page_table_SM, states
    hear, hidden_TD = None if hearing is None else hearing.hear, None
    if whole:
        hidden_RD, hidden_TD = decoder.forward_whole(*tables, deep=shape.deep, hear=hear)
    else:
        hidden_RD = decoder.forward(*tables, longest=shape.longest, deep=shape.deep, hear=hear)
    last_TD = hidden_RD if hidden_TD is None else hidden_TD
    return Forwarded(hidden_RD, rows, inputs, hidden_TD, last_TD if hearing is None else hearing.made_TD, trials)
