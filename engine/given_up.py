"""What workers died of twice, and may be asked for again: many clients ask again by themselves. Pure: no clock.

Each time would cost two more deaths, and an engine makes good so many in a while and no more. The tokenizer keeps it,
since the next replica's workers would die of it, too.
"""

import hashlib

import msgspec
from msgspec import structs

from tercet.ipc.step_messages import Sampling, Submit

KILLS_WORKERS = "kills_workers"


class GivenUp:
    """Requests, by their prompts and by how they sample, whatever the seed: it is another each time."""

    def __init__(self, seconds: float) -> None:
        """For so long the same is not tried again; perhaps it was not to blame."""
        self._seconds = seconds
        self._until: dict[bytes, float] = {}

    def add(self, submit: Submit, now: float) -> None:
        """It has ended so."""
        self._until[_key(submit.prompt_ids, submit.sampling)] = now + self._seconds

    def refusal(self, message: Submit, now: float) -> str | None:
        """Why this is not to be tried now, if it is not."""
        if not self._until:
            return None
        self._until = {key: until for key, until in self._until.items() if until > now}
        if _key(message.prompt_ids, message.sampling) not in self._until:
            return None
        return (
            "the workers died twice while they computed this prompt with these parameters; that is not tried again "
            f"before {self._seconds:g} s (--restart-window) have passed"
        )


def _key(prompt_ids: bytes, sampling: Sampling) -> bytes:
    """Without what an answer's siblings, or how much room there is, change of it."""
    same = structs.replace(sampling, seed=0, max_tokens=0, prompt_logprobs=None)
    return hashlib.sha256(msgspec.msgpack.encode((prompt_ids, same))).digest()
