"""Several prompts of one call: whose parameters are whose, and all at once. It knows no engine."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tercet.ipc.messages import ClassificationParams, EmbeddingParams, SamplingParams

Result = TypeVar("Result")
Params = TypeVar("Params", SamplingParams, EmbeddingParams, ClassificationParams)

_MOST_LIVE = 16_384
"""Answers in the making at a time: enough to keep any batch full, and fewer than it would refuse."""


def for_each(params: Any, kind: type[Params], count: int) -> list[Params]:
    """One of so many prompts each."""
    params = kind() if params is None else params
    each = list(params) if isinstance(params, (list, tuple)) else [params] * count
    if strange := [one for one in each if not isinstance(one, kind)]:
        raise TypeError(f"params has {strange[0]!r:.80}; want {kind.__name__}, one for all or one for each")
    if len(each) != count:
        raise ValueError(f"got {count} prompts and {len(each)} params; want one params for all or one for each")
    return each


async def each_of(
    work: Callable[[int], Coroutine[Any, Any, Result]], count: int, answers_each: int = 1
) -> list[Result]:
    """All at once, as far as the engine takes so many answers, in order; the first error is raised, with a note of
    whose it is, and cancels the others."""
    if count == 1:
        return [await work(0)]
    places = asyncio.Semaphore(max(1, _MOST_LIVE // answers_each))

    async def one(index: int) -> Result:
        try:
            async with places:
                return await work(index)
        except Exception as error:
            error.add_note(f"This is of prompts[{index}].")
            raise

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(index)) for index in range(count)]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
