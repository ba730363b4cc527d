"""What every route of the HTTP door shares: the engine's client, the keys, the engine's condition.

It knows no route and no byte of HTTP.
"""

import asyncio
import hashlib
import hmac
import time
from typing import Any

import msgspec

from tercet.engine.config import EngineConfig
from tercet.engine.grammar_trial import GrammarTrial
from tercet.engine.http_errors import ApiError
from tercet.engine.http_images import Images
from tercet.engine.http_origins import Origins
from tercet.engine.lark import Marks
from tercet.engine.metrics import Metrics
from tercet.engine.refusal import ASLEEP, SHUTTING_DOWN, TAKES_NO_MORE
from tercet.engine.request_log import RequestLog
from tercet.ipc.answers import EngineInfo
from tercet.ipc.client import Client, ClientError
from tercet.ipc.process_messages import Standing

_GAUGES_SECONDS = 2.0


class Condition:
    """What the supervisor has said about the engine."""

    def __init__(self) -> None:
        self.draining = False
        self.impaired: tuple[str, ...] = ()
        """Kinds of process that are being replaced."""
        self.is_asleep = self.falls_asleep = False

    def complaint(self) -> str | None:
        """Why a request would not be served now; None if it would."""
        if self.draining:
            return SHUTTING_DOWN
        if self.is_asleep or self.falls_asleep:
            return ASLEEP
        if self.impaired:
            return f"being started again: {', '.join(self.impaired)}"
        return None


class Door:
    """One engine, as its HTTP door sees it."""

    def __init__(self, client: Client, info: EngineInfo, config: EngineConfig) -> None:
        self.client = client
        self.info = info
        """As of the start, but for what may be changed: names, version and sizes are not."""
        self.most_queued = config.max_queued_requests
        """Whoever has no more than these with the engine is not told to wait on his own account."""
        self.most_answers = config.max_num_seqs + config.max_queued_requests
        """A request for more would be told to wait, for ever."""
        self.created = int(time.time())
        self.condition = Condition()
        self.marks: Marks | None = None
        """What of the marks of tool calls and reasoning is a token of its own; None: nobody has asked yet."""
        self.trial = GrammarTrial()
        """Of what tools want; other grammars the tokenizer tries."""
        self.metrics = Metrics(info.model, config.data_parallel_size)
        self.log = RequestLog(config.log_requests)
        self.unanswered: set[asyncio.Task[Any]] = set()
        """At work for requests whose answers have not begun."""
        self.origins = Origins(config.allowed_origins)
        self.images = Images(config)
        self._keys = [_digest(key) for key in config.api_key]

    @property
    def is_guarded(self) -> bool:
        return bool(self._keys)

    def stand(self, standing: Standing) -> None:
        """What has been changed of the engine."""
        self.condition.is_asleep, self.condition.falls_asleep = standing.is_asleep, standing.falls_asleep
        names = tuple(one.name for one in standing.adapters)
        changed = {"weights": standing.weights, "is_asleep": standing.is_asleep, "adapters": names}
        self.info = msgspec.structs.replace(self.info, **changed)

    async def refresh(self) -> None:
        """The engine's own word, ahead of the supervisor's."""
        if (info := await self.gauges()) is not None:
            self.info, self.condition.is_asleep = info, info.is_asleep

    async def gauges(self) -> EngineInfo | None:
        """The engine's numbers of now; None if it does not answer soon."""
        try:
            async with asyncio.timeout(_GAUGES_SECONDS):
                return await self.client.info()
        except (TimeoutError, ClientError):
            return None

    def admits(self, authorization: str, api_key: str) -> bool:
        """Whether one of the headers `Authorization` and `x-api-key` opens the door; takes as long whatever the key."""
        if not self._keys:
            return True
        scheme, _, key = authorization.partition(" ")
        bears, has = self._knows(key.strip()), self._knows(api_key)
        return (bears and scheme.lower() == "bearer") or has

    def _knows(self, key: str) -> bool:
        given = _digest(key)
        fits = [hmac.compare_digest(given, known) for known in self._keys]
        return any(fits)

    def check_open(self) -> None:
        """Whoever comes in a drain is a newcomer, also while the engine still takes back what a dead tokenizer had."""
        if self.condition.draining:
            raise draining()

    def turn_away(self) -> None:
        """The engine has said all: who has had nothing of an answer by now will have none, and is told so."""
        self.client.give_up("the engine has shut down")
        for task in self.unanswered:
            task.cancel()

    @property
    def models(self) -> tuple[str, ...]:
        """What a request may name as its model: the one that is served, then its adapters."""
        return (self.info.model, *self.info.adapters)

    def check_model(self, model: str | None) -> None:
        """A request names one of those, or none."""
        if model is not None and model not in self.models:
            wanted = " or ".join(map(repr, self.models))
            raise ApiError(404, f"model is {model[:200]!r}; want {wanted}", param="model", code="model_not_found")

    def adapter_of(self, model: str | None) -> str | None:
        """That a request asks for by a checked name; None: the model alone."""
        return model if model in self.info.adapters else None


def draining() -> ApiError:
    """For newcomers, and for who has not sent a whole request when the engine ends."""
    return ApiError(503, TAKES_NO_MORE, code="draining")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
