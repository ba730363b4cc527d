"""The live requests of one client: whose news comes first."""

import pytest

from tercet.ipc.answers import Delta, Finished, Item, Logprobs, PromptIds, TokenLogprob, Usage
from tercet.ipc.call import Call
from tercet.ipc.calls import Calls
from tercet.ipc.errors import EngineDied
from tercet.ipc.head_start import HeadStart
from tercet.ipc.messages import FromClient, Generate, SamplingParams

ID = (5).to_bytes(4, "little")
USAGE = Usage(1, 1, 0, 0, 0.0, 0.0, 0.0)


def test_who_waits_for_the_first_token_is_served_first() -> None:
    calls = Calls(lambda message: None, 0)
    for name in "abcd":
        calls.open(Call(Generate(name, "x", SamplingParams(logprobs=0)), streamed=True))
    for name in "ac":
        calls.take(Delta(name, "1", ID))
    row = Logprobs("b", ((TokenLogprob(5, -1.0, 1, b"x"),),))
    step = (
        Delta("a", "2", ID),
        row,
        Delta("b", "1", ID),
        Delta("c", "2", ID),
        Finished("d", "1", ID, "stop", 5, USAGE),
    )
    taken: list[object] = []

    def take(item: Item) -> None:
        taken.append(item)
        calls.take(item)

    in_turn = HeadStart(take, calls.split, 0)
    in_turn.deliver(step)
    assert taken == [step[1], step[2], step[4], step[0], step[3]]
    step = (Delta("a", "3", ID), Delta("b", "2", ID), Delta("gone", "1", ID))
    in_turn.deliver(step)
    assert taken[5:] == list(step), "all have begun"


async def test_only_what_was_asked_can_have_ended_a_connection() -> None:
    asked: list[FromClient] = []
    calls = Calls(asked.append, 0)
    call = Call(Generate("a", "x", SamplingParams()), streamed=False)
    calls.open(call)
    for _ in range(10):
        calls.ask_again(False)
    assert len(asked) == 10
    for _ in range(4):
        calls.ask_again(True)
    assert len(asked) == 13
    with pytest.raises(EngineDied, match="4 times without any news"):
        await call.whole()


async def test_a_prompts_ids_are_told_once() -> None:
    """After a loss they come again; of several answers whichever begins brings them, and the first keeps them."""
    calls = Calls(lambda message: None, 0)
    call = Call(Generate("a", "x", SamplingParams(n=2)), streamed=True)
    calls.open(call)
    pieces = call.pieces()
    calls.take(PromptIds("a", ID * 3))
    calls.take(Delta("a", "1", ID, index=1))
    assert (await anext(pieces)).prompt_token_ids == [5, 5, 5]
    calls.take(PromptIds("a", ID * 3))
    calls.take(Delta("a", "2", ID, index=1))
    assert (await anext(pieces)).prompt_token_ids is None
    for index in (1, 0):
        calls.take(Finished("a", "", ID, "length", None, USAGE, index))
    ends = [piece.generation async for piece in pieces]
    assert [end and end.prompt_token_ids for end in ends] == [None, [5, 5, 5]]
