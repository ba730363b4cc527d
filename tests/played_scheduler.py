"""What a test hears and says that plays the scheduler of a tokenizer process, without holding up its event loop."""

import asyncio

from tercet.ipc.step_messages import Abort, Ended, Submit
from tokenizer_process import USAGE, TokenizerProcess


async def submitted(engine: TokenizerProcess) -> Submit:
    """The next request."""
    return await asyncio.to_thread(engine.next_submit)


async def aborted(engine: TokenizerProcess) -> int:
    """The one request that is aborted next."""
    message = await asyncio.to_thread(engine.next_message)
    assert isinstance(message, Abort)
    (number,) = memoryview(message.numbers).cast("q")
    return number


def ended(submit: Submit) -> Ended:
    """All its tokens are there."""
    return Ended(submit.number, "length", None, USAGE)


async def play(engine: TokenizerProcess, text: str) -> None:
    """Answer the next request."""
    submit = await submitted(engine)
    engine.sample(submit.number, text, ended(submit))
