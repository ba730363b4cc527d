"""What a client has yet to hear that reads too slowly to be sent more. Pure."""

from collections.abc import Iterable

from tercet.engine.live import Live
from tercet.ipc.answers import Batch, Classified, Detokenized, Embedded, Failed, Finished, ToClient, Tokenized


def last_words(unsent: ToClient, lost: Iterable[Live]) -> list[Failed]:
    """One for each request that ended in the message that could not be sent, or was dropped since; a question's answer
    is its end."""
    items = unsent.items if isinstance(unsent, Batch) else (unsent,) if isinstance(unsent, Failed) else ()
    owed = {item.request_id: item for item in items if isinstance(item, Failed)}
    names = [item.request_id for item in items if isinstance(item, Finished | Embedded | Classified)]
    if isinstance(unsent, Tokenized | Detokenized):
        names.append(unsent.request_id)
    for name in (*names, *(live.request_id for live in lost)):
        owed[name] = Failed(name, "slow_client", "the client reads too slowly; its requests were cancelled")
    return list(owed.values())
