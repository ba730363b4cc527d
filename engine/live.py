"""Requests as the front desk keeps them, from their name until their end. State only: the desk says what happens.

A client asks for one answer or several to one prompt: `Asked` is the request as it names it, `Live` one answer.
"""

from array import array

import msgspec

from tercet.engine.detokenizer import Detokenizer
from tercet.ipc.answers import TokenLogprob
from tercet.ipc.step_messages import Sibling, Started, Submit

Client = bytes
_NOT_STARTED = Started(0, 0, 0.0, 0.0)


class Asked:
    """A request as its client knows it."""

    __slots__ = (
        "adapter_load",
        "answers",
        "client",
        "has_begun",
        "image_bytes",
        "num_unbegun",
        "replica",
        "request_id",
        "untold_prompt",
        "waits_since",
    )

    def __init__(self, client: Client, request_id: str) -> None:
        self.client = client
        self.request_id = request_id
        self.answers: list[Live] = []
        """Those that have not ended. The request is over when there are none."""
        self.has_begun = False
        """Whether any answer has a token."""
        self.untold_prompt: bytes | None = None
        """The prompt's token ids, as long as its client is yet to hear them."""
        self.waits_since: float | None = None
        """When a scheduler was asked for it first."""
        self.replica: int | None = None
        """Whose scheduler; None: nobody's yet."""
        self.adapter_load = -1
        """Of the adapter that answers, once it has one's."""
        self.num_unbegun = 0
        """Tokens of its prompt, until an answer has a token."""
        self.image_bytes = 0
        """Pixels of its images, a byte each for red, green and blue."""

    @property
    def numbers(self) -> list[int]:
        return [one.number for one in self.answers]

    def submit(self, now: float, *, again: bool = False) -> Submit:
        """For a scheduler that does not know it, under its present numbers."""
        if self.waits_since is None:
            self.waits_since = now
        first, *others = self.answers
        assert first.submit is not None
        siblings = []
        for one in others:
            assert one.submit is not None
            siblings.append(Sibling(one.number, one.submit.sampling.seed, one.generated.tobytes()))
        return msgspec.structs.replace(
            first.submit,
            number=first.number,
            generated_ids=first.generated.tobytes(),
            again=again or first.submit.again,
            queue_timeout=None if self.has_begun else first.submit.queue_timeout,  # it has had its turn
            waited=0.0 if self.has_begun else now - self.waits_since,
            siblings=tuple(siblings),
        )


class Live:
    """One answer that has not ended."""

    __slots__ = (
        "asked",
        "client",
        "detokenizer",
        "first_token_at",
        "fresh_ids",
        "fresh_logs",
        "fresh_text",
        "generated",
        "index",
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
        "vector",
    )

    def __init__(self, asked: Asked, number: int) -> None:
        self.asked = asked
        self.client = asked.client
        self.request_id = asked.request_id
        self.number = number
        self.index = 0
        self.num_prompt = 0
        self.num_generated = 0
        self.first_token_at: float | None = None
        self.started = _NOT_STARTED
        self.detokenizer: Detokenizer | None = None
        """None until the request is submitted."""
        self.submit: Submit | None = None
        """What it would be alone. With `generated` all that a new scheduler needs to go on."""
        self.generated = array("i")
        self.untold_seed: int | None = None
        """Drawn for a request that brought none; its client needs it to go on elsewhere."""
        self.keeps_stop = False
        self.logprobs: int | None = None
        self.prompt_logprobs = 0
        self.num_prompt_logged = 1
        """Tokens of the prompt whose log-probabilities its client has; the first has none."""
        self.fresh_logs: list[tuple[TokenLogprob, ...]] = []
        self.vector = b""
        """The embedding, if it is for one and that is there."""
        self.fresh_ids: list[int] = []
        self.fresh_text: list[str] = []
