"""The GPUs of a machine as its driver reports them, through NVML (package nvidia-ml-py). Without torch.

An Xid is the number under which the driver reports an error of a GPU; which of them mean that the hardware needs
attention is told in NVIDIA's catalogue, https://docs.nvidia.com/deploy/xid-errors/.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.elastic.health import Reading

HARDWARE_XIDS = {
    48: "double bit error in memory",
    62: "halt of an internal microcontroller",
    64: "a row of memory could not be replaced",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "many single bit errors",
    95: "uncontained memory error",
    119: "GSP firmware does not answer",
    120: "GSP firmware error",
    140: "unrecovered memory error",
    143: "GPU could not be initialised",
}

SLOWED_BY = {
    "nvmlClocksThrottleReasonHwThermalSlowdown": "too hot",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "power brake",
    "nvmlClocksThrottleReasonSwThermalSlowdown": "hot, clocks lowered by the driver",
}


class GpuSensor:
    """All GPUs that this process may use."""

    def __init__(self, nvml: Any, visible: str | None = None) -> None:
        """`nvml` is the module pynvml, or what has its functions; `visible` is a value of CUDA_VISIBLE_DEVICES."""
        self._nvml = nvml
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
        self._handles = {index: nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)}
        if visible is not None:
            self._handles = {index: self._handles[index] for index in self._chosen(visible) if index in self._handles}
        # Errors from before this run are somebody else's.
        self._before = {index: self._uncorrected(handle) or 0 for index, handle in self._handles.items()}
        self._xids: dict[int, list[int]] = {index: [] for index in self._handles}
        self._errors = self._register()

    def read(self) -> Iterable[Reading]:
        """What each GPU reports; what one does not support is left out."""
        self._collect_xids()
        for index, handle in self._handles.items():
            yield from self._read(index, handle)

    def _read(self, index: int, handle: Any) -> Iterable[Reading]:
        nvml, sensor = self._nvml, f"gpu {index}"
        with suppress(nvml.NVMLError):
            yield Reading(sensor, "temperature", nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU), "C")
        with suppress(nvml.NVMLError):
            watts = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
            yield Reading(sensor, "power", watts, "W")
        with suppress(nvml.NVMLError):
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            yield Reading(sensor, "device memory in use", memory.used / memory.total)
        uncorrected = self._uncorrected(handle)
        if uncorrected is not None:
            yield Reading(sensor, "uncorrected memory errors", uncorrected - self._before[index], "", "in this run")
        with suppress(nvml.NVMLError):
            _, _, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
            note = "a reset of the GPU would replace more" if pending else ""
            yield Reading(sensor, "rows of memory that could not be replaced", int(failed), "", note)
        with suppress(nvml.NVMLError):
            reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
            why = [words for name, words in SLOWED_BY.items() if reasons & getattr(nvml, name)]
            yield Reading(sensor, "throttled by heat or power brake", int(bool(why)), "", ", ".join(why))
        hardware = [number for number in self._xids[index] if number in HARDWARE_XIDS]
        others = [number for number in self._xids[index] if number not in HARDWARE_XIDS]
        words = ", ".join(f"Xid {number}: {HARDWARE_XIDS[number]}" for number in hardware)
        yield Reading(sensor, "hardware errors", len(hardware), "", words)
        yield Reading(sensor, "errors of programs", len(others), "", ", ".join(f"Xid {number}" for number in others))

    def _uncorrected(self, handle: Any) -> int | None:
        nvml = self._nvml
        try:
            kind = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
            return int(nvml.nvmlDeviceGetTotalEccErrors(handle, kind, nvml.NVML_VOLATILE_ECC))
        except nvml.NVMLError:
            return None

    def _chosen(self, visible: str) -> list[int]:
        """Indices of the GPUs that the variable names, by number or by identity."""
        chosen = []
        for name in filter(None, (part.strip() for part in visible.split(","))):
            if name.isdigit():
                chosen.append(int(name))
            else:
                with suppress(self._nvml.NVMLError):
                    handle = self._nvml.nvmlDeviceGetHandleByUUID(name)
                    chosen.append(self._nvml.nvmlDeviceGetIndex(handle))
        return chosen

    def _register(self) -> Any:
        """Ask the driver to keep errors of these GPUs for us; None where it does not."""
        nvml = self._nvml
        try:
            errors = nvml.nvmlEventSetCreate()
            for handle in self._handles.values():
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, errors)
        except nvml.NVMLError:
            return None
        return errors

    def _collect_xids(self) -> None:
        nvml = self._nvml
        while self._errors is not None:
            try:
                event = nvml.nvmlEventSetWait_v2(self._errors, 0)
                index = nvml.nvmlDeviceGetIndex(event.device)
            except nvml.NVMLError:
                return  # None left.
            if index in self._xids:
                self._xids[index].append(int(event.eventData))


def find_gpus() -> tuple[GpuSensor | None, str]:
    """The GPUs of this machine; where there are some and they cannot be watched, why."""
    if not Path("/dev/nvidiactl").exists():
        return None, ""
    try:
        import pynvml
    except ImportError:
        return None, "the GPUs are not watched: pip install 'meshwright[gpu]'"
    try:
        return GpuSensor(pynvml, os.environ.get("CUDA_VISIBLE_DEVICES")), ""
    except pynvml.NVMLError as error:
        return None, f"the GPUs are not watched: {error}"
