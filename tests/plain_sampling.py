"""What sampling means, in plain Python: the noise, the allowed tokens, and how far counts are from probabilities."""

import math

import numpy as np


def plain_gumbel(seed: int, position: int, token: int) -> float:
    """The noise in Python's own integers."""
    mask = 2**32 - 1

    def mix(x: int) -> int:
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & mask
        x = ((x ^ (x >> 15)) * 0x846CA68B) & mask
        return x ^ (x >> 16)

    of_low = mix((seed + 0x9E3779B9) & mask)
    key_1 = mix((mix(of_low ^ ((seed >> 32) & mask)) + position) & mask)
    key_2 = mix(((key_1 ^ of_low) + position) & mask)
    x = token ^ key_1
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & mask
    x = (x ^ (x >> 15)) + key_2 & mask
    x = (x * 0x846CA68B) & mask
    x = ((x ^ (x >> 13)) * 0x7FEB352D) & mask
    x ^= x >> 16
    uniform = np.float32(x) * np.float32(2.0**-32) + np.float32(2.0**-33)  # its rounding belongs to the definition
    return -math.log(-math.log1p(-min(float(uniform), 1 - 2.0**-24)))


def plain_allowed(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """top-k, then top-p over what is left, then min-p, by definition; ties with the last one stay."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    if 0 < top_k < len(order):
        order = [i for i in order if logits[i] >= logits[order[top_k - 1]]]
    weights = {i: math.exp((logits[i] - logits[order[0]]) / temperature) for i in order}
    if top_p < 1:
        total, mass, last = math.fsum(weights.values()), 0.0, 0
        for last in order:
            mass += weights[last]
            if mass >= top_p * total:
                break
        order = [i for i in order if logits[i] >= logits[last]]
    return {i for i in order if weights[i] >= min_p}


def deviations(counts: list[float], expected: list[float]) -> float:
    """Chi-square of counts against expected counts, as standard deviations of a normal variable."""
    pairs = [(count, mean) for count, mean in zip(counts, expected, strict=True) if mean >= 5]
    chi_square = sum((count - mean) ** 2 / mean for count, mean in pairs)
    assert chi_square > 0
    freedom = len(pairs) - 1
    # Wilson-Hilferty: the cube root is nearly normal.
    return ((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
