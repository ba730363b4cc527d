"""The watch over an engine's processes once they serve: who hangs is killed, and who has died is started again.

What dies in a replica is replaced there: the others notice nothing. It knows nothing of requests, nor how an engine
starts and ends. A hang is a silence, and made a death.
"""

import time
from collections import defaultdict
from collections.abc import Callable

from tercet.engine.children import Child, Post
from tercet.engine.config import EngineConfig
from tercet.engine.crew import Crew, common_limits, least_limits
from tercet.engine.errors import StartupFailed, TercetError
from tercet.engine.log_line import log_line
from tercet.engine.restarts import Restarts
from tercet.engine.start_clock import in_words
from tercet.ipc.process_messages import (
    Begin,
    Impaired,
    Limits,
    Mending,
    NewLimits,
    SchedulerRestarted,
    WorkersAway,
    WorkersRestarted,
)

TOKENIZER, HTTP = Post("tokenizer"), Post("http")

_SETTLE_SECONDS = 0.05
"""From one worker's death until those of others that have the same cause have been seen."""


class ChildDied(TercetError):
    """A child ended and is not replaced; the message is its obituary."""


class Watch:
    """All processes of a post die and are replaced together."""

    def __init__(
        self, config: EngineConfig, crew: Crew, limits: list[Limits], spawn: Callable[[Post, int], None]
    ) -> None:
        """`limits`: what each replica began with. `spawn` starts the processes of a post, of an incarnation."""
        self._config = config
        self._crew = crew
        self._limits = limits
        self._spawn = spawn
        self._incarnation = 0
        self._restarts = defaultdict[Post, Restarts](lambda: Restarts(config.max_restarts, config.restart_window))
        self._due: dict[Post, float] = {}
        """When the processes of a post are to be started again."""
        self._arriving: dict[Post, float] = {}
        """Until when the processes of a post, started again, have to serve."""
        self._impaired: tuple[str, ...] = ()
        """What the HTTP door was last told about `_due` and `_arriving`."""
        self._mending: tuple[int, ...] = ()
        """And the tokenizer."""
        self._blame: list[str | None] = [None] * len(limits)
        """Of each replica's workers."""
        self._away = False
        """The workers have been sent away, and nobody misses them."""
        self._on_trial: set[Post] = set()
        """Workers that were sent for and have not served since, or that read other weights. If one dies meanwhile, none
        of them is tried again."""
        self._with_others: set[Post] = set()
        """Workers that will have other weights than those before them."""
        self.failure: str | None = None
        """Why that was."""
        self._last_turn = 0.0
        self.draining = False
        """The tokenizer may end by itself, which it does when nothing is left to do."""
        self.drained = False
        """It has. Nobody is started again."""

    def turn(self, until: float) -> None:
        """Hear, judge silence, bury, start again. Raises `ChildDied` when it is enough."""
        beat = self._config.heartbeat_timeout / 5
        alarms = [until, time.monotonic() + beat, *self._due.values()]
        self._crew.wait(max(0.0, min(alarms) - time.monotonic()))
        now = time.monotonic()
        if now - self._last_turn > self._config.heartbeat_timeout / 2:  # it was this process that stood still
            for child in self._crew.children:
                child.last_heard = now
        self._last_turn = now
        if hung := [child for child in self._crew.children if child.is_silent(now, self._config.heartbeat_timeout)]:
            self._crew.kill_hung(hung)
        if self._crew.dead:
            self._bury(now)
        for post, due in list(self._due.items()):
            if due <= now:
                del self._due[post]
                self._arriving[post] = now + self._config.startup_timeout
                self._incarnation += 1
                try:
                    self._spawn(post, self._incarnation)
                except StartupFailed as lack:
                    self._put_off(post, str(lack), now)
        for post in list(self._arriving):
            self._help_to_arrive(post, now)
        self._tell_of_replacements()

    def keep_only(self, kept: Post | None) -> None:
        """Of what has drained: the processes of all other posts end."""
        self._due.clear()
        self._arriving.clear()
        for post in {child.post for child in self._crew.children} - {kept}:
            self._crew.discard(post)

    @property
    def lacks_workers(self) -> bool:
        """Of some replica."""
        return self._away or any(post.role == "worker" for post in self._due.keys() | self._arriving.keys())

    def send_away(self) -> None:
        """All workers end, and nobody is started in their place."""
        self._away = True
        self._on_trial.clear()
        for post in self._workers:
            self._due.pop(post, None)
            self._arriving.pop(post, None)
            self._crew.discard(post)
            if (scheduler := self._crew.only(Post("scheduler", post.replica))) is not None:
                scheduler.tell(WorkersAway())

    def send_for(self, *, on_trial: bool, other_weights: bool = False) -> None:
        """Workers are wanted again. `on_trial`: one that dies before it serves is not replaced: `failure` says why.
        `other_weights`: than they had, or some of them may have had meanwhile."""
        self._away, self.failure = False, None
        now = time.monotonic()
        for post in self._workers:
            self._due[post], self._blame[post.replica] = now, None
        self._on_trial = set(self._workers) if on_trial else set()
        self._with_others |= set(self._workers) if other_weights else set()

    def put_on_trial(self) -> None:
        """Those that serve, too: one that dies before `begin_anew` is not replaced."""
        self._on_trial, self.failure = set(self._workers), None

    def begin_anew(self) -> None:
        """All workers compute with other weights: what ran is to run again."""
        self._on_trial.clear()
        for replica, limits in enumerate(self._limits):
            if (scheduler := self._crew.only(Post("scheduler", replica))) is not None:
                self._incarnation += 1
                scheduler.tell(WorkersRestarted(self._incarnation, limits, None, other_weights=True))

    @property
    def _workers(self) -> list[Post]:
        return [Post("worker", replica) for replica in range(len(self._limits))]

    def _tell_of_replacements(self) -> None:
        """The HTTP door: what keeps requests from being served, which is not a replica that others stand in for."""
        absent = self._due.keys() | self._arriving.keys()
        mending = tuple(sorted({post.replica for post in absent if post not in (TOKENIZER, HTTP)}))
        tokenizer, http = self._crew.only(TOKENIZER), self._crew.only(HTTP)
        if len(self._limits) > 1 and tokenizer is not None and mending != self._mending:
            self._mending = mending
            tokenizer.tell(Mending(mending))
        whole = len(self._limits) - len(mending)
        impaired = sorted(self._name(post) for post in absent if post in (TOKENIZER, HTTP) or not whole)
        if http is not None and http.serving and tuple(impaired) != self._impaired:
            self._impaired = tuple(impaired)
            http.tell(Impaired(self._impaired))

    def _name(self, post: Post) -> str:
        is_one_of_several = len(self._limits) > 1 and post not in (TOKENIZER, HTTP)
        return f"replica {post.replica} {post.role}" if is_one_of_several else post.role

    def _bury(self, now: float) -> None:
        """Deal with the dead. Ranks that ran together end together: they would wait for each other for ever."""
        if any(child.post.role == "worker" for child in self._crew.dead):
            time.sleep(_SETTLE_SECONDS)
            self._crew.wait(0)
        dead = self._crew.take_dead()
        posts = {child.post: child for child in reversed(dead)}
        for post in [post for post in posts if post.role == "worker"]:
            cause = next((child for child in dead if child.post == post and child.was_killed_from_outside), None)
            posts[post] = cause or posts[post]
            if posts[post].serving:  # else it has computed nothing, and what is said of those before it holds
                self._blame[post.replica] = None if cause else posts[post].obituary()
        for post, child in posts.items():
            self._replace(post, child, now)
        for post in posts:
            workers = Post("worker", post.replica)
            has_ranks = self._config.tensor_parallel_size > 1 and not self._away
            if post.role == "scheduler" and has_ranks and workers not in self._due:
                # It may have died between telling one rank and telling the next.
                self._crew.discard(workers)
                self._due[workers], self._blame[post.replica] = now, None

    def _replace(self, post: Post, child: Child, now: float) -> None:
        if post == TOKENIZER and self.draining and child.process.returncode == 0:
            self.drained = True
        elif not self.drained:
            self._put_off(post, child.obituary(), now)
        elif child.process.returncode != 0:
            log_line(f"tercet: {child.obituary()}")
        self._crew.discard(post)

    def _put_off(self, post: Post, why: str, now: float) -> None:
        """All processes of a post end, and are due again after a while."""
        self._crew.discard(post)
        self._arriving.pop(post, None)
        if post in self._on_trial:
            self.failure = why
            return
        delay = self._restarts[post].died(now)
        if delay is None:
            raise ChildDied(f"{why}; {self._restarts[post].verdict}")
        self._due[post] = now + delay
        log_line(f"tercet: {why}; starting it again")

    def _help_to_arrive(self, post: Post, now: float) -> None:
        """Let replaced processes begin once they are all loaded, and tell those whom it concerns once they serve."""
        children = self._crew.of(post)
        if now > self._arriving[post] and not all(child.serving for child in children):
            late = f"{self._name(post)} did not come back within --startup-timeout {self._config.startup_timeout:g} s"
            if post not in self._on_trial:
                raise ChildDied(late)
            self._put_off(post, late, now)
            return
        if not all(child.loaded for child in children):
            return
        if post.role == "worker":
            self._limits[post.replica] = common_limits(children)
        for child in children:
            if not child.begun:
                child.begun = True
                of_all = post in (TOKENIZER, HTTP)
                child.tell(Begin(least_limits(self._limits) if of_all else self._limits[post.replica]))
        if not all(child.serving for child in children):
            return
        del self._arriving[post]
        self._on_trial.discard(post)
        scheduler, tokenizer = self._crew.only(Post("scheduler", post.replica)), self._crew.only(TOKENIZER)
        if post.role == "worker" and tokenizer is not None:
            tokenizer.tell(NewLimits(least_limits(self._limits)))
        if post.role == "worker" and scheduler is not None:
            self._incarnation += 1
            blame = self._blame[post.replica]
            others, self._with_others = post in self._with_others, self._with_others - {post}
            scheduler.tell(WorkersRestarted(self._incarnation, self._limits[post.replica], blame, others))
            log_line(f"tercet: {children[0].name} is back; it took {in_words(children[0].phases)}")
        elif post == HTTP:
            self._impaired = ()  # the new one knows nothing
        elif post == TOKENIZER:
            self._mending = ()
        elif post.role == "scheduler":
            if self._away:
                children[0].tell(WorkersAway())
            if tokenizer is not None:
                tokenizer.tell(SchedulerRestarted(post.replica))
