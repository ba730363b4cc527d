"""The front desk, without sockets: every request ends exactly once, and its parts make the whole."""

import random
import struct
from array import array

import msgspec
import pytest

from tercet.engine.front_desk import FrontDesk, Item
from tercet.engine.live import Client, Live
from tercet.engine.pieces import Pieces
from tercet.engine.preparation import make_detokenizer
from tercet.ipc.answers import Delta, Failed, Finished, Logprobs
from tercet.ipc.beyond import Logs
from tercet.ipc.messages import SamplingParams
from tercet.ipc.step_messages import Ended, Load, Sampling, Started, Submit, Tokens, Unservable
from tokenizer_process import EOS, USAGE, byte_tokenizer, tokens

A, B = b"client a", b"client b"
PIECES = Pieces(byte_tokenizer())


@pytest.fixture
def desk() -> FrontDesk:
    return FrontDesk(PIECES)


def submitted(
    desk: FrontDesk, client: Client, name: str, params: SamplingParams | None = None, received_ids: bytes = b""
) -> Live:
    live = desk.open(client, name)
    assert live is not None
    sampling = Sampling(0.0, 0, 1.0, 0.0, 0, 100, 0, b"")
    submit = Submit(live.number, bytes(12), sampling, "", received_ids)
    asked = params or SamplingParams()
    desk.submit(live, submit, asked, make_detokenizer(PIECES, asked, memoryview(received_ids).cast("i")))
    return live


def ids_of(text: str) -> list[int]:
    return byte_tokenizer().encode(text).ids


def ended(live: Live, stop_id: int | None = None) -> Ended:
    return Ended(live.number, "length" if stop_id is None else "stop", stop_id, USAGE)


def test_names_are_per_client_and_free_again_after_the_end(desk: FrontDesk) -> None:
    live = submitted(desk, A, "x")
    assert desk.open(A, "x") is None
    assert desk.open(B, "x") is not None
    desk.fail(live, "code", "message")
    again = desk.open(A, "x")
    assert again is not None
    assert again.number not in (live.number,)
    assert not desk.is_live(live)
    assert desk.num_live == 2


def test_one_step_is_one_delta_a_request(desk: FrontDesk) -> None:
    x, y, z = submitted(desk, A, "x"), submitted(desk, B, "y"), submitted(desk, A, "z")
    (h,), (i,), (j,) = ids_of("h"), ids_of("i"), ids_of("j")
    items, aborts = desk.accept([tokens({x.number: h, y.number: i, z.number: j})], 11.0)
    assert aborts == []
    assert items == {
        A: [Delta("x", "h", array("i", [h]).tobytes()), Delta("z", "j", array("i", [j]).tobytes())],
        B: [Delta("y", "i", array("i", [i]).tobytes())],
    }


def test_several_steps_at_once_are_one_delta(desk: FrontDesk) -> None:
    x = submitted(desk, A, "x")
    messages = [tokens({x.number: token_id}) for token_id in ids_of("héy")]
    items, _ = desk.accept(messages, 11.0)
    assert items == {A: [Delta("x", "héy", array("i", ids_of("héy")).tobytes())]}
    items, _ = desk.accept([tokens({x.number: EOS}, ended(x, EOS))], 12.0)
    assert items == {A: [Finished("x", "", array("i", [EOS]).tobytes(), "stop", EOS, USAGE)]}


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (SamplingParams(), ""),
        (SamplingParams(skip_special_tokens=False), ""),
        (SamplingParams(skip_special_tokens=False, include_stop_str_in_output=True), "</s>"),
    ],
)
def test_the_text_of_the_token_that_ends(desk: FrontDesk, params: SamplingParams, text: str) -> None:
    x = submitted(desk, A, "x", params)
    items, _ = desk.accept([tokens({x.number: EOS}, ended(x, EOS))], 11.0)
    assert items == {A: [Finished("x", text, array("i", [EOS]).tobytes(), "stop", EOS, USAGE)]}


def test_a_stop_string_ends_at_once_and_aborts(desk: FrontDesk) -> None:
    x = submitted(desk, A, "x", SamplingParams(stop="END"))
    sampled = ids_of("one END two")
    messages = [tokens({x.number: token_id}) for token_id in sampled]
    messages[0] = msgspec.structs.replace(messages[0], started=(Started(x.number, 2, 0.5, 1.25),))
    items, aborts = desk.accept(messages, 12.0)
    assert aborts == [x]
    (finished,) = items[A]
    assert isinstance(finished, Finished)
    assert (finished.text, finished.reason, finished.stop) == ("one ", "stop", "END")
    assert finished.token_ids == array("i", sampled[:7]).tobytes()
    assert finished.usage.num_generated_tokens == 7
    assert finished.usage.num_prompt_tokens == 3
    assert finished.usage.num_cached_tokens == 2
    assert (finished.usage.queued_s, finished.usage.prefill_s, finished.usage.decode_s) == (0.5, 1.25, 0.0)
    # What the scheduler had on the way is dropped.
    assert desk.accept([tokens({x.number: EOS}, ended(x, EOS))], 13.0) == ({}, [])


@pytest.mark.parametrize("stop", ["", "b"])
def test_several_tokens_of_a_request_in_one_step(desk: FrontDesk, stop: str) -> None:
    """Only the last has no text, and what is behind a stop string is dropped, with its log-probabilities."""
    asked = SamplingParams(logprobs=0, stop=stop or ())
    x, y = submitted(desk, A, "x", asked), submitted(desk, A, "y", asked)
    a, b, c = ids_of("abc")
    numbers = array("q", [x.number, y.number, x.number, x.number]).tobytes()
    words = struct.pack("<fi", -0.5, 1) + struct.pack("<fi", -0.25, 2) + struct.pack("<fi", -0.125, 3)
    logs = Logs(array("i", [0, 2, 3]).tobytes(), 0, words)
    message = Tokens(numbers, array("i", [a, c, b, EOS]).tobytes(), (ended(x, EOS),), logs=logs)
    items, aborts = desk.accept([message], 11.0)
    told, finished, delta = items[A]
    assert isinstance(told, Logprobs)
    assert isinstance(finished, Finished)
    assert delta == Delta("y", "c", array("i", [c]).tobytes())
    if stop:
        assert ([row[0].logprob for row in told.tokens], aborts) == ([-0.5, -0.25], [x])
        assert (finished.text, finished.stop, finished.token_ids) == ("a", "b", array("i", [a, b]).tobytes())
    else:
        assert ([row[0].logprob for row in told.tokens], aborts) == ([-0.5, -0.25, -0.125], [])
        assert (finished.text, finished.stop) == ("ab", EOS)
        assert finished.token_ids == array("i", [a, b, EOS]).tobytes()


def test_held_text_comes_with_the_end(desk: FrontDesk) -> None:
    x = submitted(desk, A, "x", SamplingParams(stop="END"))
    items, _ = desk.accept([tokens({x.number: token_id}) for token_id in ids_of("1EN")], 11.0)
    assert items == {A: [Delta("x", "1", array("i", ids_of("1EN")).tobytes())]}
    items, _ = desk.accept([tokens({}, ended(x))], 12.0)
    assert items == {A: [Finished("x", "EN", b"", "length", None, USAGE)]}


def test_a_stop_string_in_bytes_that_only_the_end_makes_certain(desk: FrontDesk) -> None:
    x = submitted(desk, A, "x", SamplingParams(stop="\N{REPLACEMENT CHARACTER}"))
    sampled = ids_of("aé")[:-1]
    desk.accept([tokens({x.number: sampled[0]})], 11.0)
    items, _ = desk.accept([tokens({x.number: sampled[1]}, ended(x))], 12.0)
    (finished,) = items[A]
    assert isinstance(finished, Finished)
    assert (finished.text, finished.reason, finished.stop) == ("", "stop", "\N{REPLACEMENT CHARACTER}")


def test_cancel_and_the_tokens_that_cross_it(desk: FrontDesk) -> None:
    x = submitted(desk, A, "x")
    assert desk.cancel(B, "x", 11.0) == ([], [])
    lives, (finished,) = desk.cancel(A, "x", 11.0)
    assert lives == [x]
    assert (finished.reason, finished.stop, finished.usage.num_generated_tokens) == ("cancelled", None, 0)
    assert desk.cancel(A, "x", 11.0) == ([], [])
    assert desk.accept([tokens({x.number: 1}, ended(x))], 12.0) == ({}, [])
    assert desk.num_live == 0
    assert desk.clients() == []


def test_unservable_and_load(desk: FrontDesk) -> None:
    x = submitted(desk, A, "x")
    load = Load(1, 2, 3, 4, 5, 6, 7, 8)
    items, _ = desk.accept(
        [load, Unservable(x.number, "too_long_for_cache", "needs 9 pages of 4"), Unservable(99, "a", "b")], 1.0
    )
    assert items == {A: [Failed("x", "too_long_for_cache", "needs 9 pages of 4")]}
    assert desk.loads == [load]


def test_leaving_and_failing(desk: FrontDesk) -> None:
    x, y = submitted(desk, A, "x"), submitted(desk, B, "y")
    opened = desk.open(A, "not yet submitted")
    assert opened is not None
    assert {live.number for live in desk.drop_client(A)} == {x.number, opened.number}
    assert desk.drop_client(A) == []
    assert desk.fail_all("engine_died", "why") == {B: [Failed("y", "engine_died", "why")]}
    desk.open(B, "z")
    assert desk.fail_all("draining", "why") == {B: [Failed("z", "draining", "why", 1.0)]}
    assert desk.num_live == 0
    assert not desk.is_live(y)


