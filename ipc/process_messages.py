"""Messages on the pipes between processes and the one that started them, and the union each end decodes."""

import msgspec

from tercet.ipc.answers import Classifier
from tercet.ipc.change_messages import Change

# ----------------------------------------------------------------------- supervisor <-> children (pipes)


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the workers found out about model and memory; the tokenizer and the scheduler begin with it."""

    num_pages: int
    """Pages in each rank's cache, page 0 (padding) included."""
    max_model_len: int
    vocab_size: int
    dtype: str
    device: str
    hidden_size: int
    """Numbers of an embedding."""
    generates: bool = True
    """The checkpoint says how hidden states become logits; else what is sampled means nothing."""
    classifier: Classifier | None = None
    """What its head tells apart, if it has one that classifies."""
    state_tile: int = 0
    """0: all that the model remembers is in pages. Else layers carry a state, and chunks of prompts begin at multiples
    of this."""
    num_host_pages: int = 0
    """Places in the host's memory, of which each has room for a page of every rank."""
    page_bytes: int = 0
    """What a page takes, on all ranks together."""
    num_host_states: int = 0
    """Places there, of which each has room for every rank's part of a state."""
    state_bytes: int = 0
    """What a state takes, on all ranks together."""
    image_tokens: int = 0
    """0: chunks of prompts may end within images. Else tokens of an image see each other: so many, all in one chunk."""
    windows: tuple[int, ...] = (0,)
    """Of each page table, how many tokens back the layers that have it see; 0: all."""


class Begin(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """All workers are loaded: serve."""

    limits: Limits


class Drain(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Take no new requests; exit once the running ones have ended."""


class HandOver(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """To the HTTP door: all has been said. Exit once its clients have taken it, or after so many seconds."""

    seconds: float


class Abandon(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The engine cannot go on: fail every live request with this message and exit."""

    message: str
    code: str = "engine_died"


class WorkersAway(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """To the scheduler: there are none, for as long as somebody wants it so. What runs waits for `WorkersRestarted`."""


class WorkersRestarted(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """To the scheduler: all workers are new and empty, or have other weights. What ran is to run again, under plans of
    this epoch."""

    epoch: int
    limits: Limits
    blame: str | None
    """How the old ones died, if what they computed may be to blame; None: somebody killed them."""
    other_weights: bool = False
    """What ran would not be generated again as it was."""


class SchedulerRestarted(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """To the tokenizer: this replica's scheduler is new and knows no request."""

    replica: int = 0


class NewLimits(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """To the tokenizer: workers are new, and all replicas together have room for this. There may be more memory than
    before, or less."""

    limits: Limits


class Mending(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """To the tokenizer: these replicas lack processes, which are being replaced. While there are others, new requests
    are theirs. Only where there are several."""

    replicas: tuple[int, ...]


class LoadedAdapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One that requests may name."""

    name: str
    place: int
    """Where its matrices are, on each rank."""
    load: int
    """Which load it was of all. No two have the same number, so nothing cached of one is found for another."""


class Standing(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """To the tokenizer and the HTTP door: what of the engine can be changed while it runs, as it is now."""

    weights: str
    """As whoever wanted them named them."""
    is_asleep: bool = False
    """There are no workers, and nobody misses them."""
    falls_asleep: bool = False
    """It will be so once what runs has ended, and takes no new requests."""
    adapters: tuple[LoadedAdapter, ...] = ()


class Outcome(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """To the tokenizer: what has become of an order. Where it was not carried out, why, and all is as it was."""

    number: int
    code: str | None = None
    message: str = ""


class TryWeights(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """To a worker: say whether these could take the place of those it has. It reads no numbers."""

    number: int
    path: str


class ExchangeWeights(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """To a scheduler: have its workers read other weights behind all that is planned, and plan nothing more until
    `WorkersRestarted`. They answer with `Tried`."""

    number: int
    path: str


class PlaceAdapter(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """To a worker: put it into this place, which no request has just now."""

    number: int
    place: int
    path: str


class Impaired(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """To the HTTP door: these are being replaced, and no request is served meanwhile; with none, requests are."""

    roles: tuple[str, ...]


class Phase(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Start-up progress of one child: `done` of `total` units of `what`."""

    what: str
    done: int
    total: int


class Loaded(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Ready for `Begin`; a worker could run a step."""

    limits: Limits | None = None
    phases: dict[str, float] = {}
    """What it did until now, in order, and the seconds of each."""


class Serving(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """This child got `Begin` and does its work."""


class Beat(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The child's own loop is alive. A worker beats from its step loop, so that a hang is seen."""

    count: int


class Order(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """From the tokenizer: somebody wants this changed, and nothing that runs is in the way. Answered with `Outcome`."""

    number: int
    """Unique for the engine's life."""
    change: Change
    only_try: bool = False
    """Say what is wrong with it, before anything is ended for it; or know that it is going to be done."""


class Tried(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """From a worker: what is wrong with what it was asked about, or to do; None: nothing, and it is done."""

    number: int
    complaint: str | None


class LastWords(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Why this child is about to exit."""

    message: str


OfReplicas = WorkersAway | WorkersRestarted | SchedulerRestarted | NewLimits | Mending | Impaired
OfChanges = Standing | Outcome | TryWeights | ExchangeWeights | PlaceAdapter
ToChild = Begin | Drain | HandOver | Abandon | OfReplicas | OfChanges
FromChild = Phase | Loaded | Serving | Beat | Order | Tried | LastWords


# --------------------------------------------------------------------- supervisor -> its owner (a pipe)


class Progress(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A child's `Phase`, and whose it is."""

    process: str
    what: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A request would be served now."""

    listen: tuple[str, ...]
    model: str
    seconds: float
    limits: Limits
    phases: dict[str, float]
    """What the seconds went to, in order: the supervisor's own, worker 0's, and what the others took longer."""


FromSupervisor = Progress | Ready | LastWords
