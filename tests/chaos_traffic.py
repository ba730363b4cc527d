"""Clients that ask all the time, over the engine's socket and over HTTP, and compare what they get.

It knows no fault; that the HTTP door may have died, and with it what it carried, it is told.
"""

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import anyio
import msgspec

from chaos_http import Cut, Refused, ask_http
from checkpoints import random_prompts
from tercet.ipc.client import Client, ClientError, Embedding, Generation
from tercet.ipc.messages import EmbeddingParams, SamplingParams, Structured

NUM_CASES = 12
ADAPTERS = ("sql", "poems")
_RECOVERY_SECONDS = 150.0
"""From a fault to answers: long, for machines that others keep busy."""
_DOOR_SECONDS = 60.0
"""A client whose connections are cut gives up after so long."""


@dataclass
class Record:
    """What happened."""

    faults: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    """By how they came: socket or http."""
    embedded: int = 0
    """Of those that finished by the socket."""
    cancelled: int = 0
    changes: Counter[str] = field(default_factory=Counter)
    """Of the engine, by what they are, and of those that failed."""
    cut: int = 0
    """Streams over HTTP whose door died."""
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    recoveries: list[float] = field(default_factory=list)
    """Seconds from a fault until requests that were asked after it, by every way, have ended."""

    def report(self) -> str:
        times = sorted(self.recoveries) or [0.0]
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items()))
        ways = ", ".join(f"{count} by {way}" for way, count in sorted(self.finished.items()))
        changes = ", ".join(f"{count} {kind}" for kind, count in sorted(self.changes.items()))
        return (
            f"{self.faults.total()} faults ({kinds}); {self.changes.total()} changes ({changes}); "
            f"{self.finished.total()} requests finished ({ways}), "
            f"{self.embedded} with an embedding, the others with {self.tokens} tokens; {self.cancelled} cancelled, "
            f"{self.cut} cut off with their door; lost or different: {len(self.wrong)}; seconds "
            f"until requests asked after the fault had ended: median "
            f"{times[len(times) // 2]:.1f}, longest {times[-1]:.1f}"
        )


@dataclass(frozen=True)
class Case:
    prompt: list[int]
    params: SamplingParams

    @property
    def embedding(self) -> EmbeddingParams:
        """How its prompt is embedded."""
        return EmbeddingParams(adapter=self.params.adapter)


class Wanted(NamedTuple):
    """What is said to a case, and what is made of its prompt, when nothing else happens."""

    case: Case
    generation: Generation
    embedding: Embedding


def cases(seed: int) -> list[Case]:
    """Greedy and sampled, short and long, of two adapters and of none, some with a stop string, every fourth held to a
    form."""
    draw = random.Random(seed)
    return [
        Case(
            prompt,
            SamplingParams(
                temperature=draw.choice([0.0, 1.0]),
                seed=draw.randrange(2**62),
                max_tokens=draw.choice([5, 60, 200]),
                stop=draw.choice([(), (), "ab", "e"]),
                ignore_eos=bool(index % 4),
                adapter=draw.choice([None, *ADAPTERS]),
                structured=None if index % 4 else Structured(regex="[a-z ]{80,90}"),
            ),
        )
        for index, prompt in enumerate(random_prompts(NUM_CASES, 3, 90, seed=seed))
    ]


