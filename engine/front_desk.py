"""Who asked for what, and how far each answer is: the tokenizer process without its sockets.

Pure: no socket, no clock but the argument `now`. The desk owns every live request from the moment its name is taken
until its one terminal message. What it returns is to be sent: items per client, and request numbers to abort.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import assert_never

from tercet.engine.deadlines import Deadlines
from tercet.engine.detokenizer import Detokenizer
from tercet.engine.embedding import made
from tercet.engine.given_up import KILLS_WORKERS, GivenUp
from tercet.engine.live import Asked, Client, Live
from tercet.engine.logprobs import read_row, unpack_rows, unpack_words
from tercet.engine.outstanding import Outstanding
from tercet.engine.pieces import Pieces
from tercet.engine.refusal import RETRY_AFTER_S
from tercet.ipc.answers import Delta, Failed, Finished, FinishReason, Item, Logprobs, PromptIds, PromptLogprobs, Usage
from tercet.ipc.beyond import PromptLogs
from tercet.ipc.messages import SamplingParams
from tercet.ipc.step_messages import Ended, Load, Submit, Tokens, ToTokenizer, Unservable

_NOBODY: dict[int, Ended] = {}


class FrontDesk:
    """All live requests of all clients."""

    def __init__(
        self, pieces: Pieces | None, first_number: int = 1, num_replicas: int = 1, restart_window: float = 60.0
    ) -> None:
        self._pieces = pieces
        self.given_up = GivenUp(restart_window)
        self._by_number: dict[int, Live] = {}
        self._by_client: dict[Client, dict[str, Asked]] = {}
        self._last_number = first_number - 1
        self._deadlines = Deadlines()
        self.loads = [Load(0, 0, 0, 0, 0, 0, 0, 0)] * num_replicas
        """The latest gauges of each replica's scheduler."""
        self.outstanding = Outstanding(num_replicas)

    @property
    def num_live(self) -> int:
        """Answers; a request is one until it is split."""
        return len(self._by_number)

    def clients(self) -> list[Client]:
        """Everybody who waits for something."""
        return list(self._by_client)

    def open(self, client: Client, request_id: str) -> Live | None:
        """Take the name for a new request, one answer so far; None if this client has a live request of that name."""
        mine = self._by_client.setdefault(client, {})
        if request_id in mine:
            return None
        mine[request_id] = Asked(client, request_id)
        return self._add(mine[request_id])

    def split(self, live: Live, indices: Sequence[int]) -> list[Live]:
        """A request becomes so many answers, told apart by an index; it has been one until now."""
        lives = [live, *(self._add(live.asked) for _ in indices[1:])]
        for one, index in zip(lives, indices, strict=True):
            one.index = index
        return lives

    def _add(self, asked: Asked) -> Live:
        self._last_number += 1
        live = self._by_number[self._last_number] = Live(asked, self._last_number)
        asked.answers.append(live)
        return live

    def submit(self, live: Live, submit: Submit, params: SamplingParams, detokenizer: Detokenizer) -> None:
        """An answer that the scheduler will be asked for; its tokens may come from then on.

        The detokenizer knows what the client has received of it already.
        """
        live.submit = submit
        live.num_prompt = len(submit.prompt_ids) // 4
        live.logprobs, live.prompt_logprobs = params.logprobs, submit.sampling.prompt_logprobs or 0
        live.keeps_stop = params.include_stop_str_in_output
        if params.seed is None and submit.sampling.temperature:
            live.untold_seed = (submit.sampling.seed - live.index) % 2**63
        live.detokenizer = detokenizer
        live.generated = array("i", submit.generated_ids)
        live.num_generated = len(live.generated)

    def renumber(self, replica: int = 0) -> list[Asked]:
        """New numbers for all that is live with a replica, or will be yet, since its scheduler is new: what comes of
        the old ones comes too late."""
        lives = [live for live in self._by_number.values() if live.asked.replica in (None, replica)]
        for live in lives:
            del self._by_number[live.number]
            self._last_number += 1
            live.number = self._last_number
            self._by_number[live.number] = live
        return list(dict.fromkeys(live.asked for live in lives if live.submit is not None))

    @property
    def next_number(self) -> int:
        """Of the next request."""
        return self._last_number + 1

    def is_live(self, live: Live) -> bool:
        """Whether it has not ended, while work on it was going on elsewhere."""
        return self._by_number.get(live.number) is live

    def fail(self, live: Live, code: str, message: str, retry_after: float | None = None) -> Failed:
        """End a request badly, whatever of it is live."""
        for one in list(live.asked.answers):
            self._forget(one)
        return Failed(live.request_id, code, message, retry_after)

    def give_time(self, live: Live, seconds: float, now: float) -> None:
        """It has so many seconds in all."""
        self._deadlines.give(live.asked, seconds, now, self.num_live)

    def expire(self, now: float) -> list[tuple[list[Live], Failed]]:
        """End what has had its time: what to abort, what to tell its client."""
        return [
            (list(asked.answers), self.fail(asked.answers[0], "timed_out", f"the request had its timeout, {time:g} s"))
            for asked, time in self._deadlines.passed(now)
        ]

    def cancel(self, client: Client, request_id: str, now: float) -> tuple[list[Live], list[Finished]]:
        """End a request because its client wants so: what to abort, what to tell.

        Nothing, if there is no such request: it may just have ended.
        """
        asked = self._by_client.get(client, {}).get(request_id)
        lives = [] if asked is None else list(asked.answers)
        ends = [self._finish(live, "cancelled", None, self._usage(live, now)) for live in lives]
        return lives, ends

    def drop_client(self, client: Client) -> list[Live]:
        """Forget all requests of a client that cannot be reached; they are to be aborted."""
        dropped = [live for asked in self._by_client.get(client, {}).values() for live in asked.answers]
        for live in dropped:
            self._forget(live)
        return dropped

    def fail_all(self, code: str, message: str) -> dict[Client, list[Item]]:
        """End everything badly. An engine that drains may have a successor, who is worth asking."""
        retry_after = RETRY_AFTER_S if code == "draining" else None
        items: dict[Client, list[Item]] = {}
        for live in [asked.answers[0] for mine in self._by_client.values() for asked in mine.values()]:
            items.setdefault(live.client, []).append(self.fail(live, code, message, retry_after))
        return items

    def accept(self, messages: Iterable[ToTokenizer], now: float) -> tuple[dict[Client, list[Item]], list[Live]]:
        """What schedulers say: new items for each client, and requests to abort since a stop string ended them.

        Several steps at once make one `Delta` a request.
        """
        items: dict[Client, list[Item]] = {}
        touched: dict[int, Live] = {}
        aborts: list[Live] = []
        for message in messages:
            match message:
                case Tokens():
                    self._accept_tokens(message, now, touched, items, aborts)
                case Unservable():
                    live = self._by_number.get(message.number)
                    if live is not None:
                        if message.code == KILLS_WORKERS and live.submit is not None:
                            self.given_up.add(live.submit, now)
                        siblings = list(live.asked.answers)
                        failed = self.fail(live, message.code, message.message, message.retry_after)
                        items.setdefault(live.client, []).append(failed)
                        aborts += [one for one in siblings if one is not live]
                        for one in siblings:
                            touched.pop(one.number, None)
                case Load():
                    self.loads[message.replica] = message
                case _:
                    assert_never(message)
        for live in touched.values():
            token_ids = array("i", live.fresh_ids).tobytes()
            delta = Delta(live.request_id, "".join(live.fresh_text), token_ids, live.untold_seed, live.index)
            live.untold_seed = None
            live.fresh_text.clear()
            live.fresh_ids.clear()
            self._tell(items, live, delta)
        return items, aborts

    def _accept_tokens(
        self,
        tokens: Tokens,
        now: float,
        touched: dict[int, Live],
        items: dict[Client, list[Item]],
        aborts: list[Live],
    ) -> None:
        ended = {one.number: one for one in tokens.ended} if tokens.ended else _NOBODY
        by_number = self._by_number
        for started in tokens.started:
            if (live := by_number.get(started.number)) is not None:
                live.started = started
                if (told_ids := live.asked.untold_prompt) is not None:
                    live.asked.untold_prompt = None
                    told = PromptIds(live.request_id, told_ids)
                    items.setdefault(live.client, []).append(told)
        for logs in tokens.prompt_logs:
            if (live := by_number.get(logs.row)) is not None:
                self._accept_prompt_logs(live, logs, items)
        for vector in tokens.vectors:
            if (live := by_number.get(vector.row)) is not None:
                live.vector = vector.values
        numbers, token_ids = memoryview(tokens.numbers).cast("q"), memoryview(tokens.token_ids).cast("i")
        last = {number: place for place, number in enumerate(numbers) if number in ended} if ended else {}
        rows = dict(zip(unpack_rows(tokens.logs), unpack_words(tokens.logs), strict=True)) if tokens.logs else {}
        for place, (number, token_id) in enumerate(zip(numbers, token_ids, strict=True)):
            live = by_number.get(number)
            if live is None:  # ended here, while the scheduler did not know yet
                continue
            detokenizer = live.detokenizer
            assert detokenizer is not None
            live.num_generated += 1
            if live.first_token_at is None:
                live.first_token_at, live.asked.has_begun = now, True
                self.outstanding.begin(live.asked)
            live.fresh_ids.append(token_id)
            live.generated.append(token_id)
            touched[number] = live
            if place in rows and live.logprobs is not None:
                live.fresh_logs.append(tuple(read_row(rows[place], token_id, live.logprobs, self._pieces)))
            end = ended[number] if last.get(number) == place else None
            # The token that ended a request is among its ids, but its text is not part of the answer.
            if end is None or end.stop_id is None or live.keeps_stop:
                live.fresh_text.append(detokenizer.push(token_id))
                if detokenizer.stop_hit is not None:
                    finished = self._finish(live, "stop", detokenizer.stop_hit, self._usage(live, now))
                    self._tell(items, live, finished)
                    aborts.append(live)
                    del touched[number]
        for end in tokens.ended:
            live = by_number.get(end.number)
            if live is not None:
                assert live.submit is not None
                if (how := live.submit.sampling.embedding) is None:
                    self._tell(items, live, self._finish(live, end.reason, end.stop_id, end.usage))
                else:
                    self._tell(items, live, made(live.request_id, how, live.vector, end.usage))
                    self._forget(live)
                touched.pop(end.number, None)

    def _accept_prompt_logs(self, live: Live, logs: PromptLogs, items: dict[Client, list[Item]]) -> None:
        """After a preemption they come once more: what the client has is left out."""
        assert live.submit is not None
        prompt_ids = memoryview(live.submit.prompt_ids).cast("i")
        rows = []
        for position, words in enumerate(unpack_words(logs), logs.position):
            if position == live.num_prompt_logged:
                rows.append(tuple(read_row(words, prompt_ids[position], live.prompt_logprobs, self._pieces)))
                live.num_prompt_logged += 1
        if rows:
            first = live.num_prompt_logged - len(rows)
            items.setdefault(live.client, []).append(PromptLogprobs(live.request_id, first, tuple(rows)))

    def _tell(self, items: dict[Client, list[Item]], live: Live, item: Item) -> None:
        """News of a request; log-probabilities of its tokens come before them."""
        mine = items.setdefault(live.client, [])
        if live.fresh_logs:
            mine.append(Logprobs(live.request_id, tuple(live.fresh_logs), live.index))
            live.fresh_logs.clear()
        mine.append(item)

    def _finish(self, live: Live, reason: FinishReason, stop: str | int | None, usage: Usage) -> Finished:
        self._forget(live)
        if live.detokenizer is not None:
            live.fresh_text.append(live.detokenizer.finish())
            if stop is None and live.detokenizer.stop_hit is not None:  # it was in the bytes that waited for others
                reason, stop = "stop", live.detokenizer.stop_hit
        text, token_ids = "".join(live.fresh_text), array("i", live.fresh_ids).tobytes()
        return Finished(live.request_id, text, token_ids, reason, stop, usage, live.index)

    def _usage(self, live: Live, now: float) -> Usage:
        """For a request that ends here; only the scheduler knows how often it was preempted."""
        return Usage(
            num_prompt_tokens=live.num_prompt,
            num_generated_tokens=live.num_generated,
            num_cached_tokens=live.started.num_cached_tokens,
            num_preemptions=0,
            queued_s=live.started.queued_s,
            prefill_s=live.started.prefill_s,
            decode_s=0.0 if live.first_token_at is None else now - live.first_token_at,
        )

    def _forget(self, live: Live) -> None:
        del self._by_number[live.number]
        live.asked.answers.remove(live)
        self.outstanding.end_one(live.asked)
        if live.asked.answers:
            return
        mine = self._by_client[live.client]
        del mine[live.request_id]
        if not mine:
            del self._by_client[live.client]
