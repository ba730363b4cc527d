"""What a layer has of keys and values, or may have in the place of attention to them and of one MLP: sizes and names.
And what its norms are called.

Knows nothing of where that was read, of tensors or of ranks.
"""

from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True)
class Heads:
    """The keys and values of a layer."""

    count: int
    dim: int
    """Numbers of a head, and of one of queries."""
    keys_are_values: bool = False
    """Values are what the product for keys makes, before it is normed and turned; else they have one of their own."""
    borrowed: bool = False
    """They are those of the last layer ahead with the same window that has its own. This one makes none."""

    def of_rank(self, size: int) -> int:
        """How many one of several ranks has. With fewer than ranks, neighbours have the same one."""
        return max(1, self.count // size)


@dataclass(frozen=True, kw_only=True)
class Norms:
    """Of a layer: what files call each; None: there is none."""

    ahead_of_attention: str | None = "input_layernorm"
    behind_attention: str | None = None
    """Of what it computes, before that is added to the stream."""
    ahead_of_mlp: str | None = "post_attention_layernorm"
    behind_mlp: str | None = None


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """What a checkpoint calls its experts: their block, if they have one, each one's matrices (`gate_up` where gate and
    up rows are in one, in turns; without both it has no gate), what chooses; the MLP that all share, and the bias that
    the others are chosen with, if it has such."""

    block: str
    gate: str = ""
    up: str = ""
    gate_up: str = ""
    down: str
    router: str = "gate"
    shared: str = ""
    bias: str = ""
    bias_is_row: bool = False
    """Of a matrix that has no other."""


@dataclass(frozen=True)
class Clamp:
    """A gate of at most `limit` times its sigmoid, `slope` times as steep; and what it multiplies: one more than up,
    which is kept within the limit both ways."""

    limit: float
    slope: float


@dataclass(frozen=True, kw_only=True)
class Experts:
    """MLPs of which each token goes through a few."""

    count: int
    each: int
    """How many a token goes through."""
    intermediate_size: int
    """Of one of them."""
    normed: bool
    """Whether the weights of a token's experts add up to one."""
    scale: float = 1.0
    """What multiplies them then."""
    groups: int = 1
    """Equal parts of them, side by side: a token's are chosen from the best few parts."""
    best_groups: int = 1
    """How many; a part is as good as its best expert, or as its best two together where a bias is added."""
    shared: int = 0
    """How many more serve every token: so many times an expert's size is what the checkpoint has as one MLP."""
    shared_gated: bool = False
    """Those count by a sigmoid of the token's own; else one."""
    counts_by_share: bool = False
    """With a bias, too, an expert counts by its share in a softmax of all."""
    scored_in_float32: bool = False
    """What 16 bits do not tell apart is told apart for the choice."""
    clamp: Clamp | None = None
    """How gates are kept within limits; all matrices have biases then, that of what chooses too. None: gates are
    SiLU's, and nothing has a bias."""
    beside: bool = False
    """Such a layer has one MLP as well, which reads the same stream. What both make is normed before it is added, and
    what chooses reads the stream by a norm of its own and scales each expert. Gates are GELU's, as the MLP's."""
    layers: frozenset[int]
    """Which layers have them; others have one MLP."""
    names: ExpertNames

    @property
    def gated(self) -> bool:
        """What an expert's first matrix makes is gated by another's; else it goes through ReLU and is squared."""
        return bool(self.names.gate or self.names.gate_up)

    @property
    def biased(self) -> bool:
        """An expert counts by its sigmoid, and is chosen by that and a bias; else by its share in a softmax of all."""
        return bool(self.names.bias)

    @property
    def all(self) -> int:
        """Those to choose from and those that are shared."""
        return self.count + self.shared


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Attention whose cache holds one row of numbers for each token, its latent, from which every head's key and value
    are made; behind it numbers of the key that turn, the same for all heads."""

    rank: int
    """Numbers of a latent."""
    q_rank: int
    """Of what queries are made from; 0: from hidden states."""
    still: int
    """Numbers of a head's query and key that do not turn."""
    turned: int
    """Those that do."""
    value: int
    """Numbers of a head's value."""
    in_pairs: bool
    """Of those that turn, neighbours do together; else each with the one half of them behind it."""
    eps: float = 1e-6
    """Of the norms of latents, and of what queries are made from."""

    @property
    def dim(self) -> int:
        """Numbers that the cache holds of a token."""
        return self.rank + self.turned


@dataclass(frozen=True, kw_only=True)
class Carried:
    """Attention that keeps no keys and values but a state of fixed size: each head a matrix, which maps a key to a
    value. A token lets it fade, adds to it, and reads it by the token's query. Queries, keys and values go through a
    short convolution over a sequence's tokens first."""

    key_heads: int
    value_heads: int
    """Several share a key head's queries and keys; each has a state of its own."""
    key_dim: int
    value_dim: int
    taps: int
    """Tokens that the convolution sees, the token itself included."""
    layers: frozenset[int]
    """Which layers have it; others attend to keys and values."""
    state_dtype: str = "float32"
    """What states are rounded to from token to token, or from one chunk of a prompt to the next."""

    @property
    def channels(self) -> int:
        """Numbers of a token that are convolved: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def of_rank(self, size: int) -> Self:
        """What one of several ranks has: some heads. With fewer key heads than ranks, neighbours have the same one."""
        return replace(self, key_heads=max(1, self.key_heads // size), value_heads=self.value_heads // size)


@dataclass(frozen=True, kw_only=True)
class Delta(Carried):
    """By the gated delta rule: a token corrects what the state says of its key."""

    by_key_heads: bool
    """How the checkpoint has the rows of the first product: of each key head all, or of all heads each kind."""


@dataclass(frozen=True, kw_only=True)
class Mamba(Carried):
    """By Mamba-2's: what a token adds is its value, by its time step, which also says how far the state fades. Queries
    are what Mamba calls C, keys B, and groups are key heads here."""

    norm_size: int
    """Numbers of the answers that are normed together: those of a group's heads."""
    conv_bias: bool
    time_steps: tuple[float, float]
    """The least and the most that a token's may be."""


@dataclass(frozen=True)
class LayerInputs:
    """What each layer is told of a token beside the stream."""

    size: int
    """Numbers for one layer."""
    count: int
    """Layers that the checkpoint has such numbers for."""
    image_id: int = 0
    """Tokens of images have those of the token with this id."""

    @property
    def width(self) -> int:
        """Numbers of a token, for all layers."""
        return self.size * self.count


@dataclass(frozen=True, kw_only=True)
class Guesser:
    """A layer behind the last, which guesses tokens: of a token's hidden state and the embedding of the next one, side
    by side and put through a product, it makes a hidden state that stands for the next one's. Names are those of its
    tensors."""

    layer: str
    """What the names of its attention and MLP begin with."""
    token_norm: str
    """Of embeddings."""
    hidden_norm: str
    join: str
    """The product's matrix; embeddings come first."""
    norm: str
    """Ahead of the logits."""
    has_experts: bool
    goes_on_normed: bool
    """For guesses further ahead it reads its own hidden states as that norm leaves them."""
