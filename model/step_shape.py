"""How large a step is, padding included: exact on a CPU, in a few fixed sizes on a GPU, where graphs need them.

Knows sizes only; which there are on a GPU, `padded_shapes.py` and `trial_shapes.py` say.
"""

from enum import Enum
from typing import NamedTuple

from tercet.triton_kernels.tuning import row_bucket

TOKENS_MULTIPLE = 128
_MOST_FULL = 256
"""Up to here a product's tiles are as high as its bucket of rows allows; beyond, 128 rows or twice that."""


class Part(Enum):
    """What of a step is launched at once. One that awaits masks is cut in two, so that they have more time."""

    ALL = "all"
    MODEL = "model"
    """From its rows to their hidden states."""
    DRAW = "draw"
    """From there to tokens."""


class StepShape(NamedTuple):
    """Sizes of a step's parts."""

    num_decodes: int
    num_chunks: int
    num_prefill_tokens: int
    whole_logits: bool = False
    """Whether logits are in memory, of all ranks, which some rows need; else the product that makes them draws."""
    adjusted: bool = False
    """Whether some row's logits are changed before sampling."""
    logged: bool = False
    """Whether some row's token is to come with log-probabilities."""
    of_prompts: bool = False
    """Whether log-probabilities of a prompt's tokens are wanted, in blocks as it has them: no graph."""
    longest: int = 0
    """No decode row has more tokens, of a few short ones; 0: they may have any number."""
    part: Part = Part.ALL
    deep: int = 0
    """Of few prefill tokens some come behind so many: attention is divided by what they see, too. 0: it is not."""
    num_trials: int = 0
    """Slots, of a step in which each has its last token and guesses behind it, all of which are decode rows."""
    num_guesses: int = 0
    """Of each of those slots."""
    adapted: bool = False
    """Whether some row goes through an adapter."""
    with_images: bool = False
    """Whether some of its chunks begin ahead of where their prompt's last image ends."""

    @property
    def model(self) -> "StepShape":
        """Its first part: what is sampled, and how, is the other's matter."""
        return self._replace(whole_logits=False, adjusted=False, logged=False, part=Part.MODEL)

    @property
    def draw(self) -> "StepShape":
        return self._replace(longest=0, deep=0, adapted=False, part=Part.DRAW)


def full_rows(num_rows: int) -> int:
    """The smallest number of rows, no less than these, that fills the tiles of products.

    A tile that is partly outside its matrix takes the copy engine up to half as long again as a whole one.
    """
    return round_up(num_rows, TOKENS_MULTIPLE) if num_rows > _MOST_FULL else row_bucket(num_rows)


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
