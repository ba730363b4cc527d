"""PROCESS tokenizer: text on the clients' side, token ids on the scheduler's.

It owns the connections of clients and the life of each request as its client sees it: exactly one terminal message,
whatever happens. It knows nothing of pages, slots or steps. What it does is in `tokenizer_loop.py`.
"""

from functools import partial
from pathlib import Path

import anyio
import zmq

from tercet.engine.aside import Aside
from tercet.engine.child import SupervisorLink, run
from tercet.engine.doors import Doors, bind_front_door
from tercet.engine.front_desk import FrontDesk
from tercet.engine.image_rules import load_image_rules
from tercet.engine.live import Client
from tercet.engine.reception import Reception
from tercet.engine.rules import make_rules
from tercet.engine.schedulers import make_schedulers
from tercet.engine.text_codec import OwnTemplates, load_codec
from tercet.engine.tokenizer_loop import NUMBER_BITS, Tokenizer
from tercet.engine.trace import Span, open_lanes, record_collections
from tercet.ipc.process_messages import Limits, Loaded
from tercet.ipc.sockets import AsyncInbox
from tercet.ipc.step_messages import ToTokenizer


class TracedTokenizer(Tokenizer):
    """A tokenizer that leaves a record. What is prepared aside of the event loop is not in it."""

    async def serve(self, inbox: AsyncInbox[ToTokenizer], limits: Limits) -> None:
        folder = self._link.spec.config.trace_dir or ""
        self._lane, garbage = open_lanes(folder, "tokenizer", "loop", "garbage")
        record_collections(garbage)
        await super().serve(inbox, limits)

    def _hear(self, client: Client, frames: list[bytes]) -> None:
        begin_ns, number = self._lane.now(), self._desk.next_number
        super()._hear(client, frames)
        self._lane.end(Span.HEAR, begin_ns, number if self._desk.next_number > number else 0)

    def _speak(self, messages: list[ToTokenizer]) -> None:
        begin_ns = self._lane.now()
        super()._speak(messages)
        self._lane.end(Span.SPEAK, begin_ns, len(messages))


def main(link: SupervisorLink) -> None:
    """Load, and serve after `Begin`."""
    spec = link.spec
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 65_536)
    doors = Doors(link, partial(bind_front_door, spec.addresses.listen, context, spec.config.listen_key))
    codec = load_codec(Path(spec.paths.model), OwnTemplates(spec.config.chat_template, spec.config.pair_template))
    image_rules = load_image_rules(Path(spec.paths.model), spec.config)
    link.tell(Loaded())
    limits = link.wait_begin()
    rules = make_rules(codec, limits, spec.config)
    door = doors.open()

    async def serve() -> None:
        door.open()
        inbox: AsyncInbox[ToTokenizer] = AsyncInbox(spec.addresses.tokenizer, ToTokenizer, context)
        config, first_number = spec.config, (spec.incarnation << NUMBER_BITS) + 1
        desk = FrontDesk(codec.pieces, first_number, config.data_parallel_size, config.restart_window)
        schedulers = make_schedulers(spec, context, desk)
        make = Tokenizer if config.trace_dir is None else TracedTokenizer
        reception = Reception(desk, codec, rules, config, image_rules)
        tokenizer = make(door, schedulers, desk, reception, Aside(config), link)
        try:
            await tokenizer.serve(inbox, limits)
        finally:
            inbox.close()
            door.close()

    anyio.run(serve)
    context.term()


if __name__ == "__main__":
    run(main)
