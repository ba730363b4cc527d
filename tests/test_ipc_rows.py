"""Log-probabilities of answers in the making: what is kept of them, and how much memory that takes."""

import asyncio
import tracemalloc

import pytest

from tercet.ipc.answers import Delta, Finished, Logprobs, TokenLogprob, Usage
from tercet.ipc.call import Call, Piece
from tercet.ipc.errors import RequestRefused
from tercet.ipc.messages import Generate, SamplingParams
from tercet.ipc.rows import PackedRows, Row

ID = (5).to_bytes(4, "little")
USAGE = Usage(1, 1, 0, 0, 0.0, 0.0, 0.0)


def row(number: int, num_top: int = 20) -> Row:
    return tuple(TokenLogprob(number + rank, -0.1 * number, rank, b" caf\xc3") for rank in range(num_top + 1))


def test_rows_are_a_list_to_look_at() -> None:
    rows = [row(number, 2) for number in range(5)]
    packed = PackedRows(rows[:3])
    packed.extend(rows[3:])
    assert packed == rows
    assert packed != rows[:4]
    assert packed == PackedRows(rows)
    assert (packed[0], packed[-1], packed[1:3], len(packed)) == (rows[0], rows[4], rows[1:3], 5)
    assert list(packed) == rows
    assert repr(packed) == repr(rows)
    with pytest.raises(IndexError):
        packed[5]


def say(call: Call, num_tokens: int) -> None:
    for number in range(num_tokens):
        call.log(Logprobs("a", (row(number),)))
        call.add(Delta("a", "x", ID))
    call.log(Logprobs("a", (row(num_tokens),)))
    call.end(Finished("a", "y", ID, "length", None, USAGE))


async def read(call: Call) -> list[Piece]:
    return [piece async for piece in call.pieces()]


@pytest.mark.parametrize("keeps", [True, False])
async def test_a_stream_keeps_what_its_reader_is_promised(keeps: bool) -> None:
    call = Call(Generate("a", "x", SamplingParams(logprobs=20)), streamed=True, keeps_logprobs=keeps)
    reading = asyncio.ensure_future(read(call))
    rows = [row(number) for number in range(101)]
    for number in range(100):
        call.log(Logprobs("a", (rows[number],)))
        call.add(Delta("a", "x", ID))
        if number % 3:
            await asyncio.sleep(0)
    call.log(Logprobs("a", (rows[100],)))
    call.end(Finished("a", "y", ID, "length", None, USAGE))
    *pieces, last = await reading
    assert [one for piece in (*pieces, last) for one in piece.logprobs or ()] == rows
    assert len(pieces) > 10
    assert all(len(piece.logprobs or ()) == len(piece.token_ids) for piece in (*pieces, last))
    assert last.generation is not None
    assert last.generation.logprobs == (rows if keeps else None)


async def test_who_has_fallen_behind_holds_nobody_up() -> None:
    """What has piled up comes in pieces, in order, whole, and with turns for others between them."""
    call = Call(Generate("a", "x", SamplingParams(logprobs=0, n=2)), streamed=True, keeps_logprobs=False)
    rows = [row(number, 0) for number in range(1001)]
    for number in range(1000):
        call.log(Logprobs("a", (rows[number],), number % 2))
        call.add(Delta("a", f"{number} ", ID, None, number % 2))
    num_turns = 0
    reading = asyncio.ensure_future(read(call))
    for index in (0, 1):
        call.log(Logprobs("a", (rows[1000],), index))
        call.end(Finished("a", "end", ID, "length", None, USAGE, index))
    while not reading.done():
        num_turns += 1
        await asyncio.sleep(0)
    pieces = await reading
    assert num_turns > 10
    for index in (0, 1):
        mine = [piece for piece in pieces if piece.index == index]
        assert "".join(piece.text for piece in mine) == "".join(f"{n} " for n in range(index, 1000, 2)) + "end"
        assert [one for piece in mine for one in piece.logprobs or ()] == [*rows[index:1000:2], rows[1000]]
        assert max(len(piece.token_ids) for piece in mine) <= 64
        assert [piece.generation is not None for piece in mine] == [False] * (len(mine) - 1) + [True]


async def test_what_came_before_a_failure_comes_first() -> None:
    call = Call(Generate("a", "x", SamplingParams()), streamed=True)
    for _ in range(200):
        call.add(Delta("a", "x", ID))
    call.fail(RequestRefused("slow_client", "the end"))
    texts = []
    with pytest.raises(RequestRefused):
        async for piece in call.pieces():
            texts.append(piece.text)
    assert "".join(texts) == "x" * 200


@pytest.mark.parametrize(("streamed", "most"), [(False, 800), (True, 1100)])
def test_what_an_answer_in_the_making_holds(streamed: bool, most: int) -> None:
    """Bytes of a token with 20 others; of a stream, whose reader takes nothing."""
    num_tokens = 2000
    call = Call(Generate("a", "x", SamplingParams(logprobs=20)), streamed, keeps_logprobs=not streamed)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        say(call, num_tokens)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / num_tokens < most
