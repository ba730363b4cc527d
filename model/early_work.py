"""What a start on a GPU can do in threads of its own while Python imports and weights come.

Knows the driver by its C interface, and Triton's fingerprint of itself. Imports neither torch nor Triton: it is there
before them. Whatever fails here is done again, and reported, by whoever needs it.
"""

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable


def open_device_early(index: int) -> threading.Thread:
    """Start the driver and this device's context, which torch takes over; where there is no driver, do nothing."""
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does, and too late now
    return _in_thread("open-device", lambda: _open_device(index))


def fingerprint_triton_early() -> threading.Thread:
    """In a thread."""
    return _in_thread("fingerprint-triton", fingerprint_triton)


def fingerprint_triton() -> None:
    """Triton reads its whole compiler, 400 MB, before it takes the first kernel from its cache, and remembers."""
    with contextlib.suppress(ImportError, OSError):
        from triton.runtime.cache import triton_key

        triton_key()


def _open_device(index: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def _in_thread(name: str, work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread
