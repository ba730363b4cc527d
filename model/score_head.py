"""What classifies: logits of labels from a prompt's hidden state, on the host in fp64.

Shape suffixes: L rows of the head, D hidden size.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tercet.model.config import ModelConfig


def rows_of_head(config: ModelConfig, lm_head: str) -> list[tuple[str, int, int]]:
    """Of what classifies, if anything does: each row's tensor, how many rows that has, and which it is."""
    labels = () if config.classifier is None else config.classifier.labels
    if config.label_tokens:
        return [(lm_head, config.vocab_size, token) for token in config.label_tokens]
    return [("score.weight", len(labels), row) for row in range(len(labels))]


@dataclass(frozen=True)
class ScoreHead:
    """Of a model's own, or rows of its lm_head: then one label, whose logit is a token's, or what the second of two
    tokens has more than the first."""

    rows_LD: Tensor
    scale: float
    """By which hidden states are too small: the final norm divides by what logits of tokens are divided by."""
    softcap: float
    of_tokens: bool

    @classmethod
    def of(cls, config: ModelConfig, rows_LD: Tensor | None) -> "ScoreHead | None":
        """Of a model that has these rows."""
        if rows_LD is None:
            return None
        if config.label_tokens:
            return cls(rows_LD, 1.0, config.logit_softcap, of_tokens=True)
        return cls(rows_LD, config.logits_scaling, 0.0, of_tokens=False)

    def logits(self, hidden_D: NDArray[np.float64]) -> NDArray[np.float64]:
        """One for each label. `hidden_D`: behind the final norm."""
        logits_L: NDArray[np.float64] = self.rows_LD.numpy() @ (hidden_D * self.scale)
        if self.softcap:
            logits_L = np.tanh(logits_L / self.softcap) * self.softcap
        return np.diff(logits_L) if self.of_tokens and len(logits_L) > 1 else logits_L
