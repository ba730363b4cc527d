"""ModelConfig: what the decoder must know of a checkpoint.

It knows nothing of where it was read (`config_json.py`, `gguf_file.py`), of tensors, ranks or files of weights.
"""

from dataclasses import dataclass, field
from math import prod

import torch

from tercet.ipc.answers import Classifier
from tercet.model.blocks import Carried, Delta, Experts, Guesser, Heads, Latent, LayerInputs, Mamba, Norms
from tercet.model.rope import Rope

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MOST_LAYERS = 1000
MOST_EXPERTS = 4096
"""Of a layer."""
MOST_TOKENS = 2**24
"""Of a sequence, and in a vocabulary. Like the next far more than there are: a damaged file's number ends in words, and
not in all memory."""
_LARGEST = 2**20
"""Of other sizes."""


CacheShape = tuple[int, int, int, int, int]
"""[k/v, page, kv head, token, dim]"""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder. `layer_windows`: per layer, how many tokens back attention sees (itself included); 0: all.
    `layer_ropes`: per layer, how positions turn its heads; None: not at all. `layer_heads`: per layer, its keys and
    values, where those are not as many and as large as `num_kv_heads` and `head_dim` say."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    """Of what blocks add to the stream of hidden states."""
    logits_scaling: float = 1.0
    """What logits are divided by."""
    attention_scale: float = 0.0
    """Of products of queries and keys; 0: head_dim to the power of -1/2."""
    attention_softcap: float = 0.0
    """What scores are softly kept within; 0: nothing."""
    logit_softcap: float = 0.0
    """The same of logits."""
    activation: str = "silu"
    """Of the gate: "silu", or "gelu" by tanh. Of an MLP without one: "relu2", or "xielu", a curve of a layer's own."""
    norm_shift: float = 0.0
    """What is added to the checkpoint's weights of norms."""
    float32_norms: bool = False
    """Weights of norms keep 32 bits, whatever the other weights have: they are one and a bit."""
    norms: Norms = field(default_factory=Norms)
    layer_scales: bool = False
    """The stream is multiplied by a number of each layer's own when that has added all to it."""
    rope: Rope
    """Of all layers that turn by positions and are not told otherwise."""
    turns_in_pairs: bool = False
    """In files numbers of a head that turn together are neighbours, and here in two halves. Latents have their own."""
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    generates: bool = True
    """The checkpoint says how hidden states become logits. Else what is sampled by the embedding means nothing."""
    classifier: Classifier | None = None
    """What the head tells apart that it has instead of such a matrix, if it has one; or its `label_tokens`."""
    label_tokens: tuple[int, ...] = ()
    """One token or two, which stand for a head: `label_tokens.py`."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are normed, each head by itself."""
    qk_norm_behind: bool = False
    """They are so when they have turned."""
    value_norm: bool = False
    """Values are normed, too, without a weight."""
    wide_qk_norm: bool = False
    """Queries and keys are normed, all heads of a token together."""
    sinks: bool = False
    """Of each query's attention a part goes nowhere: as much as a number of its head's own, among the scores, takes."""
    latent: Latent | None = None
    """In place of keys and values of several heads. `head_dim` is that of a query then, and `num_kv_heads` is 1."""
    carried: Carried | None = None
    """What some layers have in place of keys and values: a Delta or a Mamba."""
    gated_attention: bool = False
    """What attention makes of a token is gated by sigmoids of the token's own, number by number."""
    experts: Experts | None = None
    bare_layers: frozenset[int] = frozenset()
    """Which have nothing in the place of an MLP."""
    wide_mlps: bool = False
    """Those of layers whose keys and values are borrowed are twice as wide as `intermediate_size`."""
    layer_inputs: LayerInputs | None = None
    """What layers are told of each token, which they add at their end."""
    guessing_layers: int = 0
    """Which the checkpoint has behind the last: they guess further tokens."""
    guesser: Guesser | None = None
    """The first of them, if it is one that can be served."""
    guesses: bool = False
    """Whether it is, or one of another checkpoint in its place: then the cache has a layer more."""
    joins: bool = False
    """Of a layer that is such: its first product reads, beside what stands for a token, the next one's embedding."""
    stacked: frozenset[str] = frozenset()
    """Which of "qkv" and "gate_up" the checkpoint has in one tensor, rows of one behind those of another."""
    layer_windows: tuple[int, ...] = field(default=())
    layer_ropes: tuple[Rope | None, ...] = field(default=())
    layer_heads: tuple[Heads, ...] = field(default=())
    fits_float16: bool = True
    """Whether hidden states stay within what 16 bits with a long fraction can hold."""
    dtype: torch.dtype | None = None
    """The checkpoint's own type; None: its configuration names none, and nobody has looked at its weights."""

    def __post_init__(self) -> None:
        self._check_sizes()
        if not self.layer_windows:
            object.__setattr__(self, "layer_windows", (0,) * self.num_layers)
        if not self.attention_scale:
            object.__setattr__(self, "attention_scale", self.head_dim**-0.5)
        if not self.layer_ropes:
            object.__setattr__(self, "layer_ropes", (self.rope,) * self.num_layers)
        if not self.layer_heads:
            object.__setattr__(self, "layer_heads", (Heads(self.num_kv_heads, self.head_dim),) * self.num_layers)
        for count in (self.num_kv_heads, *(heads.count for heads in self.layer_heads)):
            if self.num_heads % count:
                raise ValueError(
                    f"num_attention_heads is {self.num_heads}; want a multiple of num_key_value_heads ({count})"
                )
        for rope, dim in {(self.rope, self.turning_dim()), *self.turns}:
            if dim % 2:
                name = "head_dim" if self.latent is None else "qk_rope_head_dim"
                raise ValueError(f"{name} is {dim}; want an even number")
            if rope is not None:
                _check_rope(rope, dim)

    def experts_of(self, layer: int) -> Experts | None:
        """What a layer has in place of one MLP, if it has."""
        return self.experts if self.experts is not None and layer in self.experts.layers else None

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has one MLP, alone or beside experts."""
        many = self.experts_of(layer)
        return layer not in self.bare_layers and (many is None or many.beside)

    def carried_of(self, layer: int) -> Carried | None:
        """What a layer has in place of keys and values, if it has."""
        return self.carried if self.carried is not None and layer in self.carried.layers else None

    def mlp_size(self, heads: Heads) -> int:
        """Of a layer with such keys and values."""
        return self.intermediate_size * (2 if self.wide_mlps and heads.borrowed else 1)

    @property
    def num_caching_layers(self) -> int:
        """Layers that attend to keys and values, or latents, in the cache; the one that guesses has its own behind."""
        return self.num_layers - (0 if self.carried is None else len(self.carried.layers))

    @property
    def guesser_read(self) -> Guesser | None:
        """The checkpoint's own layer that guesses, where it is served."""
        return self.guesser if self.guesses else None

    @property
    def heads(self) -> Heads:
        """Of layers that are not told otherwise."""
        return Heads(self.num_kv_heads, self.head_dim)

    @property
    def turns(self) -> tuple[tuple[Rope | None, int], ...]:
        """Of each layer, how positions turn its heads, and of how many numbers."""
        return tuple(
            (rope, self.turning_dim(heads)) for rope, heads in zip(self.layer_ropes, self.layer_heads, strict=True)
        )

    def turning_dim(self, heads: Heads | None = None) -> int:
        """Numbers of such a head of which rope says how many turn."""
        return (heads or self.heads).dim if self.latent is None else self.latent.turned

    def attended_dim(self, heads: Heads) -> int:
        """Numbers of all heads' values together."""
        return self.num_heads * (heads.dim if self.latent is None else self.latent.value)

    def cache_shapes(self, num_pages: int, page_size: int, tp_size: int) -> list[CacheShape]:
        """Of each layer that puts something into the cache, in their order, on each rank; latents are their own
        values."""
        if self.latent is not None:
            of_each = 1, num_pages, 1, page_size, self.latent.dim
            return [of_each] * (self.num_caching_layers + self.guesses)
        caching = [heads for heads, _ in self._caching_heads if not heads.borrowed]
        return [(2, num_pages, heads.of_rank(tp_size), page_size, heads.dim) for heads in caching]

    @property
    def cache_places(self) -> list[int]:
        """Of each layer that attends, and the one that guesses, which of `cache_shapes` is what it attends to."""
        places: list[int] = []
        own: dict[int, int] = {}
        for heads, window in self._caching_heads:
            if not heads.borrowed:
                own[window] = len(set(places))
            places.append(own[window])
        return places

    @property
    def _caching_heads(self) -> list[tuple[Heads, int]]:
        """Of the layers that attend, and the one that guesses: their heads and their windows."""
        layers = [layer for layer in range(self.num_layers) if self.carried_of(layer) is None]
        own = [(self.layer_heads[layer], self.layer_windows[layer]) for layer in layers]
        return own + [(self.heads, 0)] * self.guesses

    @property
    def gates_in_product(self) -> bool:
        """Whether the product of gate and up can end with the gate, if their rows are in turns."""
        return self.activation == "silu" and not self.mlp_bias

    @property
    def stream_eps(self) -> float:
        """Of the norms of a stream that is kept divided by `residual_multiplier`.

        So blocks add to it what they compute, and no weight is rounded again: a norm gives the same for x and, with an
        epsilon so many times squared as large, for a multiple of x. Only the embedding has to be divided, too.
        """
        return self.rms_norm_eps / self.residual_multiplier**2

    def _check_sizes(self) -> None:
        sizes = ("hidden_size", "intermediate_size", "num_heads", "head_dim")
        most = {"vocab_size": MOST_TOKENS, **dict.fromkeys(sizes, _LARGEST)}
        values = {name: (getattr(self, name), largest) for name, largest in most.items()}
        if self.experts is not None:
            values["number of experts"] = self.experts.all, MOST_EXPERTS
            values["size of experts"] = self.experts.intermediate_size, _LARGEST
        if self.latent is not None:
            for name in ("rank", "q_rank", "value"):
                values[f"latent's {name}"] = getattr(self.latent, name), _LARGEST
        if self.carried is not None:
            values["number of convolved channels"] = self.carried.channels, _LARGEST
        for name, (value, largest) in values.items():
            if value > largest:
                raise ValueError(f"the model's {name} is {value}; want {largest} at most")

    def resolve_max_model_len(self, wanted: int | None) -> int:
        """The context length to serve: what the checkpoint allows, or `wanted` where that is not more."""
        allowed = min(self.rope.max_length(self.max_position_embeddings), MOST_TOKENS)
        if wanted is None:
            return allowed
        if wanted > allowed:
            reason = ""
            if self.rope.kind == "dynamic":
                reason = ": beyond it, dynamic rope scaling would change the keys already cached"
            raise ValueError(f"--max-model-len is {wanted}; this checkpoint allows {allowed}{reason}")
        return wanted

    def check_tensor_parallel(self, size: int) -> None:
        """Refuse a number of ranks that the model cannot be cut into."""
        wholes = [("num_attention_heads", self.num_heads)]
        if any(map(self.has_mlp, range(self.num_layers))):
            wholes.append(("intermediate_size", self.intermediate_size))
        if self.experts is not None:
            wholes.append(("the experts' intermediate size", self.experts.intermediate_size))
        if isinstance(self.carried, Delta):
            wholes.append(("linear_num_key_heads", self.carried.key_heads))
        if isinstance(self.carried, Mamba):
            wholes.append(("the number of Mamba's heads", self.carried.value_heads))
        for name, value in wholes:
            if value % size:
                raise ValueError(f"--tensor-parallel-size is {size}; want a divisor of {name} ({value})")
        for count in dict.fromkeys(heads.count for heads in self.layer_heads):
            if count % size and size % count:
                raise ValueError(
                    f"--tensor-parallel-size is {size}; want a divisor or a multiple of num_key_value_heads ({count})"
                )
        if isinstance(self.carried, Mamba) and self.carried.key_heads % size and size % self.carried.key_heads:
            raise ValueError(
                f"--tensor-parallel-size is {size}; want a divisor or a multiple of the number of Mamba's groups "
                f"({self.carried.key_heads})"
            )

    def vocab_per_rank(self, size: int) -> int:
        """Rows of the vocabulary on each rank, the last rank's padding included."""
        return -(-self.vocab_size // size)

    def kv_bytes_per_page(self, page_size: int, dtype: torch.dtype, tp_size: int, parts: int | None = None) -> int:
        """Bytes of one page of the KV cache on each rank: of all layers, or of as many as have memory of their own."""
        return sum(map(prod, self.cache_shapes(1, page_size, tp_size)[:parts])) * dtype.itemsize


def _check_rope(rope: Rope, dim: int) -> None:
    turned = rope.rotary_dim(dim)
    if not turned or turned % 2:
        raise ValueError(f"partial_rotary_factor turns {turned} of {dim} numbers; want an even number")
    lists = (rope.factors, rope.long_factors) if rope.kind == "longrope" else ()
    for name, factors in zip(("short_factor", "long_factor"), lists, strict=False):
        if len(factors) != turned // 2:
            raise ValueError(f"rope parameter {name} has {len(factors)} numbers; want {turned // 2}")
