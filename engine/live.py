"""One request as the front desk keeps it, from its name until its end. State only: the desk says what happens to it."""

from array import array

import msgspec

from tercet.engine.detokenizer import Detokenizer
from tercet.ipc.messages import TokenLogprob
from tercet.ipc.step_messages import Started, Submit

Client = bytes
_NOT_STARTED = Started(0, 0, 0.0, 0.0)


class Live:
    """One request that has not ended."""

    __slots__ = (
        "client",
        "detokenizer",
        "first_token_at",
        "fresh_ids",
        "fresh_logs",
        "fresh_text",
        "generated",
        "keeps_stop",
        "logprobs",
        "num_generated",
        "num_prompt",
        "num_prompt_logged",
        "number",
        "prompt_logprobs",
        "request_id",
        "started",
        "submit",
        "untold_seed",
    )

    def __init__(self, client: Client, request_id: str, number: int) -> None:
        self.client = client
        self.request_id = request_id
        self.number = number
        self.num_prompt = 0
        self.num_generated = 0
        self.first_token_at = 0.0
        self.started = _NOT_STARTED
        self.detokenizer: Detokenizer | None = None
        """None until the request is submitted."""
        self.submit: Submit | None = None
        """With `generated` all that a new scheduler needs to go on."""
        self.generated = array("i")
        self.untold_seed: int | None = None
        """Drawn for a request that brought none; its client needs it to go on elsewhere."""
        self.keeps_stop = False
        self.logprobs: int | None = None
        self.prompt_logprobs = 0
        self.num_prompt_logged = 1
        """Tokens of the prompt whose log-probabilities its client has; the first has none."""
        self.fresh_logs: list[tuple[TokenLogprob, ...]] = []
        self.fresh_ids: list[int] = []
        self.fresh_text: list[str] = []

    def submit_again(self) -> Submit:
        """For a scheduler that does not know it, under its present number."""
        assert self.submit is not None
        return msgspec.structs.replace(
            self.submit, number=self.number, generated_ids=self.generated.tobytes(), again=True
        )
