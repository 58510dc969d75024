"""Readings of sensors held against limits."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.elastic.gpu import GpuSensor, find_gpus
from meshwright.elastic.hang_report import Place
from meshwright.elastic.health import Health, HealthLimits, HostSensor, Reading, Rule
from meshwright.elastic.machine import MachineWatch


class Series:
    """A sensor that gives one value after another."""

    def __init__(self, name: str, *values: float) -> None:
        self.name, self.values = name, list(values)

    def read(self) -> Iterable[Reading]:
        yield Reading("gpu 0", self.name, self.values.pop(0))


def changes(rule: Rule, *values: float) -> list[str]:
    """What is told at each reading: + bad, - good again, . nothing."""
    health = Health([Series(rule.name, *values)], [rule])
    said = []
    for _ in values:
        found = health.check()
        said.append("".join("+" if change.bad else "-" for change in found) or ".")
    return said


HOT = Rule("temperature", bad=90, good=85)


def test_value_beyond_its_limit_is_told_once() -> None:
    assert changes(HOT, 80, 91, 92, 95, 95) == [".", ".", "+", ".", "."]


def test_single_peak_is_not_told() -> None:
    assert changes(HOT, 80, 95, 80, 95, 80) == ["."] * 5


def test_value_that_wavers_around_its_limit_is_told_once() -> None:
    assert changes(HOT, 91, 91, 89, 91, 88, 91, 89) == [".", "+", ".", ".", ".", ".", "."]


def test_value_just_below_its_limit_is_not_good_again() -> None:
    assert changes(HOT, 91, 91, 89, 89, 89) == [".", "+", ".", ".", "."]


def test_value_that_is_good_again_is_told_and_may_be_bad_again() -> None:
    assert changes(HOT, 91, 91, 84, 84, 92, 92) == [".", "+", ".", "-", ".", "+"]


def test_low_values_can_be_the_bad_ones() -> None:
    assert changes(Rule("free disk", bad=1, good=1.2), 5, 0.9, 0.9, 1.1, 1.1, 1.3, 1.3) == list("..+...-")


def test_every_new_error_is_told() -> None:
    assert changes(Rule("hardware errors", 0.5, 0, counts=True), 0, 1, 1, 1, 2, 2, 2) == list("..+..+.")


def test_words_name_the_value_the_limit_and_the_setting() -> None:
    rules = HealthLimits(disk_gib=10).rules()
    health = Health([Series("free disk", 2, 2)], rules)
    health.check()
    (change,) = health.check()
    assert change.text == "gpu 0 free disk 2: below its limit of 10 (elastic.health_disk_gib)"


def test_limits_of_zero_are_none() -> None:
    names = {rule.name for rule in HealthLimits(0, 0, 0, 0).rules()}
    assert names.isdisjoint({"memory in use", "load per core", "free disk", "temperature"})
    assert "hardware errors" in names


def test_this_machine_has_readings(tmp_path: Path) -> None:
    readings = {reading.name: reading.value for reading in HostSensor(tmp_path / "not" / "yet" / "there").read()}
    assert 0 < readings["memory in use"] < 1
    assert readings["free disk"] > 0
    assert readings["load per core"] >= 0


class NVMLError(Exception):
    """What NVML raises."""


class RecordedNvml:
    """NVML of one GPU, whose answers are given: numbers in the units and shapes that NVML has."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    nvmlEventTypeXidCriticalError = 8
    nvmlClocksThrottleReasonHwThermalSlowdown = 0x40
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x80
    nvmlClocksThrottleReasonSwThermalSlowdown = 0x20

    def __init__(self) -> None:
        self.temperature, self.ecc, self.throttle = 41, 3, 0x4
        self.xids: list[int] = []

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlInit": None,
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": "gpu",
            "nvmlDeviceGetIndex": 0,
            "nvmlDeviceGetTemperature": self.temperature,
            "nvmlDeviceGetPowerUsage": 114_532,
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=2**30, total=140 * 2**30),
            "nvmlDeviceGetTotalEccErrors": self.ecc,
            "nvmlDeviceGetCurrentClocksThrottleReasons": self.throttle,
            "nvmlEventSetCreate": "errors",
            "nvmlDeviceRegisterEvents": None,
        }
        if name == "nvmlDeviceGetRemappedRows":
            return self._not_supported
        if name == "nvmlEventSetWait_v2":
            return self._next_error
        if name not in answers:
            raise AttributeError(name)
        return lambda *_: answers[name]

    def _not_supported(self, *_: Any) -> Any:
        raise NVMLError("Not Supported")

    def _next_error(self, *_: Any) -> Any:
        if not self.xids:
            raise NVMLError("Timeout")
        return SimpleNamespace(device="gpu", eventData=self.xids.pop(0))


def told(health: Health) -> list[str]:
    return [change.text for _ in range(2) for change in health.check()]


def test_gpu_is_read_and_its_troubles_told() -> None:
    nvml = RecordedNvml()
    health = Health([GpuSensor(nvml)], HealthLimits().rules())
    assert told(health) == [], "errors from before the run are not told"
    nvml.temperature, nvml.throttle = 93, 0x44
    assert told(health) == [
        "gpu 0 temperature 93 C: above its limit of 90 (elastic.health_gpu_celsius)",
        "gpu 0 throttled by heat or power brake 1 (too hot): above its limit of 0.5",
    ]
    nvml.temperature, nvml.throttle, nvml.ecc = 70, 0x4, 4
    nvml.xids = [79, 31]
    assert told(health) == [
        "gpu 0 temperature 70 C: within its limit again",
        "gpu 0 uncorrected memory errors 1 (in this run): above its limit of 0.5",
        "gpu 0 throttled by heat or power brake 0: within its limit again",
        "gpu 0 hardware errors 1 (Xid 79: the GPU has fallen off the bus): above its limit of 0.5",
        "gpu 0 errors of programs 1 (Xid 31): above its limit of 0.5",
    ]


def test_gpu_that_this_run_does_not_use_is_not_read() -> None:
    assert list(GpuSensor(RecordedNvml(), visible="1").read()) == []
    assert list(GpuSensor(RecordedNvml(), visible="").read()) == []
    assert list(GpuSensor(RecordedNvml(), visible="0").read()) != []


def test_machine_without_gpus_says_nothing_of_them() -> None:
    if not Path("/dev/nvidiactl").exists():
        assert find_gpus() == (None, "")


@pytest.mark.parametrize(("drain", "kind"), [(False, "health"), (True, "drain")])
def test_serious_trouble_drains_a_machine_where_that_is_wanted(
    drain: bool, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = RecordedNvml()
    nvml.temperature = 95
    monkeypatch.setattr("meshwright.elastic.machine.find_gpus", lambda: (GpuSensor(nvml), ""))
    monkeypatch.setattr("meshwright.elastic.machine.PERIOD_S", 0.0)
    watch = MachineWatch(HealthLimits(memory=0, disk_gib=10**9), drain=drain)
    place = Place("here", 0, tmp_path)
    said = watch.look(place) + watch.look(place)
    assert [(kind, text.split(":")[0]) for kind, text in said] == [("health", "here"), (kind, "here")]
    assert "free disk" in said[0][1]
    assert "temperature" in said[1][1]
