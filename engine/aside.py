"""What waits to be done aside of the tokenizer's event loop, in a few threads: bounded, as the scheduler's line is.

It knows no message; each thing is so many bytes.
"""

import os
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

import anyio
import anyio.to_thread

from tercet.engine.config import EngineConfig
from tercet.engine.refusal import RETRY_AFTER_S, Refusal

_THREADS = 2
_IMAGE_THREADS = 4
"""Decoders take one core each, and texts are not to wait for them."""
_TOKEN_BYTES = 4

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


class Aside:
    """Who is let in is in memory until it is done. What is cancelled keeps its place too: it is soon done."""

    def __init__(self, config: EngineConfig) -> None:
        # So many the schedulers may take at once.
        self._max_requests = config.data_parallel_size * (config.max_queued_requests + config.max_num_seqs)
        self._max_bytes = config.data_parallel_size * _TOKEN_BYTES * config.max_queued_tokens
        self._config = config
        size = config.data_parallel_size
        self._for_each = f", for each of {size} replicas" if size > 1 else ""
        self._threads = anyio.CapacityLimiter(_THREADS)
        self._image_threads = anyio.CapacityLimiter(min(_IMAGE_THREADS, len(os.sched_getaffinity(0))))
        self._num_requests = self._num_bytes = 0

    def enter(self, num_bytes: int, *, is_known: bool = False) -> None:
        """Raises `Refusal` where too much waits already; never for what the engine took once before (`is_known`).

        One alone may be of any size.
        """
        too_many = self._num_requests >= self._max_requests
        too_much = bool(self._num_requests) and self._num_bytes + num_bytes > self._max_bytes
        if (too_many or too_much) and not is_known:
            text = (
                f"{self._num_requests} requests of {self._num_bytes} bytes wait to be tokenized already "
                f"(--max-queued-requests is {self._config.max_queued_requests}, --max-queued-tokens "
                f"{self._config.max_queued_tokens}, of {_TOKEN_BYTES} bytes each{self._for_each}); ask again in "
                f"{RETRY_AFTER_S:.0f} s"
            )
            raise Refusal("overloaded", text, RETRY_AFTER_S)
        self._num_requests += 1
        self._num_bytes += num_bytes

    async def run(self, num_bytes: int, has_images: bool, work: Callable[[*_Ts], _T], *args: *_Ts) -> _T:
        """Do the work of one that has entered, when its turn comes."""
        try:
            threads = self._image_threads if has_images else self._threads
            return await anyio.to_thread.run_sync(work, *args, limiter=threads)
        finally:
            self._num_requests -= 1
            self._num_bytes -= num_bytes
