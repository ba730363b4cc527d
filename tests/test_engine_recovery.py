"""Front desk, planner and worker in one process, with pipes between them: each dies at any time, and what was on its
way arrives late, out of turn, or never. Every answer is said once and to the token, and in the end nobody holds a page.

What the supervisor, the tokenizer's line to the scheduler and the clients do then is played here.
"""

import random
from array import array
from collections import deque
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from simulated_worker import VOCABULARY, SimulatedWorker, undisturbed
from tercet.engine.front_desk import FrontDesk, Item
from tercet.engine.live import Live
from tercet.engine.planner import Planner
from tercet.engine.planner_settings import PlannerSettings
from tercet.engine.preparation import make_detokenizer
from tercet.ipc.answers import Delta, Finished
from tercet.ipc.messages import SamplingParams
from tercet.ipc.process_messages import Limits, WorkersRestarted
from tercet.ipc.step_messages import Abort, Forget, Sampled, Sampling, Step, Submit, ToTokenizer
from test_engine_planner import settings, tight_sizes


class Question:
    """A request with n answers, as its client sees it."""

    def __init__(self, name: str, prompt: list[int], n: int, sampling: Sampling) -> None:
        self.name, self.prompt = name, prompt
        self.samplings = [replace(sampling, seed=sampling.seed + index) for index in range(n)]
        self.got: list[list[int]] = [[] for _ in range(n)]
        self.ends: list[Finished | None] = [None] * n

    @property
    def unfinished(self) -> list[int]:
        return [index for index, end in enumerate(self.ends) if end is None]

    def take(self, item: Item) -> None:
        assert isinstance(item, Delta | Finished), item
        assert self.ends[item.index] is None, "news after the end"
        self.got[item.index] += array("i", item.token_ids)
        if isinstance(item, Finished):
            self.ends[item.index] = item

    def check(self) -> None:
        for got, sampling, end in zip(self.got, self.samplings, self.ends, strict=True):
            said = undisturbed(self.prompt, sampling)
            assert end is not None
            assert end.usage.num_generated_tokens == len(got)
            assert got == (said[: len(got)] if end.reason == "cancelled" else said)


