"""What a GPU takes, as its driver counts it (NVML): nothing here changes a setting."""

import ctypes

_MULTIPROCESSOR_CLOCK = 1  # nvmlClockType_t


class PowerMeter:
    """One GPU's."""

    def __init__(self, uuid: str) -> None:
        """`uuid`: as CUDA tells it. OSError where the driver's library is not there or does not know the card."""
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._device = ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByUUID", f"GPU-{uuid}".encode(), ctypes.byref(self._device))

    def joules(self) -> float:
        """Since the driver was loaded. It counts in steps of its own, which seconds make small."""
        millijoules = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._device, ctypes.byref(millijoules))
        return millijoules.value / 1e3

    def megahertz(self) -> int:
        """The clock of the multiprocessors, now."""
        clock = ctypes.c_uint()
        self._call("nvmlDeviceGetClockInfo", self._device, _MULTIPROCESSOR_CLOCK, ctypes.byref(clock))
        return clock.value

    def _call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._nvml, name)(*arguments):
            raise OSError(f"{name} returned {code}")