class Traffic:
    """Several clients of both kinds."""

    def __init__(self, address: str, http: str, wanted: list[Wanted], record: Record, seed: int) -> None:
        self._address = address
        self._http = http
        self._wanted = wanted
        self._record = record
        self._seed = seed
        self._asked = 0
        self._last_finished = {"socket": 0, "http": 0}
        """The number of the youngest request that has finished, by each way."""
        self.door_may_die = False
        """A fault has struck the door and is not over: what it carries may be cut off."""
        self._num_door_faults = 0
        self.stopping = False

    async def run(self, num_clients: int, num_streams: int, num_http: int) -> None:
        async with anyio.create_task_group() as tasks:
            for client in range(num_clients):
                tasks.start_soon(self._be_client, client, num_streams)
            for stream in range(num_http):
                tasks.start_soon(self._be_http_client, random.Random(f"{self._seed} http {stream}"))

    def expect_cuts(self) -> None:
        """The door is about to be struck."""
        self.door_may_die = True
        self._num_door_faults += 1

    async def one_more(self) -> None:
        """Wait until requests that are asked from now on have ended, by every way."""
        now = self._asked
        with anyio.fail_after(_RECOVERY_SECONDS):
            while min(self._last_finished.values()) <= now:
                await anyio.sleep(0.02)
        self.door_may_die = False

    async def _be_client(self, index: int, num_streams: int) -> None:
        async with Client(self._address) as client, anyio.create_task_group() as tasks:
            for stream in range(num_streams):
                tasks.start_soon(self._ask, client, random.Random(f"{self._seed} {index} {stream}"))

    async def _ask(self, client: Client, draw: random.Random) -> None:
        while not self.stopping:
            case, wanted, embedding = draw.choice(self._wanted)
            self._asked += 1
            number = self._asked
            try:
                if draw.random() < 0.2:
                    self._compare(case, await client.embed(case.prompt, case.embedding), embedding)
                    self._finish("socket", number, 0)
                    continue
                if draw.random() < 0.1:
                    await self._ask_and_leave(client, case, wanted, draw.randrange(1, 5))
                    continue
                params = msgspec.structs.replace(case.params, n=draw.choice([1, 1, 3]))
                generations = await client.generate_several(case.prompt, params)
            except ClientError as error:
                self._record.wrong.append(f"{case} ended with {error!r}")
                continue
            self._finish("socket", number, sum(len(one.token_ids) for one in generations))
            # Of several answers the first is that of the seed, and without sampling all are.
            for got in generations if params.temperature == 0 else generations[:1]:
                if msgspec.structs.replace(got, usage=wanted.usage) != wanted:
                    self._record.wrong.append(f"{case} ({params.n} answers): got {got}, wanted {wanted}")

    def _compare(self, case: Case, got: Embedding, wanted: Embedding) -> None:
        self._record.embedded += 1
        if got.values != wanted.values:
            self._record.wrong.append(f"{case}: embedded as {got.values}, wanted {wanted.values}")

    def _finish(self, way: str, number: int, num_tokens: int) -> None:
        self._record.finished[way] += 1
        self._record.tokens += num_tokens
        self._last_finished[way] = max(self._last_finished[way], number)

    async def _ask_and_leave(self, client: Client, case: Case, wanted: Generation, num_pieces: int) -> None:
        text = ""
        async for piece in client.stream(case.prompt, case.params):
            text += piece.text
            num_pieces -= 1
            if not num_pieces:
                break
        self._leave(case, wanted, text)

    def _leave(self, case: Case, wanted: Generation, text: str) -> None:
        self._record.cancelled += 1
        if not wanted.text.startswith(text):
            self._record.wrong.append(f"{case}: {text!r} is not how {wanted.text!r} begins")

    async def _be_http_client(self, draw: random.Random) -> None:
        """A stream of the door dies with the door, and with nothing else; then this client asks again, as users do."""
        served_at = time.monotonic()
        while not self.stopping:
            case, wanted, _ = draw.choice(self._wanted)
            leave_after = draw.randrange(1, 5) if draw.random() < 0.1 else None
            self._asked += 1
            number, may_die, num_door_faults = self._asked, self.door_may_die, self._num_door_faults
            try:
                got = await ask_http(self._http, case.prompt, case.params, leave_after)
            except Cut as cut:
                self._record.cut += not isinstance(cut, Refused)
                if not may_die and num_door_faults == self._num_door_faults:
                    self._record.wrong.append(f"{case} was cut off by a door in good health: {cut}")
                if time.monotonic() - served_at > _DOOR_SECONDS:
                    self._record.wrong.append(f"the door is gone for {_DOOR_SECONDS:g} s: {cut}")
                await anyio.sleep(0.1)
                continue
            except ValueError as error:
                self._record.wrong.append(f"{case} over HTTP: {error}")
                continue
            served_at = time.monotonic()
            if got.finish_reason is None:
                self._leave(case, wanted, got.text)
                continue
            self._finish("http", number, len(got.token_ids))
            said = got.text, got.token_ids, got.finish_reason, got.stop_reason
            if said != (wanted.text, wanted.token_ids, wanted.reason, wanted.stop):
                self._record.wrong.append(f"{case} over HTTP: got {said}, wanted {wanted}")
