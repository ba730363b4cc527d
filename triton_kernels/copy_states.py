"""Copy what slots hold, of all layers at once: states that later prompts may begin from.

Knows pools, [layer, slot, ...]; what lies in them, and which are copied why, is the plan's matter.

Shape suffixes: P pairs of slots.
"""

from torch import Tensor

from tercet.triton_kernels.checks import check_contiguous, check_indices


def copy_states(pools: Tensor, pairs_P2: Tensor) -> None:
    """Copy what slot `pairs_P2[p, 0]` holds over that of slot `pairs_P2[p, 1]`, in place. Graph-safe.

    A pair that points outside the pools, such as (-1, -1), does nothing. A slot that is copied over stands in no other
    pair: the order of copies is open.
    """
    if pools.ndim < 3:
        raise ValueError(f"pools: got shape {list(pools.shape)}, wanted [layers, slots, ...]")
    check_contiguous("pools", pools)
    check_indices("pairs", pairs_P2, pools, None, 2)
    copy_states_reference(pools, pairs_P2)


def copy_states_reference(pools: Tensor, pairs_P2: Tensor) -> None:
    """The same in PyTorch."""
    inside_P = ((pairs_P2 >= 0) & (pairs_P2 < pools.shape[1])).all(1)
    sources_P, targets_P = pairs_P2[inside_P].long().unbind(1)
    pools[:, targets_P] = pools[:, sources_P]
