"""Every kernel, one concept a file: the kernel, its wrapper and its PyTorch reference."""

from tercet.triton_kernels.cache_keys import hash_helpers_first

hash_helpers_first()
