"""What this machine's sensors say, GPUs included: a script to run by hand where there are GPUs.

    python -m tests.gpu_health [--seconds 10] [--record FILE]

Prints all readings at rest and while each GPU multiplies matrices, and what is beyond the limits. `--record` writes
what NVML answered, as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from meshwright.elastic.gpu import SLOWED_BY, find_gpus
from meshwright.elastic.health import Health, HealthLimits, HostSensor


def record() -> dict[str, Any]:
    """The answers of NVML that the sensor is made from, for every GPU."""
    import pynvml as nvml

    def ask(function: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, function)(*arguments)
        except nvml.NVMLError as error:
            return {"error": str(error)}

    gpus = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = ask("nvmlDeviceGetMemoryInfo", handle)
        gpus.append(
            {
                "name": ask("nvmlDeviceGetName", handle),
                "temperature": ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
                "power": ask("nvmlDeviceGetPowerUsage", handle),
                "memory": {"used": memory.used, "total": memory.total},
                "uncorrected": ask(
                    "nvmlDeviceGetTotalEccErrors",
                    handle,
                    nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                    nvml.NVML_VOLATILE_ECC,
                ),
                "remapped": ask("nvmlDeviceGetRemappedRows", handle),
                "throttle": ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle),
            }
        )
    constants = {name: getattr(nvml, name) for name in SLOWED_BY}
    return {"driver": ask("nvmlSystemGetDriverVersion"), "constants": constants, "gpus": gpus}


def work(seconds: float) -> None:
    """Keep every GPU busy."""
    import torch

    matrices = [torch.randn(8192, 8192, device=f"cuda:{index}") for index in range(torch.cuda.device_count())]
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for matrix in matrices:
            matrix @ matrix
        torch.cuda.synchronize()


def recorder() -> None:
    """What the flight recorder knows of NCCL, and what asking costs: a world of one GPU."""
    import torch
    import torch.distributed as dist

    from meshwright.elastic.rank_side import Collectives

    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    for _ in range(100):
        dist.all_reduce(torch.zeros(4, device="cuda"))
        dist.all_reduce(torch.zeros(4))
    torch.cuda.synchronize()
    time.sleep(1)
    collectives = Collectives()
    print(f"last call: {collectives.records()[-1]}")
    print(f"groups: {collectives.groups()}")
    began = time.perf_counter()
    for _ in range(100):
        collectives.groups()
    print(f"telling of collectives: {1e4 * (time.perf_counter() - began):.0f} us")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--record", type=Path)
    given = parser.parse_args()
    gpus, problem = find_gpus()
    if gpus is None:
        print(problem or "no NVIDIA GPU here")
        return
    sensors = [HostSensor(Path.cwd()), gpus]
    health = Health(sensors, HealthLimits().rules())
    records = {}
    for state in ("at rest", "at work"):
        if state == "at work":
            work(given.seconds)
        began = time.perf_counter()
        readings = [reading for sensor in sensors for reading in sensor.read()]
        print(f"{state}: {len(readings)} readings in {1000 * (time.perf_counter() - began):.1f} ms")
        for reading in readings:
            print(f"  {reading}")
        records[state] = record()
        health.check()
    for change in health.check():
        print(f"beyond its limit: {change.text}")
    recorder()
    if given.record is not None:
        given.record.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
