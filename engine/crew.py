"""All child processes of one engine, by post: started, heard, seen to end, ended.

It knows nothing of why one is started, nor of what becomes of the others when one dies; the supervisor decides that.
"""

import contextlib
import os
import selectors
import time
from collections.abc import Callable, Sequence

import msgspec

from tercet.engine.child import SAY_WHERE, ChildSpec, Paths
from tercet.engine.children import Child, Post
from tercet.engine.config import EngineConfig
from tercet.engine.system_limits import raise_file_limit
from tercet.ipc.addresses import Addresses
from tercet.ipc.process_messages import FromChild, Limits

_SAYING_SECONDS = 0.1


class Crew:
    """`hear` gets each report, in `wait`."""

    def __init__(self, config: EngineConfig, hear: Callable[[Child, FromChild], None]) -> None:
        self._config = config
        self._hear = hear
        raise_file_limit()
        self._selector = selectors.DefaultSelector()
        self.children: list[Child] = []
        self.dead: list[Child] = []
        """Those whose end has been seen and not been dealt with."""
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read, selectors.EVENT_READ, lambda: os.read(self._wake_read, 4096))

    def spawn(self, post: Post, paths: Paths, addresses: Addresses, incarnation: int) -> None:
        """Start all processes of a post."""
        for rank in range(self._config.tensor_parallel_size if post.role == "worker" else 1):
            child = Child(ChildSpec(post.role, rank, self._config, paths, addresses, incarnation, post.replica))
            self.children.append(child)
            child.watch(self._selector, self._hear, self._note_death)

    def of(self, post: Post) -> list[Child]:
        return [child for child in self.children if child.post == post]

    def only(self, post: Post) -> Child | None:
        """Of a post that has one process, if it has one now."""
        return next(iter(self.of(post)), None)

    def wait(self, timeout: float) -> None:
        """Until something is heard, has ended, or `wake` was called."""
        for key, _ in self._selector.select(timeout):
            key.data()

    def wake(self) -> None:
        """Safe in signal handlers and other threads."""
        with contextlib.suppress(OSError):  # it has ended already
            os.write(self._wake_write, b"x")

    def kill_hung(self, hung: list[Child]) -> None:
        """They and those they may be waiting for print first where they stand: it is all that can be known.

        Who beats again meanwhile was slow, and is spared.
        """
        for child in self.children:
            if any(child.post == other.post for other in hung):
                child.process.send_signal(SAY_WHERE)
        asked = time.monotonic()
        time.sleep(_SAYING_SECONDS)
        self.wait(0)
        for child in hung:
            if child.last_heard < asked:
                child.hung = True
                child.process.kill()

    def take_dead(self) -> list[Child]:
        """Reaped, to be dealt with now."""
        dead, self.dead = self.dead, []
        for child in dead:
            child.reap(self._selector)
        return dead

    def discard(self, post: Post) -> None:
        """End all processes of a post and forget them."""
        gone = self.of(post)
        for child in gone:
            child.process.kill()
        for child in gone:
            self.children.remove(child)
            child.reap(self._selector)

    def end(self) -> None:
        """End everything. They hold nothing that needs a goodbye."""
        for child in self.children:
            child.process.kill()
        for child in self.children:
            child.reap(self._selector)
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _note_death(self, child: Child) -> None:
        self._selector.unregister(child.pidfd)
        self.dead.append(child)


def common_limits(children: list[Child]) -> Limits:
    """What all ranks can do: the least of each."""
    return least_limits([child.loaded.limits for child in children if child.loaded and child.loaded.limits])


def least_limits(limits: Sequence[Limits]) -> Limits:
    """What all of them allow."""
    return msgspec.structs.replace(
        limits[0],
        num_pages=min(one.num_pages for one in limits),
        max_model_len=min(one.max_model_len for one in limits),
        num_host_pages=min(one.num_host_pages for one in limits),
        num_host_states=min(one.num_host_states for one in limits),
    )
