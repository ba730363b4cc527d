"""Messages of a client that change the engine itself, and the one that answers them.

MessagePack arrays as in `messages.py`. They go to engines that allow them.
"""

from typing import Literal

import msgspec

WhatRuns = Literal["wait", "abort", "keep"]
"""What becomes of requests that run or wait: they end first, or are ended, or go on when the workers are back, behind
what they have said."""


class Sleep(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """End the workers, so that their memory is free. New requests are refused from now on."""

    request_id: str
    mode: WhatRuns = "wait"


class WakeUp(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Start them again."""

    request_id: str
    model: str | None = None
    """On the weights in this folder or .gguf file, or of this hub id; None: on those there were."""


class UpdateWeights(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Go on with other weights of the same model. New requests wait for them."""

    request_id: str
    model: str
    """A folder, a .gguf file or a hub id."""
    mode: WhatRuns = "wait"


class LoadAdapter(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Have a LoRA adapter that requests may name."""

    request_id: str
    name: str
    folder: str
    """In PEFT's layout, or a hub id."""


class UnloadAdapter(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Forget it, once those have ended who have named it; nobody may name it from now on."""

    request_id: str
    name: str


class Changed(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """The change was made."""

    request_id: str


OfEngine = Sleep | WakeUp | UpdateWeights
OfAdapters = LoadAdapter | UnloadAdapter
Change = OfEngine | OfAdapters
