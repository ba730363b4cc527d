"""Conversations as chat templates of the harmony format take them: nothing of a turn may be left out, or fail.

Those templates show one call a turn and one thought before it, and of the system only the first turn. Pure.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

Turn = dict[str, Any]
EFFORTS = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""Of the efforts that clients have names for, the nearest that the model has learned."""


def harmony_turns(turns: Sequence[Turn]) -> list[Turn]:
    """With a thought as `thinking`, one turn of the system at the beginning, and each call in a turn of its own."""
    first = next((place for place, turn in enumerate(turns) if turn["role"] != "system"), len(turns))
    system = [turn["content"] for turn in turns[:first] if turn["content"]]
    shown: list[Turn] = [{"role": "system", "content": "\n\n".join(system)}] if system else []
    rest = list(turns[first:])
    while rest:
        turn = _with_thought(rest.pop(0))
        if "tool_calls" not in turn:
            shown.append(turn)
            continue
        num_results = next((place for place, one in enumerate(rest) if one["role"] != "tool"), len(rest))
        shown += _called(turn, rest[:num_results])
        del rest[:num_results]
    return shown


def described(tools: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Tools that all have a description, which the template takes for granted."""
    for tool in tools:
        function = tool.get("function")
        yield {**tool, "function": {"description": "", **function}} if isinstance(function, Mapping) else dict(tool)


def _with_thought(turn: Turn) -> Turn:
    """What is said ahead of a call is a thought to the template, which wants one of them."""
    thought = turn.get("reasoning_content")
    if "tool_calls" in turn:
        thought = "\n\n".join(filter(None, (thought, turn.pop("content")))) or None
    return turn if thought is None else {**turn, "thinking": thought}


def _called(turn: Turn, results: Sequence[Turn]) -> Iterator[Turn]:
    """Each call with what came of it; results of none of them stand behind the last."""
    calls = turn.pop("tool_calls")
    left = list(results)
    for place, call in enumerate(calls):
        own = [one for one in left if place == len(calls) - 1 or one.get("tool_call_id") == call["id"]]
        left = [one for one in left if one not in own]
        yield {**(turn if place == 0 else {"role": turn["role"]}), "tool_calls": [call]}
        yield from own
