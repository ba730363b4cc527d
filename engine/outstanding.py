"""What is outstanding with each replica, as the front desk knows it: nobody has to be asked. Pure."""

from collections import Counter

from tercet.engine.live import Asked
from tercet.engine.refusal import RETRY_AFTER_S, Refusal
from tercet.engine.routing import ANSWER_TOKENS

_MOST_IMAGE_BYTES = 4 << 30
"""Of pixels, for each replica: who runs and who waits."""


class Outstanding:
    """Prompts of which no answer has begun, and answers that have not ended."""

    def __init__(self, num_replicas: int) -> None:
        self.tokens = [0] * num_replicas
        """Of each replica, an answer for so many."""
        self.adapters: Counter[int] = Counter()
        """Answers by the load of their adapter."""
        self._image_bytes = 0
        self._most_image_bytes = num_replicas * _MOST_IMAGE_BYTES

    def hold(self, asked: Asked, image_bytes: int, *, is_known: bool) -> None:
        """Its images are kept until it ends. Raises `Refusal` where there are too many bytes of others' by then; never
        for what the engine took once before. One alone may be of any size."""
        too_many = bool(self._image_bytes) and self._image_bytes + image_bytes > self._most_image_bytes
        if image_bytes and too_many and not is_known:
            text = f"images of {self._image_bytes} bytes, decoded, wait or are looked at already; ask again later"
            raise Refusal("overloaded", text, RETRY_AFTER_S)
        self._image_bytes += image_bytes
        asked.image_bytes += image_bytes

    def place(self, asked: Asked, replica: int) -> None:
        """A request is this replica's, with all its answers."""
        assert asked.answers[0].submit is not None
        asked.adapter_load = asked.answers[0].submit.sampling.adapter_load
        self.adapters[asked.adapter_load] += len(asked.answers)
        asked.replica, asked.num_unbegun = replica, len(asked.answers[0].submit.prompt_ids) // 4
        self.tokens[replica] += asked.num_unbegun + len(asked.answers) * ANSWER_TOKENS

    def begin(self, asked: Asked) -> None:
        """An answer has a token."""
        if asked.replica is not None:
            self.tokens[asked.replica] -= asked.num_unbegun
            asked.num_unbegun = 0

    def end_one(self, asked: Asked) -> None:
        """An answer has ended, and is none of the request's any more."""
        if not asked.answers:
            self._image_bytes -= asked.image_bytes
            asked.image_bytes = 0
        if asked.replica is not None:
            self.tokens[asked.replica] -= ANSWER_TOKENS
            self.adapters[asked.adapter_load] -= 1
            if not asked.answers:
                self.begin(asked)  # what has not begun never will