def test_random_histories() -> None:
    """Whatever happens in whatever order: one end for each request, and the parts make what was sampled."""
    tokenizer = byte_tokenizer()
    for round_ in range(60):
        rng = random.Random(round_)
        desk = FrontDesk(PIECES)
        lives: dict[int, Live] = {}
        sampled: dict[int, list[int]] = {}
        news: dict[tuple[Client, str], list[Item]] = {}
        over: set[int] = set()
        for step in range(80):
            match rng.randrange(6):
                case 0:
                    client, name = rng.choice([A, B]), rng.choice("pqrstuvw")
                    if any((one.client, one.request_id) == (client, name) for one in lives.values()):
                        over |= {live.number for live in desk.drop_client(client)}
                        continue
                    live = submitted(desk, client, name, SamplingParams(stop=rng.choice([(), "ab", ("a", "bc")])))
                    lives[live.number], sampled[live.number] = live, []
                case 1 if lives:
                    live = rng.choice(list(lives.values()))
                    gone, ends = desk.cancel(live.client, live.request_id, step)
                    assert (not gone) == (not ends) == (live.number in over)
                    news.setdefault((live.client, live.request_id), []).extend(ends)
                    over.update(one.number for one in gone)
                case _ if lives:
                    batch = []
                    for _ in range(rng.randrange(1, 4)):
                        rows = {number: rng.choice(ids_of("abcé")) for number in lives if rng.random() < 0.8}
                        dying = [number for number in rows if number not in over and rng.random() < 0.05]
                        batch.append(
                            Tokens(
                                array("q", rows).tobytes(),
                                array("i", rows.values()).tobytes(),
                                tuple(Ended(number, "length", None, USAGE) for number in dying),
                            )
                        )
                        for number, token_id in rows.items():
                            sampled[number].append(token_id)
                    items, aborts = desk.accept(batch, step)
                    for client, some in items.items():
                        for item in some:
                            news.setdefault((client, item.request_id), []).append(item)
                    for number in lives:
                        if not desk.is_live(lives[number]):
                            over.add(number)
                    assert {one.number for one in aborts} <= over
        for client, name in {(live.client, live.request_id) for live in lives.values()}:
            parts = news.get((client, name), [])
            ends = [part for part in parts if not isinstance(part, Delta)]
            assert len(ends) <= 1
            if ends:
                assert parts[-1] is ends[0]
            said = b"".join(part.token_ids for part in parts if not isinstance(part, Failed))
            (number,) = [n for n, live in lives.items() if (live.client, live.request_id) == (client, name)]
            assert array("i", sampled[number]).tobytes().startswith(said)
            if ends and isinstance(ends[0], Finished) and ends[0].reason != "stop":
                text = "".join(part.text for part in parts if not isinstance(part, Failed))
                assert text == tokenizer.decode(list(memoryview(said).cast("i")))


@pytest.mark.parametrize("seed", range(10))
def test_an_answer_that_goes_on_elsewhere_is_the_same_answer(desk: FrontDesk, seed: int) -> None:
    """Its tokenizer dies anywhere, inside a character or a stop string: the parts make what one would have said."""
    rng = random.Random(seed)
    params = SamplingParams(stop=("stop", "é!"), include_stop_str_in_output=rng.random() < 0.5, min_tokens=3)
    token_ids = ids_of("".join(rng.choice(["é", "🦙", "st", "sto", "x", "é ", "!s"]) for _ in range(12)) + "stop")
    whole = submitted(desk, A, "whole", params)
    items, _ = desk.accept([tokens({whole.number: token_id}) for token_id in token_ids], 0.0)
    (finished,) = items[A]
    assert isinstance(finished, Finished)
    for cut in range(len(finished.token_ids) // 4):
        desk = FrontDesk(PIECES)
        first = submitted(desk, A, "x", params)
        text, received = "", b""
        for token_id in token_ids[:cut]:
            for delta in desk.accept([tokens({first.number: token_id})], 0.0)[0].get(A, []):
                assert isinstance(delta, Delta)
                text, received = text + delta.text, received + delta.token_ids
        desk = FrontDesk(PIECES, first_number=1000)
        second = submitted(desk, B, "x", params, received)
        assert second.number == 1000
        for now, token_id in enumerate(token_ids[cut:], 50):
            for item in desk.accept([tokens({second.number: token_id})], float(now))[0].get(B, []):
                assert not isinstance(item, Failed)
                text, received = text + item.text, received + item.token_ids
                if isinstance(item, Finished):
                    assert item.usage.num_generated_tokens == len(finished.token_ids) // 4
                    assert item.usage.decode_s == now - 50
        assert (text, received) == (finished.text, finished.token_ids)
        assert desk.num_live == 0


def test_new_numbers_for_a_new_scheduler(desk: FrontDesk) -> None:
    x, y = submitted(desk, A, "x"), submitted(desk, B, "y")
    waiting = desk.open(A, "not yet submitted")
    assert waiting is not None
    old = x.number
    (h,), (i,) = ids_of("h"), ids_of("i")
    desk.accept([tokens({x.number: h, y.number: i})], 0.0)
    next_number = desk.next_number
    assert desk.renumber() == [x.asked, y.asked]
    assert sorted([x.number, y.number, waiting.number]) == [next_number, next_number + 1, next_number + 2]
    assert x.generated.tolist() == [h]
    assert desk.accept([tokens({old: i})], 0.0) == ({}, [])  # a late word of the old one
    items, _ = desk.accept([tokens({x.number: i})], 0.0)
    assert items == {A: [Delta("x", "i", array("i", [i]).tobytes())]}
