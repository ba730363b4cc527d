"""The places of one rank's weights of a layer that guesses for another model, and what fills them.

As `shard.py` has those of a model; reads nothing.

Shape suffixes as in `rank_weights.py`.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from tercet.model.eagle_config import EagleConfig
from tercet.model.places import Move
from tercet.model.rank_weights import EagleWeights
from tercet.model.shard import LM_HEAD, ShardBuilder

_LAYERS = "midlayer.", "layers.0."
"""What tensors of the layer are called, by those who trained the first ones and by others."""
OFFSETS = "d2t"
"""Of each token that the head knows, by how much its id is larger in the model."""
UNREAD = frozenset(("t2d", "embed_tokens.weight"))
"""What follows from those, and a copy of the model's."""


class EagleShard:
    """Allocates one rank's tensors and writes down in `moves` how each is filled."""

    def __init__(
        self, config: EagleConfig, names: Collection[str], rank: int, size: int, dtype: torch.dtype,
        device: torch.device, *, interleaved: bool,
    ) -> None:  # fmt: skip
        """`names`: of the checkpoint's tensors."""
        config.layer.check_tensor_parallel(size)
        builder = ShardBuilder(config.layer, rank, size, dtype, device, {})
        places, hidden = builder.places, config.layer.hidden_size
        prefix = next((one for one in _LAYERS if f"{one}self_attn.q_proj.weight" in names), _LAYERS[0])
        hears = {layer: places.empty(hidden, hidden) for layer in config.hears}
        for index, into in enumerate(hears.values()):
            places.some_columns("fc.weight", len(hears) * hidden, index * hidden, into)
        self.offsets_U: Tensor | None = None
        if OFFSETS in names:
            self.offsets_U = torch.zeros(config.layer.vocab_size, dtype=torch.int64, device="cpu")
            places.rows(OFFSETS, config.layer.vocab_size, 0, self.offsets_U)
        self._vocab_size = config.vocab_size
        self._weights = EagleWeights(
            config=config.layer,
            hears=hears,
            token_norm_D=places.norm(f"{prefix}input_layernorm", hidden),
            hidden_norm_D=places.norm(f"{prefix}hidden_norm", hidden),
            begins_normed=config.begins_normed,
            layer=builder.layer(prefix, interleaved, config.layer.heads, None, None),
            norm_D=places.norm("norm", hidden),
            lm_head_UD=builder.vocabulary(LM_HEAD),
            places_V=None if self.offsets_U is None else torch.empty(
                config.vocab_size, dtype=torch.int32, device=device
            ),
        )  # fmt: skip
        self.moves: Sequence[Move] = builder.moves

    def filled(self) -> EagleWeights:
        """Once all moves are carried out. ValueError where the head's tokens are not the model's."""
        places_V, offsets_U = self._weights.places_V, self.offsets_U
        if places_V is None or offsets_U is None:
            return self._weights
        count = len(offsets_U)
        tokens_U = torch.arange(count) + offsets_U
        if not count or int(tokens_U.min()) < 0 or int(tokens_U.max()) >= self._vocab_size:
            raise ValueError(f"tensor {OFFSETS} names tokens beyond the model's; want ids up to {self._vocab_size - 1}")
        of_all_V = torch.full((self._vocab_size,), -1, dtype=torch.int32)
        of_all_V[tokens_U] = torch.arange(count, dtype=torch.int32)
        places_V.copy_(of_all_V)
        return self._weights

    def empty(self) -> EagleWeights:
        """As they are allocated."""
        return self._weights