class Parts:
    """The processes, and the pipes between them."""

    def __init__(self, draw: random.Random, chosen: PlannerSettings) -> None:
        self._draw, self._settings = draw, chosen
        self._incarnation = 0
        self.planner = Planner(chosen, b"key")
        self._worker, self._epoch = self._new_worker(), 0
        self.desk = FrontDesk(None)
        self.to_scheduler: list[deque[Submit | Abort | Forget]] = [deque()]
        """One for each connection that there has been: what is in an old one may be read after what is in the last."""
        self._to_tokenizer: deque[ToTokenizer] = deque()
        self._to_worker: deque[Step] = deque()
        self._from_worker: deque[Sampled] = deque()
        self._untold_workers = self._untold_scheduler = False
        self._questions: dict[str, Question] = {}
        self._client = b"0"

    def _new_worker(self) -> SimulatedWorker:
        chosen = self._settings
        return SimulatedWorker(chosen.max_num_seqs, chosen.num_pages, chosen.page_size, chosen.max_num_batched_tokens)

    # ------------------------------------------------------------------------------- client and tokenizer

    def ask(self, question: Question) -> None:
        """Or what is left of it."""
        self._questions[question.name] = question
        live = self.desk.open(self._client, question.name)
        assert live is not None
        indices = question.unfinished
        again = any(question.got) or len(indices) < len(question.ends)
        prompt_ids = array("i", question.prompt).tobytes()
        for one in self.desk.split(live, indices):
            received = array("i", question.got[one.index]).tobytes()
            submit = Submit(one.number, prompt_ids, question.samplings[one.index], "", received, again)
            params = SamplingParams(seed=1)
            self.desk.submit(one, submit, params, make_detokenizer(None, params))
        self.to_scheduler[-1].append(live.asked.submit(0.0))

    def cancel(self, question: Question) -> None:
        lives, ends = self.desk.cancel(self._client, question.name, 0.0)
        self._abort(lives)
        self._tell(ends)

    def speak(self) -> None:
        """Some of the scheduler's news go to the client; to one that has left they do not."""
        count = min(len(self._to_tokenizer), self._draw.randint(1, 4))
        items, aborts = self.desk.accept([self._to_tokenizer.popleft() for _ in range(count)], 0.0)
        self._abort(aborts)
        self._tell(items.get(self._client, []))

    def _tell(self, items: Sequence[Item]) -> None:
        for item in items:
            self._questions[item.request_id].take(item)

    def _abort(self, lives: Sequence[Live]) -> None:
        if lives:
            self.to_scheduler[-1].append(Abort(array("q", [live.number for live in lives]).tobytes()))

    # --------------------------------------------------------------------------------- scheduler and worker

    def hear(self) -> None:
        pipes = [pipe for pipe in self.to_scheduler if pipe]
        if not pipes:
            return
        match self._draw.choice(pipes).popleft():
            case Submit() as submit:
                assert self.planner.submit(submit, 0.0) is None
            case Abort() as abort:
                self.planner.abort(abort)
            case Forget() as forget:
                self.planner.forget(forget)

    def plan(self) -> None:
        if (step := self.planner.plan(0.0)) is not None:
            self._to_worker.append(step)

    def complete(self) -> None:
        if self._from_worker and (sampled := self._from_worker.popleft()).epoch == self.planner.epoch:
            tokens = self.planner.complete(sampled, 1.0)
            if tokens is not None:
                self._to_tokenizer.append(tokens)

    def work(self) -> None:
        """Take a plan or execute a step, as a worker's loop and its device do."""
        if self._worker.in_flight and (not self._to_worker or self._draw.random() < 0.6):
            self._execute()
        elif self._to_worker and (step := self._to_worker.popleft()).epoch >= self._epoch:
            if step.epoch > self._epoch:  # of a new scheduler: all that the old one asked for comes before it
                while self._worker.in_flight:
                    self._execute()
                self._worker, self._epoch = self._new_worker(), step.epoch
            self._worker.issue(step)

    def _execute(self) -> None:
        self._from_worker.append(replace(self._worker.execute(), epoch=self._epoch))

    # ------------------------------------------------------------------------------------ death and return

    def kill(self, role: str) -> None:
        """What it has not read is lost, or the end of that; so is the end of what it had sent."""
        self._incarnation += 1
        match role:
            case "worker":
                self._lose(self._from_worker)
                self._worker, self._epoch = self._new_worker(), self._incarnation
                self._untold_workers = True
            case "scheduler":
                self._lose(self._to_tokenizer)
                self._lose(self._to_worker)
                self.to_scheduler = self.to_scheduler[-1:]  # what is in it reaches the successor
                self.planner = Planner(self._settings, b"another key")
                self.planner.epoch = self._incarnation
                self._untold_scheduler = True
            case "tokenizer":
                self._lose(self.to_scheduler[-1])
                self.desk = FrontDesk(None, (self._incarnation << 40) + 1)
                self.to_scheduler.append(deque([Forget(self.desk.next_number)]))
                self._client = b"%d" % self._incarnation
                for question in self._questions.values():
                    if question.unfinished:
                        self.ask(question)

    def _lose(self, pipe: "deque[object] | deque[ToTokenizer] | deque[Step] | deque[Sampled]") -> None:
        while pipe and self._draw.random() < 0.5:
            pipe.pop()

    def tell(self) -> None:
        """The supervisor tells those that live of the dead, some time later."""
        if self._untold_workers and self._draw.random() < 0.3:
            self._untold_workers = False
            self._incarnation += 1
            limits = Limits(self._settings.num_pages, self._settings.max_model_len, VOCABULARY, "", "", 8)
            assert self.planner.restart(WorkersRestarted(self._incarnation, limits, None), 0.0) == []
        if self._untold_scheduler and self._draw.random() < 0.3:
            self._untold_scheduler = False
            self._lose(self.to_scheduler[-1])
            self.to_scheduler.append(deque([Forget(self.desk.next_number)]))
            self.to_scheduler[-1] += [asked.submit(0.0, again=True) for asked in self.desk.renumber()]

    @property
    def at_rest(self) -> bool:
        return self.planner.idle and not (any(self.to_scheduler) or self._untold_scheduler or self._untold_workers)


@pytest.mark.parametrize("seed", range(40))
def test_whoever_dies_every_answer_is_said_once(seed: int) -> None:
    draw = random.Random(seed)
    parts = Parts(draw, chosen := settings(**tight_sizes(draw), deterministic=draw.random() < 0.4))
    questions = []
    for name in range(draw.choice([5, 12])):
        stops = array("i", [draw.randrange(VOCABULARY) for _ in range(draw.choice([0, 0, 2]))]).tobytes()
        sampling = Sampling(
            0.0, 0, 1.0, 0.0, draw.randrange(1000), draw.randint(1, 18), 0, stops, adapter_load=draw.choice([-1, 0, 1])
        )
        prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 12))]
        questions.append(Question(str(name), prompt, draw.choice([1, 1, 2, 4]), sampling))
    to_ask, num_deaths = list(questions), draw.choice([2, 6, 12])
    cancelled = draw.sample(questions, 1)
    turns = [parts.hear, parts.plan, parts.work, parts.complete, parts.speak]
    while to_ask or any(question.unfinished for question in questions) or not parts.at_rest:
        action = draw.random()
        if to_ask and action < 0.1:
            parts.ask(to_ask.pop())
        elif action < 0.11:
            for question in cancelled:
                parts.cancel(question)
        elif num_deaths and action < 0.12:
            num_deaths -= 1
            parts.kill(draw.choice(["worker", "scheduler", "tokenizer"]))
        elif action < 0.2:
            parts.tell()
        else:
            draw.choices(turns, [4, 3, 4, 3, 2])[0]()
    for question in questions:
        question.check()
    assert parts.desk.num_live == 0
    assert parts.planner.load().num_free_pages == chosen.num_pages - 1
