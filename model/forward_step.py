"""One step's launches, from its rows in the plan to their hidden states: what graphs capture and what starts compile.

Knows the order of things; what is sampled from hidden states is the sampler's matter.

Shape suffixes: R rows that sample, T tokens of the step, D hidden size.
"""

from typing import NamedTuple

from torch import Tensor

from tercet.model.decoder import Decoder
from tercet.model.runner_settings import GuessSettings
from tercet.model.states import States
from tercet.model.step_buffers import StepBuffers
from tercet.model.step_shape import StepShape
from tercet.triton_kernels.guess import Trials, guess
from tercet.triton_kernels.prepare import StepRows, prepare
from tercet.triton_kernels.slot_table import SlotTable
from tercet.triton_kernels.token_adapters import with_adapters


class Forwarded(NamedTuple):
    """What a step has come to before it samples."""

    hidden_RD: Tensor
    rows: StepRows
    hidden_TD: Tensor | None = None
    """Of all tokens, where prompts' log-probabilities are wanted."""
    trials: Trials | None = None
    """Of a step with guesses."""


def forward_step(
    decoder: Decoder,
    kv_cache: Tensor,
    table: SlotTable,
    buffers: StepBuffers,
    shape: StepShape,
    guesses: GuessSettings | None = None,
    states: States | None = None,
) -> Forwarded:
    """Prepare a step and run the model. `kv_cache`: [layer, k/v, page, kv head, token, dim]; `guesses`: for shapes with
    trials; `states`: of a model whose layers carry some."""
    sizes = {"page_size": kv_cache.shape[4], "num_pages": kv_cache.shape[2]}
    trials = None
    if shape.num_trials:
        assert guesses is not None
        trials, repeated = buffers.cut_trials(shape), (guesses.shortest, guesses.longest)
        guess(trials, table, num_guesses=shape.num_guesses, repeated=repeated, **sizes)
        inputs, rows = trials.inputs(apart=decoder.tries_apart), trials.rows
    else:
        inputs, rows = buffers.cut(shape)
        prepare(rows, table, inputs, **sizes)
    if shape.adapted:
        inputs = with_adapters(inputs, table.adapter_S, decoder.num_adapters, deterministic=decoder.deterministic)
    tables = inputs, kv_cache, table.page_table_SM, states
    if shape.of_prompts:
        hidden_RD, hidden_TD = decoder.forward_whole(*tables)
        return Forwarded(hidden_RD, rows, hidden_TD)
    return Forwarded(decoder.forward(*tables, longest=shape.longest, deep=shape.deep), rows, trials=trials)
