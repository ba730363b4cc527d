"""What of an engine's configuration its runners follow. Knows names and numbers only."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GuessSettings:
    """How far rows try what may come next."""

    num_guesses: int
    looked_up: tuple[int, int] | None
    """Of a slot's last tokens at least so many have been in it before, where something is guessed, and no more of them
    are looked at; None: a layer guesses."""
    most_slots: int
    """In one step."""


@dataclass(frozen=True, kw_only=True)
class RunnerSettings:
    """What of an engine's configuration a runner follows; names as there."""

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    run_ahead: int = 2
    max_lease: int = 4
    enforce_eager: bool = False
    guesses: GuessSettings | None = None
    """None: nothing is guessed."""
    only_largest: bool = False
    """For a runner that is made to see what memory steps take: it runs the largest, and can do no more."""
    most_image_tokens: int = 0
    """Of an image, if there are any."""
    timed: bool = False
    """Landings on a GPU know when their step ran; costs two events a step."""
