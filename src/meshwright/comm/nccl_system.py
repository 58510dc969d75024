"""What of a machine itself stands in NCCL's way: ports that are down, no way into GPU memory, an IOMMU. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from meshwright.cluster.hardware import Hardware, RdmaPort, rates
from meshwright.comm.nccl_levels import check_gdr_level
from meshwright.comm.nccl_network_checks import instead_of_rdma
from meshwright.comm.nccl_profile import Finding, Level
from meshwright.comm.nccl_selection import fabric_ports, rdma_ports
from meshwright.comm.nccl_variables import number_in

_DMABUF_KERNEL = (5, 12)
"""From which InfiniBand drivers take DMA-BUF."""


def check_system(hardware: Hardware, values: Mapping[str, str], machines: int) -> Iterator[Finding]:
    """Findings that do not depend on a setting."""
    if not hardware.gpus:
        return
    yield from _translated(hardware)
    yield from _redirected(hardware)
    if machines > 1:
        yield from _no_driver(hardware)
        yield from _ports(hardware, values)
        yield from _efa(hardware, values)
        yield from _gpu_memory(hardware, values)
        yield from _no_interface(hardware)


def _no_driver(hardware: Hardware) -> Iterator[Finding]:
    cards = hardware.cards_without_driver
    if cards:
        count = f"{len(cards)} InfiniBand card{'s' * (len(cards) > 1)}"
        text = f"{count} on the PCIe bus, and no RDMA device: {', '.join(cards)}"
        remedy = "load the driver (mlx5_ib for ConnectX); a container needs /sys/class/infiniband and /dev/infiniband"
        yield Finding(Level.WARNING, "RDMA", text, "all traffic between machines goes over sockets", remedy)


def _ports(hardware: Hardware, values: Mapping[str, str]) -> Iterator[Finding]:
    down = [port for port in hardware.rdma if not port.active and not port.is_efa and _matters(hardware, port)]
    if not down:
        return
    fabric = fabric_ports(hardware)
    shown = ", ".join(f"{port.name} ({port.state})" for port in down[:4]) + (" and more" if len(down) > 4 else "")
    if not fabric:
        cost = "all traffic between machines goes over sockets"
    else:
        total, whole = len(fabric), len(fabric) + len(down)
        cost = f"{rates(fabric)} of {whole} ports: the machine, and all that wait for it, run at {total / whole:.0%}"
    remedy = "check the cable, the switch's port and, on InfiniBand, that a subnet manager runs"
    yield Finding(Level.WARNING, "RDMA", f"not active: {shown}", cost, remedy)


def _matters(hardware: Hardware, port: RdmaPort) -> bool:
    """Whether a port belongs to the fabric as far as can be seen: beside a GPU, or there is no other."""
    found = hardware.nearest_gpu(port.address)
    near = found is not None and found[1].name in ("PIX", "PXB")
    return near or not rdma_ports(hardware, None)


def _efa(hardware: Hardware, values: Mapping[str, str]) -> Iterator[Finding]:
    ports = [port for port in hardware.rdma if port.is_efa]
    plugin = any("ofi-nccl" in path for path in hardware.files) or "NCCL_NET_PLUGIN" in values
    if ports and not plugin:
        cost = instead_of_rdma(hardware, values) if fabric_ports(hardware) else "NCCL falls back on sockets"
        text = (
            f"{len(ports)} EFA adapter{'s' * (len(ports) > 1)} ({rates(ports)}), and no aws-ofi-nccl plugin was found"
        )
        remedy = "install it, and have its folder in LD_LIBRARY_PATH"
        yield Finding(Level.WARNING, "EFA", text, f"{cost} instead of {rates(ports)}", remedy)


def _gpu_memory(hardware: Hardware, values: Mapping[str, str]) -> Iterator[Finding]:
    """GPUDirect RDMA needs a way from the network card into a GPU's memory."""
    if not rdma_ports(hardware, values.get("NCCL_IB_HCA")) or number_in(values.get("NCCL_IB_DISABLE", "")) == 1:
        return
    buffers = hardware.open_gpu_driver and hardware.kernel >= _DMABUF_KERNEL
    if not hardware.peer_memory and not buffers:
        cost = "what goes between machines is copied through host memory first: often half the bandwidth, and CPU time"
        text = "nvidia_peermem is not loaded, and the driver's modules do not offer DMA-BUF"
        remedy = "modprobe nvidia_peermem, or the open kernel modules of the driver"
        yield Finding(Level.WARNING, "GPUDirect", text, cost, remedy)
    yield from check_gdr_level(hardware, values)


def _translated(hardware: Hardware) -> Iterator[Finding]:
    devices = [hardware.pci[gpu.address] for gpu in hardware.gpus if gpu.address in hardware.pci]
    devices += [hardware.pci[port.address] for port in hardware.rdma if port.address in hardware.pci]
    behind = [device for device in devices if device.iommu.startswith("DMA")]
    if behind and not hardware.virtual:
        cost = "traffic between PCIe devices goes through the processor: GPUs and cards lose most of their direct speed"
        text = f"the IOMMU translates addresses ({len(behind)} of {len(devices)} GPUs and cards)"
        remedy = "boot with iommu=pt, or switch it off in the firmware"
        yield Finding(Level.WARNING, "IOMMU", text, cost, remedy)


def _redirected(hardware: Hardware) -> Iterator[Finding]:
    above = {step for gpu in hardware.gpus if gpu.address in hardware.pci for step in hardware.pci[gpu.address].path}
    bad = [device for device in hardware.pci.values() if device.redirects and device.address in above]
    if bad and not hardware.virtual:
        cost = "what goes between devices of one switch travels up to the processor and back; it may also hang"
        text = f"access control (ACS) is on in {len(bad)} bridges above GPUs, such as {bad[0].address}"
        yield Finding(
            Level.WARNING, "ACS", text, cost, "switch it off in the firmware, or with setpci as NVIDIA describes"
        )


def _no_interface(hardware: Hardware) -> Iterator[Finding]:
    if not any(one.usable for one in hardware.interfaces):
        cost = "ranks of several machines cannot meet"
        yield Finding(Level.BREAKS, "network", "no interface is up with an address", cost)
