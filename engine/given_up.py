"""What the workers died of twice, and may be asked for again: many clients ask again by themselves. Pure: no clock.

Each time would cost two more deaths, and an engine makes good so many in a while and no more.
"""

import hashlib

import msgspec
from msgspec import structs

from tercet.engine.request import Request
from tercet.ipc.step_messages import Sampling, Submit, Unservable

_CODE = "kills_workers"


class GivenUp:
    """Requests, by their prompts and by how they sample, whatever the seed: it is another each time."""

    def __init__(self, seconds: float) -> None:
        """For so long the same is not tried again; perhaps it was not to blame."""
        self._seconds = seconds
        self._until: dict[bytes, float] = {}

    def add(self, request: Request, blame: str | None, now: float) -> Unservable:
        """Its end. `blame`: how the workers died the last time."""
        prompt_ids = request.token_ids[: request.num_prompt].tobytes()
        self._until[_key(prompt_ids, request.sampling)] = now + self._seconds
        text = f"the workers died twice while they computed this request; the last time: {blame}"
        return Unservable(request.number, _CODE, text)

    def refusal(self, message: Submit, now: float) -> Unservable | None:
        """Why this is not to be tried now, if it is not."""
        self._until = {key: until for key, until in self._until.items() if until > now}
        if not self._until or _key(message.prompt_ids, message.sampling) not in self._until:
            return None
        text = (
            "the workers died twice while they computed this prompt with these parameters; that is not tried again "
            f"before {self._seconds:g} s (--restart-window) have passed"
        )
        return Unservable(message.number, _CODE, text)


def _key(prompt_ids: bytes, sampling: Sampling) -> bytes:
    """Without what an answer's siblings, or how much room there is, change of it."""
    same = structs.replace(sampling, seed=0, max_tokens=0, prompt_logprobs=None)
    return hashlib.sha256(msgspec.msgpack.encode((prompt_ids, same))).digest()
