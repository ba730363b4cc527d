"""From a step's hidden states to its tokens, which it also writes into the slot table.

Knows which rows sample (`prepare` said so), the decoder's head and the sampling kernels; knows no request.

Shape suffixes: D hidden size, R rows, N rows that sample, V vocabulary.
"""

import torch
from torch import Tensor

from tercet.ipc.step_messages import Sampling
from tercet.model.decoder import Decoder
from tercet.model.extras import Extras
from tercet.model.states import States
from tercet.model.step_shape import StepShape
from tercet.model.token_logs import token_logs
from tercet.triton_kernels.accept import accept
from tercet.triton_kernels.guess import Trials
from tercet.triton_kernels.prepare import StepRows
from tercet.triton_kernels.sample import TokenRing, sample, sample_into
from tercet.triton_kernels.slot_table import SlotTable, tokens_at


def needs_whole_logits(sampling: Sampling) -> bool:
    """Whether a request's tokens take logits of the whole vocabulary: a threshold among them does."""
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)


def sample_step(
    decoder: Decoder,
    hidden_RD: Tensor,
    rows: StepRows,
    table: SlotTable,
    *,
    shape: StepShape,
    extras: Extras,
    trials: Trials | None = None,
    states: States | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Token of each row, int32 [R], -1 where it samples none. Only rows that sample are computed: not graph-safe.

    `trials`: of a step with guesses; where one was wrong, what is behind it has no token either (`accept.py`).
    `states`: of a model whose layers carry some: those of the trials' slots move on by what holds.

    Also the rows' log-probabilities, as `token_logs` has them, in a step that wants any. Every rank comes to the same.
    """
    token_ids_R = torch.full_like(rows.positions_R, -1)
    rows_N = (rows.positions_R >= 0).nonzero().squeeze(1)
    if not len(rows_N):  # all ranks agree on this: their tables are the same
        return token_ids_R, None
    slots_N, positions_N = rows.slots_R[rows_N], rows.positions_R[rows_N]
    hidden_ND = hidden_RD[rows_N]
    raw_NV = decoder.logits(hidden_ND) if _takes_whole_logits(shape) else None
    if raw_NV is None:
        token_ids_R[rows_N] = decoder.sample(hidden_ND, slots_N, positions_N, table)
    else:
        logits_NV = extras.adjust(raw_NV, slots_N, positions_N, table) if shape.adjusted else raw_NV
        token_ids_R[rows_N] = sample(logits_NV, slots_N, positions_N, table)
    if trials is not None:
        _end_trials(TokenRing(token_ids_R[None], token_ids_R.new_zeros(1)), trials, table, shape, states)
    if raw_NV is None or not shape.logged:
        return token_ids_R, None
    logs_NW = token_logs(raw_NV, token_ids_R[rows_N])
    return token_ids_R, logs_NW.new_zeros(len(token_ids_R), logs_NW.shape[1]).index_copy_(0, rows_N, logs_NW)


def sample_step_into(
    ring: TokenRing,
    decoder: Decoder,
    hidden_RD: Tensor,
    rows: StepRows,
    table: SlotTable,
    *,
    shape: StepShape,
    extras: Extras,
    trials: Trials | None = None,
    states: States | None = None,
) -> Tensor | None:
    """The same for all rows, padding too, into the next place of the ring: fixed shapes, graph-safe."""
    raw_RV = decoder.logits(hidden_RD) if _takes_whole_logits(shape) else None
    if raw_RV is None:
        decoder.sample_into(ring, hidden_RD, rows.slots_R, rows.positions_R, table)
    else:
        logits_RV = extras.adjust(raw_RV, rows.slots_R, rows.positions_R, table) if shape.adjusted else raw_RV
        sample_into(ring, logits_RV, rows.slots_R, rows.positions_R, table)
    if trials is not None:
        _end_trials(ring, trials, table, shape, states)
    if raw_RV is None or not shape.logged:
        return None
    return token_logs(raw_RV, tokens_at(rows.slots_R, rows.positions_R, table))


def _end_trials(
    ring: TokenRing, trials: Trials, table: SlotTable, shape: StepShape, states: States | None
) -> None:  # fmt: skip
    accept(ring, trials, table, num_guesses=shape.num_guesses)
    if states is not None:
        states.settle(trials.tokens, table.length_S)


def _takes_whole_logits(shape: StepShape) -> bool:
    return shape.whole_logits or shape.adjusted or shape.logged
