"""What NVIDIA's management library says of the GPUs: names, memory, NVLinks. Read once into plain data. No torch."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.cluster.hardware import Gpu
from meshwright.printable import printable

_SPEED_FIELD = 90
"""NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON."""


@dataclass(frozen=True)
class NvmlGpu:
    """One GPU's answers."""

    index: int
    address: str
    name: str
    memory_bytes: int
    links: tuple[tuple[str, str], ...] = ()
    """Of each NVLink that is up: gpu, switch or another word for what is at its other end, and that one's address."""
    link_mb_s: int | None = None


def ask_nvml() -> tuple[tuple[NvmlGpu, ...] | None, str]:
    """All GPUs of this machine, or None and why."""
    try:
        import pynvml
    except ImportError:
        return None, "NVML is not asked: pip install 'meshwright[gpu]'"
    return read_nvml(pynvml)


def read_nvml(nvml: Any) -> tuple[tuple[NvmlGpu, ...] | None, str]:
    """All GPUs, or None and why; `nvml` is the module pynvml, or what has its functions."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return None, printable(f"NVML does not answer: {error}")
    try:
        return tuple(_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())), ""
    except nvml.NVMLError as error:
        return None, printable(f"NVML does not answer: {error}")
    finally:
        nvml.nvmlShutdown()


def recorded_nvml(path: Path) -> tuple[tuple[NvmlGpu, ...] | None, str]:
    """What another machine's NVML said: a list of objects with the fields of NvmlGpu, or a text that says why not."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(rows, str):
            return None, printable(rows)
        if not isinstance(rows, list):
            raise ValueError("no list of GPUs")
        return tuple(_recorded(row) for row in rows), ""
    except FileNotFoundError:
        return None, "NVML was not recorded"
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        return None, printable(f"{path} is damaged ({error})")


def _recorded(row: dict[str, Any]) -> NvmlGpu:
    """One GPU's answers, each of a kind that NVML gives; else a ValueError or a TypeError."""
    gpu = NvmlGpu(**{**row, "links": tuple((kind, address) for kind, address in row.get("links", ()))})
    for text in (gpu.address, gpu.name, *(word for link in gpu.links for word in link)):
        if not isinstance(text, str) or not text.isprintable():
            raise ValueError(f"{text!r} is no name or address")
    for number in (gpu.index, gpu.memory_bytes, 0 if gpu.link_mb_s is None else gpu.link_mb_s):
        if type(number) is not int or not 0 <= number < 2**63:
            raise ValueError(f"{number!r} is no count")
    return gpu


def _gpu(nvml: Any, index: int) -> NvmlGpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    links = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        with suppress(nvml.NVMLError):
            if nvml.nvmlDeviceGetNvLinkState(handle, link):
                links.append(_other_end(nvml, handle, link))
    speed = None
    with suppress(nvml.NVMLError, AttributeError, IndexError):
        answer = nvml.nvmlDeviceGetFieldValues(handle, [_SPEED_FIELD])[0]
        speed = int(answer.value.uiVal) if answer.nvmlReturn == 0 else None
    return NvmlGpu(
        index,
        pci_address(_text(nvml.nvmlDeviceGetPciInfo(handle).busId)),
        _text(nvml.nvmlDeviceGetName(handle)),
        int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        tuple(links),
        speed or None,
    )


def _other_end(nvml: Any, handle: Any, link: int) -> tuple[str, str]:
    kind, address = "unknown", ""
    with suppress(nvml.NVMLError, AttributeError):
        known = {nvml.NVML_NVLINK_DEVICE_TYPE_GPU: "gpu", nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH: "switch"}
        kind = known.get(nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link), "unknown")
    with suppress(nvml.NVMLError):
        address = pci_address(_text(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId))
    return kind, address


def _text(value: str | bytes) -> str:
    return printable(value.decode(errors="replace") if isinstance(value, bytes) else value)


def pci_address(text: str) -> str:
    """NVML's `00000000:1B:00.0` as the kernel writes it: `0000:1b:00.0`, with more digits only where they count."""
    domain, _, rest = text.lower().partition(":")
    return f"{domain.lstrip('0').rjust(4, '0')}:{rest}"


def with_nvml(gpus: tuple[Gpu, ...], answers: tuple[NvmlGpu, ...]) -> tuple[Gpu, ...]:
    """GPUs that the bus shows with what NVML adds; ones that only NVML knows come too."""
    seen = {gpu.address: gpu for gpu in gpus}
    own = {answer.address for answer in answers}
    for answer in answers:
        ends = {address for kind, address in answer.links if kind == "gpu" or (kind == "unknown" and address in own)}
        seen[answer.address] = replace(
            seen.get(answer.address, Gpu(answer.address, None)),
            index=answer.index,
            name=answer.name,
            memory_bytes=answer.memory_bytes,
            links=len(answer.links),
            link_gb_s=None if answer.link_mb_s is None else answer.link_mb_s / 1000,
            switched=any(kind == "switch" for kind, _ in answer.links),
            peers=tuple(sorted(ends)),
        )
    return tuple(seen[address] for address in sorted(seen))
