"""What a step does once it has drawn its tokens: settle states by those that hold, and guess those behind them.

Knows the order of things; how, others know.
"""

from torch import Tensor

from tercet.model.decoder import Decoder
from tercet.model.eagle_guesser import EagleGuesser
from tercet.model.forward_step import Forwarded
from tercet.model.guess_ahead import GuessAhead
from tercet.model.guesser import Guesser, Hearing, OwnGuesser
from tercet.model.kv_cache import KvCache
from tercet.model.padded_shapes import Shapes
from tercet.model.rank_weights import EagleWeights
from tercet.model.runner_settings import GuessSettings
from tercet.model.states import States
from tercet.model.step_shape import StepShape
from tercet.triton_kernels.prepare import StepInputs, StepRows
from tercet.triton_kernels.slot_table import SlotTable


class StepEnd:
    """Of all steps of a runner."""

    def __init__(
        self, decoder: Decoder, guesses: GuessSettings | None, table: SlotTable, kv_cache: KvCache, shapes: Shapes,
        states: States | None,
    ) -> None:  # fmt: skip
        """`kv_cache`: of all layers, that of a layer that guesses the last; `shapes`: of steps; `states`: of a model
        whose layers carry some."""
        self._table, self._states = table, states
        self._guess_ahead: GuessAhead | None = None
        self._heard_RD: Tensor | None = None
        if guesses is not None and guesses.looked_up is None:
            own = kv_cache.layers[decoder.config.num_caching_layers :]
            eagle = isinstance(decoder.weights.guesser, EagleWeights)
            guesser: Guesser = EagleGuesser(decoder) if eagle else OwnGuesser(decoder)
            self._guess_ahead = GuessAhead(guesser, guesses, table, own, shapes.max_tokens)
            if eagle:
                self._heard_RD = decoder.room_for_rows(shapes.max_decodes)

    def hearing(self) -> Hearing | None:
        """What is to hear the next step's stream on the way, if anything is."""
        return None if self._guess_ahead is None else self._guess_ahead.hearing()

    def keep(self, forwarded: Forwarded) -> None:
        """Of a step that is to draw later, what was heard of it."""
        if self._heard_RD is not None and (heard_RD := forwarded.guessed_from_TD) is not None:
            self._heard_RD[: len(heard_RD)].copy_(heard_RD)

    def resumed(self, hidden_RD: Tensor, inputs: StepInputs, rows: StepRows) -> Forwarded:
        """That step, once it draws, with the hidden states that it had come to."""
        heard_RD = hidden_RD if self._heard_RD is None else self._heard_RD[: len(hidden_RD)]
        return Forwarded(hidden_RD, rows, inputs, guessed_from_TD=heard_RD)

    def run(self, forwarded: Forwarded, shape: StepShape) -> None:
        """Graph-safe."""
        if forwarded.trials is not None and self._states is not None:
            self._states.settle(forwarded.trials.tokens, self._table.length_S)
        if self._guess_ahead is not None:
            self._guess_ahead.run(forwarded, shape)
