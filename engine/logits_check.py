"""The rules of what a request may change in its logits: penalties and biases. Pure."""

from array import array

from tercet.engine.refusal import check_range, invalid
from tercet.ipc.messages import SamplingParams
from tercet.ipc.step_messages import Adjustments

MAX_BIASES = 1024
_LARGEST_BIAS = 100.0
_LARGEST_PENALTY = 2.0
_REPETITION = (0.001, 1000.0)


def check_adjustments(params: SamplingParams, vocab_size: int) -> None:
    """Refuse what is out of range. Raises `Refusal`."""
    if params.repetition_penalty is not None:
        check_range("repetition_penalty", params.repetition_penalty, *_REPETITION)
    check_range("presence_penalty", params.presence_penalty, -_LARGEST_PENALTY, _LARGEST_PENALTY)
    check_range("frequency_penalty", params.frequency_penalty, -_LARGEST_PENALTY, _LARGEST_PENALTY)
    biases = params.logit_bias or {}
    if len(biases) > MAX_BIASES:
        raise invalid("logit_bias", f"of {len(biases)} tokens", f"at most {MAX_BIASES}")
    for token_id, bias in biases.items():
        if not 0 <= token_id < vocab_size:
            raise invalid("logit_bias", f"of token {token_id}", f"ids from 0 to {vocab_size - 1}")
        check_range(f"logit_bias of token {token_id}", bias, -_LARGEST_BIAS, _LARGEST_BIAS)


def adjustments_of(params: SamplingParams, default_repetition: float | None) -> Adjustments | None:
    """For checked parameters; None if nothing is changed."""
    repetition = default_repetition if params.repetition_penalty is None else params.repetition_penalty
    biases = params.logit_bias or {}
    adjustments = Adjustments(
        1.0 if repetition is None else repetition,
        params.presence_penalty,
        params.frequency_penalty,
        array("i", biases.keys()).tobytes(),
        array("f", biases.values()).tobytes(),
    )
    return None if adjustments == Adjustments() else adjustments
