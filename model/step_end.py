"""What a step does once it has drawn its tokens: settle states by those that hold, and guess those behind them.

Knows the order of things; how, others know.
"""

from torch import Tensor

from tercet.model.decoder import Decoder
from tercet.model.forward_step import Forwarded
from tercet.model.guess_ahead import GuessAhead
from tercet.model.guesser import Guesser
from tercet.model.runner_settings import GuessSettings
from tercet.model.states import States
from tercet.model.step_shape import StepShape
from tercet.triton_kernels.slot_table import SlotTable


class StepEnd:
    """Of all steps of a runner."""

    def __init__(
        self, decoder: Decoder, guesses: GuessSettings | None, table: SlotTable, kv_cache: Tensor, max_tokens: int,
        states: States | None,
    ) -> None:  # fmt: skip
        """`kv_cache`: of all layers, that of a layer that guesses the last; `max_tokens`: of a step; `states`: of a
        model whose layers carry some."""
        self._table, self._states = table, states
        self._guess_ahead: GuessAhead | None = None
        if guesses is not None and guesses.looked_up is None:
            own = kv_cache[decoder.config.num_caching_layers :]
            self._guess_ahead = GuessAhead(Guesser(decoder), guesses, table, own, max_tokens)

    def run(self, forwarded: Forwarded, shape: StepShape) -> None:
        """Graph-safe."""
        if forwarded.trials is not None and self._states is not None:
            self._states.settle(forwarded.trials.tokens, self._table.length_S)
        if self._guess_ahead is not None:
            self._guess_ahead.run(forwarded, shape)
