"""Every kernel, one concept a file: the kernel, its wrapper and its PyTorch reference."""
