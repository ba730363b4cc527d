"""Requests that differ in everything, many at a time, some cancelled at any moment; each must end exactly once.

Speaks the wire protocol itself: a client that tidies up would hide an answer that ends twice.
"""

import asyncio
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import zmq

from tercet.ipc.answers import Batch, Delta, EngineInfo, Failed, Finished, ToClient
from tercet.ipc.connection import Connection
from tercet.ipc.messages import Cancel, FromClient, GenerateIds, Hello, SamplingParams

_SILENCE_S = 60.0
"""With requests in the engine, so long without a word means that it hangs."""
_LETTERS = "etaoinsrhl"


@dataclass(frozen=True, kw_only=True)
class Mix:
    """What requests look like."""

    vocab_size: int
    longest_prompt: int
    longest_output: int
    cancelled: float = 0.2
    stopped: float = 0.3
    """Shares of requests that are cancelled on their way, or bring stop strings."""
    same_prefix: float = 0.3
    """Share of prompts that begin as others do."""


@dataclass
class Asked:
    """One request on its way."""

    params: SamplingParams
    cancel_after: int | None
    """Tokens after which it is cancelled; 0: at once."""
    probe: bool
    cancelled: bool = False
    text: str = ""
    token_ids: list[int] = field(default_factory=list)


class Load:
    """Keeps some requests in an engine until told otherwise."""

    def __init__(self, address: str, mix: Mix, seed: int, pause: float = 0.0) -> None:
        """`pause`: seconds between two looks at what came."""
        self._pause = pause
        self._mix = mix
        self._random = random.Random(seed)
        self._prefixes = [self._ids(mix.longest_prompt * 3 // 4) for _ in range(8)]
        self._probe_prompt = self._ids(mix.longest_prompt // 2)
        self._probe_answer: list[int] | None = None
        self._live: dict[str, Asked] = {}
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ToClient)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._address = address
        self.ended = self.sent = 0
        self.reasons: dict[str, int] = {}
        self.num_tokens = self.num_cached = 0
        """As the engine says; of a request cancelled before its first token, that nothing was cached."""
        self.violations: list[str] = []
        self._infos: list[EngineInfo] = []
        """What the engine has said of itself since it was last asked."""

    async def run(self, more: Callable[[], bool], concurrency: int) -> None:
        """Send while `more()`; until all have ended, or the engine has said nothing for a minute."""
        while True:
            while len(self._live) < concurrency and more():
                self._ask()
            if not self._live:
                return
            await asyncio.sleep(self._pause)
            await self._hear()

    async def ask_info(self) -> EngineInfo:
        """The engine's gauges now."""
        self._infos.clear()
        self._tell(Hello())
        while not self._infos:
            await self._hear()
        return self._infos[-1]

    def open(self) -> None:
        """Inside the event loop."""
        self._connection = Connection(self._context, self._address)

    def close(self) -> None:
        self._connection.close()
        self._context.term()

    async def _hear(self) -> None:
        try:
            messages = await asyncio.wait_for(self._connection.receive(), _SILENCE_S)
        except TimeoutError:
            raise RuntimeError(
                f"the engine has said nothing for {_SILENCE_S:g} s; {len(self._live)} requests wait, such as "
                f"{list(self._live)[:10]}"
            ) from None
        for message in messages:
            self._take(self._decoder.decode(message))

    def _ask(self) -> None:
        self.sent += 1
        name, draw, mix = str(self.sent), self._random, self._mix
        probe = self.sent % 50 == 1
        if probe:
            params = SamplingParams(temperature=0, max_tokens=min(16, mix.longest_output), ignore_eos=True)
            self._live[name] = Asked(params, None, True)
            self._tell(GenerateIds(name, array("i", self._probe_prompt).tobytes(), params))
            return
        params = SamplingParams(
            temperature=draw.choice([0.0, 0.7, 1.0]),
            seed=draw.randrange(2**32),
            max_tokens=draw.randint(1, mix.longest_output),
            ignore_eos=draw.random() < 0.8,
            stop=tuple(draw.sample(_LETTERS, 2)) if draw.random() < mix.stopped else (),
        )
        cancel_after = draw.randint(0, params.max_tokens or 1) if draw.random() < mix.cancelled else None
        self._live[name] = asked = Asked(params, cancel_after, False)
        prompt = self._ids(draw.randint(1, mix.longest_prompt))
        if draw.random() < mix.same_prefix:
            prompt = (draw.choice(self._prefixes) + prompt)[: mix.longest_prompt]
        self._tell(GenerateIds(name, array("i", prompt).tobytes(), params))
        self._cancel_if_due(name, asked)

    def _ids(self, length: int) -> list[int]:
        return [self._random.randrange(3, self._mix.vocab_size) for _ in range(length)]

    def _cancel_if_due(self, name: str, asked: Asked) -> None:
        if asked.cancel_after is not None and not asked.cancelled and len(asked.token_ids) >= asked.cancel_after:
            asked.cancelled = True
            self._tell(Cancel(name))

    def _tell(self, message: FromClient) -> None:
        self._connection.send(self._encoder.encode(message))

    def _take(self, message: ToClient) -> None:
        match message:
            case Batch(items=items):
                for item in items:
                    if isinstance(item, Delta | Finished | Failed):
                        self._take_item(item)
                    else:
                        self.violations.append(f"nobody asked for {item!r}")
            case Failed():
                self._take_item(message)
            case EngineInfo():
                self._infos.append(message)
            case _:
                self.violations.append(f"nobody asked for {message!r}")

    def _take_item(self, item: Delta | Finished | Failed) -> None:
        asked = self._live.get(item.request_id)
        if asked is None:
            self.violations.append(f"after its end, or never asked: {item!r}")
            return
        if not isinstance(item, Failed):
            asked.text += item.text
            asked.token_ids += memoryview(item.token_ids).cast("i").tolist()
        match item:
            case Delta():
                self._cancel_if_due(item.request_id, asked)
            case Finished():
                self._end(item.request_id, item.reason)
                self.num_tokens += item.usage.num_generated_tokens
                self.num_cached += item.usage.num_cached_tokens
                self.violations += [f"request {item.request_id}: {fault}" for fault in self._faults(asked, item)]
            case Failed():
                self._end(item.request_id, f"failed: {item.code}")
                self.violations.append(f"request {item.request_id} failed: {item.code}: {item.message}")

    def _end(self, name: str, reason: str) -> None:
        del self._live[name]
        self.ended += 1
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def _faults(self, asked: Asked, finished: Finished) -> list[str]:
        """What is wrong with an answer; all of it follows from what was asked."""
        faults = []
        count, most = len(asked.token_ids), asked.params.max_tokens
        if count != finished.usage.num_generated_tokens:
            faults.append(f"{count} tokens came, usage says {finished.usage.num_generated_tokens}")
        if finished.reason == "length" and count != most:
            faults.append(f"{count} tokens of {most} and the reason is length")
        if finished.reason == "cancelled" and not asked.cancelled:
            faults.append("cancelled by nobody")
        if any(stop in asked.text for stop in asked.params.stop or ()):
            faults.append(f"a stop string of {asked.params.stop} is in {asked.text!r}")
        if asked.probe:
            self._probe_answer = self._probe_answer or asked.token_ids
            if asked.token_ids != self._probe_answer:
                faults.append(f"the same greedy request got {asked.token_ids}, before {self._probe_answer}")
        return faults
