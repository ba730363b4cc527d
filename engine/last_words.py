"""What a client has yet to hear that reads too slowly to be sent more. Pure."""

from collections.abc import Callable, Iterable

from tercet.engine.live import Client, Live
from tercet.ipc.answers import Batch, Classified, Detokenized, Embedded, Failed, Finished, Item, ToClient, Tokenized
from tercet.ipc.change_messages import Changed


class Owed:
    """The last words to clients that could not be sent any more."""

    def __init__(self, most: int) -> None:
        """To each `most` at most: who had fewer requests at once and is owed more goes on asking, and reads nothing."""
        self._most = most
        self._of: dict[Client, list[Item]] = {}

    def note(self, client: Client, unsent: ToClient, lost: Iterable[Live]) -> None:
        mine = self._of.setdefault(client, [])
        mine += last_words(unsent, lost)
        del mine[self._most :]

    def pay(self, send: Callable[[Client, Batch], bool]) -> None:
        """Whom `send` could send it to is owed no more."""
        for client, items in list(self._of.items()):
            if send(client, Batch(tuple(items))):
                del self._of[client]


def last_words(unsent: ToClient, lost: Iterable[Live]) -> list[Failed]:
    """One for each request that ended in the message that could not be sent, or was dropped since; a question's answer
    is its end."""
    items = unsent.items if isinstance(unsent, Batch) else (unsent,) if isinstance(unsent, Failed) else ()
    owed = {item.request_id: item for item in items if isinstance(item, Failed)}
    names = [item.request_id for item in items if isinstance(item, Finished | Embedded | Classified)]
    if isinstance(unsent, Tokenized | Detokenized | Changed):
        names.append(unsent.request_id)
    for name in (*names, *(live.request_id for live in lost)):
        owed[name] = Failed(name, "slow_client", "the client reads too slowly; its requests were cancelled")
    return list(owed.values())
