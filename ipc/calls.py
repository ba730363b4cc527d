"""The live requests of one client: who gets which message, and what becomes of them when the engine is lost.

It knows no socket: `send` is the client's.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tercet.ipc.answers import Delta, Failed, Finished, Item, Rejected
from tercet.ipc.errors import EngineDied, RequestRefused, error_of
from tercet.ipc.messages import Cancel, FromClient
from tercet.ipc.pending import Pending

_MOST_LOSSES = 4
"""A request that sees so many connections end and no news between them is given up: it may be what ends them."""


class Calls:
    """By name."""

    def __init__(self, send: Callable[[FromClient], None], successor_timeout: float) -> None:
        """`successor_timeout`: seconds that requests wait for another engine when this one is shutting down."""
        self._send = send
        self._successor_timeout = successor_timeout
        self._calls: dict[str, Pending[Any]] = {}
        self._waiting: set[str] = set()
        """For the first token."""
        self.num_tokens = 0
        """That have come so far, of all requests, those that are no more included."""

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[Pending[Any]]:
        return iter(list(self._calls.values()))

    def open(self, call: Pending[Any]) -> None:
        """It has been asked, or is about to be."""
        self._calls[call.request.request_id] = call
        self._waiting.add(call.request.request_id)

    def close(self, call: Pending[Any]) -> None:
        """Nobody waits for it any more."""
        if self._forget(call.request.request_id) is not None:
            self._send(Cancel(call.request.request_id))

    def cancel_all(self) -> None:
        """They stay until they are lost."""
        for name in self._calls:
            self._send(Cancel(name))

    def split(self, items: Sequence[Item]) -> tuple[Sequence[Item], Sequence[Item]]:
        """Those whose readers have had nothing yet, who wait longest, and the others."""
        if not self._waiting:
            return (), items
        first = [item for item in items if item.request_id in self._waiting]
        return first, [item for item in items if item.request_id not in self._waiting] if first else items

    def take(self, item: Item) -> None:
        """News of one of them, or of one that is no more."""
        if isinstance(item, Delta | Finished):
            self.num_tokens += len(item.token_ids) // 4
        call = self._calls.get(item.request_id)
        if call is None:
            if isinstance(item, Delta):
                self._send(Cancel(item.request_id))  # a request sent to an engine lost since
            return
        match item:
            case Delta():  # as nearly always
                if not call.has_begun:
                    self._waiting.discard(item.request_id)
                call.take(item)
            case Failed(code="draining") if self._successor_timeout:
                until = asyncio.get_running_loop().time() + self._successor_timeout
                call.wait_for_successor(error_of(item), until)
            case Failed():
                self._forget(item.request_id)
                call.fail(error_of(item))
            case _:
                if call.take(item):
                    self._forget(item.request_id)

    def reject(self, message: Rejected) -> None:
        """It never became a request."""
        call = self._forget(message.request_id or "")
        if call is not None:
            call.fail(RequestRefused(message.code, message.message))

    def ask_again(self, was_up: bool) -> None:
        """The connection is a new one; `was_up`: somebody had answered on the old one."""
        for name, call in list(self._calls.items()):
            request = call.rest(was_up)
            if call.num_losses < _MOST_LOSSES:
                self._send(request)
            else:
                self._forget(name)
                call.fail(EngineDied("engine_died", f"the connection ended {call.num_losses} times without any news"))

    def give_up_waiting(self, now: float) -> None:
        """For a successor that has not come in time."""
        for name, call in list(self._calls.items()):
            if call.gave_up_waiting(now):
                self._forget(name)

    def lose(self, error: EngineDied) -> None:
        """No answer will come any more."""
        calls, self._calls = self._calls, {}
        self._waiting.clear()
        for call in calls.values():
            call.fail(error)

    def _forget(self, name: str) -> Pending[Any] | None:
        self._waiting.discard(name)
        return self._calls.pop(name, None)
