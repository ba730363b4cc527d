"""Keys of Triton's cache that say nothing about what was compiled before in the same process.

A kernel's key holds the constants of the helpers that it calls, but Triton (3.6, 3.7) looks for them before it has
hashed the helper: they are in the key only if some other kernel had the helper hashed. So one kernel had several keys,
by what came first, and was compiled once for each: again in a start with other options, and in vain by processes that
compile for another.
"""

from triton.runtime.jit import DependenciesFinder, JITCallable


def hash_helpers_first() -> None:
    """From now on a kernel's key is what it is when everything that it calls was hashed before it."""
    update_hash = DependenciesFinder._update_hash

    def update_hash_of_hashed(finder: DependenciesFinder, helper: JITCallable) -> None:
        _ = helper.cache_key  # looking computes it
        update_hash(finder, helper)

    DependenciesFinder._update_hash = update_hash_of_hashed
