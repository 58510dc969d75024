"""Settings that somebody made, held against the hardware: what has no effect, is slow or breaks, and what it costs.

No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from meshwright.cluster.hardware import Hardware
from meshwright.comm.nccl_levels import OLD_LEVELS, check_p2p_level
from meshwright.comm.nccl_network_checks import check_network
from meshwright.comm.nccl_profile import Exists, Finding, Level
from meshwright.comm.nccl_variables import (
    is_foreign,
    is_number,
    is_whole_number,
    known_names,
    limits,
    nccl_version,
    number_in,
    successor,
    words,
)
from meshwright.errors import nearest

MOST_SOCKETS = 64
_MOST_THREADS = 16
"""Of sockets; more are taken for so many."""
_OLD_SWITCHES = ("0x1ac2", "0x1af1")
"""NVSwitches beside V100 and A100, which do not add; NVLink SHARP began with those beside H100."""
_LEAST_BUFFER, _STEPS = 65536, 8
"""Bytes below which a buffer is told as small; pieces that NCCL cuts it into."""
_THREADS = range(64, 513, 32)
_LISTS = ("NCCL_DEBUG_SUBSYS",)
_LEVELS = ("NCCL_P2P_LEVEL", "NCCL_NET_GDR_LEVEL")
_MOST_LEVEL = len(OLD_LEVELS) - 1
_CHOSEN = ("NCCL_ALGO", "NCCL_PROTO")


def check_settings(hardware: Hardware, values: Mapping[str, str], machines: int, exists: Exists) -> Iterator[Finding]:
    """All that is wrong with them."""
    for name, value in values.items():
        yield from _name(name)
        yield from _number(name, value)
        yield from _words(name, value)
    yield from check_network(hardware, values, machines)
    yield from _between_gpus(hardware, values)
    yield from _sockets(values)
    yield from _kernels(values)
    yield from _files(values, exists)
    yield from _buffers(values)
    yield from _debug(values)
    yield from _torch(values)


def _name(name: str) -> Iterator[Finding]:
    if name in known_names() or is_foreign(name):
        return
    if (found := successor(name)) is not None:
        now, still = found
        if still:
            yield Finding(Level.NOTE, name, "an old name, which PyTorch reads with a warning", remedy=f"set {now}")
        else:
            yield Finding(Level.WARNING, name, "nothing reads this name any more", remedy=f"see {now}")
        return
    yield Finding(
        Level.WARNING,
        name,
        f"NCCL {nccl_version()}, PyTorch and gloo know no such name{nearest(name, known_names())}",
        cost="it has no effect, unless a plugin reads it",
    )


def _number(name: str, value: str) -> Iterator[Finding]:
    if not is_number(name):
        return
    bounds = limits(name)
    if not is_whole_number(value):
        if value == "":
            return  # As if it were not set.
        read = number_in(value)
        right = f"a whole number from {bounds[0]} to {bounds[1]}" if bounds else "a whole number"
        if name.startswith("TORCH_"):
            cost = "PyTorch refuses it when ranks meet"
            yield Finding(Level.BREAKS, name, f"'{value}' is no number", cost, f"set {right}")
            return
        yield Finding(Level.WARNING, name, f"'{value}' is no number; NCCL reads it as {read}", remedy=f"set {right}")
    elif bounds and not bounds[0] <= number_in(value) <= bounds[1]:
        text = f"{number_in(value)} is outside of {bounds[0]} to {bounds[1]}"
        yield Finding(Level.WARNING, name, text, cost="the value is cut, ignored or refused when connections are made")


def _words(name: str, value: str) -> Iterator[Finding]:
    allowed = words(name)
    if not allowed or value == "":
        return
    if name in _LEVELS:
        # Compared letter by letter; a number is the old way to say it.
        old = value[0].isascii() and value[0].isdecimal()
        if old and number_in(value) > _MOST_LEVEL:
            cost, remedy = "NCCL takes it for SYS, the farthest", f"one of {', '.join(allowed)}"
            yield Finding(Level.WARNING, name, f"'{value}' is no level: they end at {_MOST_LEVEL}", cost, remedy)
        unknown = [] if value in allowed or old else [value]
    elif name in _CHOSEN:
        unknown = [word for word in _chosen(value) if word.upper() not in allowed]
    elif name in _LISTS:
        parts = value.removeprefix("^").split(",")
        unknown = [part for part in parts if part.strip() and part.strip().upper() not in allowed]
    else:
        unknown = [] if value.upper() in allowed else [value]
    for word in unknown:
        yield Finding(
            Level.BREAKS if name in _CHOSEN else Level.WARNING,
            name,
            f"'{word}' is no word for it{nearest(word.upper(), allowed)}",
            cost=_unknown_word(name),
            remedy=f"one of {', '.join(allowed)}",
        )


def _unknown_word(name: str) -> str:
    if name in _CHOSEN:
        return "NCCL refuses it when ranks meet"
    return "NCCL ignores the whole list" if name in _LISTS else "NCCL ignores it"


def _chosen(value: str) -> list[str]:
    """The words of `ring,tree`, `^tree` and `allreduce:ring;broadcast:^tree`; NCCL takes spaces for a part of them."""
    lists = [part.rpartition(":")[2].removeprefix("^") for part in value.split(";")]
    return [word for one in lists for word in one.split(",") if word]


def _between_gpus(hardware: Hardware, values: Mapping[str, str]) -> Iterator[Finding]:
    if len(hardware.gpus) < 2:
        return
    yield from check_p2p_level(hardware, values)
    disabled = number_in(values.get("NCCL_P2P_DISABLE", "")) == 1
    if number_in(values.get("NCCL_SHM_DISABLE", "")) == 1:
        cost = "GPUs without a direct path talk over the network card, also within this machine"
        if hardware.all_linked and not disabled:
            cost += "; here NVLinks join all, until one fails or P2P is switched off"
        yield Finding(Level.WARNING, "NCCL_SHM_DISABLE", "shared memory may not be used", cost, "unset it")
    adding = [one for one in hardware.pci.values() if one.is_nvswitch and one.device not in _OLD_SWITCHES]
    if values.get("NCCL_NVLS_ENABLE", "").strip() == "0" and adding:
        cost = "sums are not made in the switches (NVLink SHARP): all-reduce is slower on this machine"
        yield Finding(Level.NOTE, "NCCL_NVLS_ENABLE", f"{len(adding)} NVSwitches could add", cost)


def _sockets(values: Mapping[str, str]) -> Iterator[Finding]:
    names = ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")
    if not all(name in values for name in names):
        return
    threads, each = (number_in(values[name]) for name in names)
    threads = min(threads, _MOST_THREADS)
    if threads * each > MOST_SOCKETS:
        text = f"{threads} threads x {each} sockets are {threads * each}, and NCCL opens at most {MOST_SOCKETS}"
        yield Finding(Level.WARNING, names[1], text, f"it is lowered to {MOST_SOCKETS // threads}")


def _kernels(values: Mapping[str, str]) -> Iterator[Finding]:
    least, most = (values.get(name, "") for name in ("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"))
    if is_whole_number(least) and is_whole_number(most) and number_in(least) > number_in(most) > 0:
        text = f"at least {number_in(least)} channels, and NCCL_MAX_NCHANNELS={number_in(most)} at most"
        cost = "one of the two has no effect: not the number of channels, and of the GPU's cores, that was wanted"
        yield Finding(Level.WARNING, "NCCL_MIN_NCHANNELS", text, cost, "unset one of them")
    threads = values.get("NCCL_NTHREADS", "")
    if is_whole_number(threads) and number_in(threads) not in (0, *_THREADS):
        taken = 64 if number_in(threads) % 32 == 0 and number_in(threads) < 64 else 512
        text = f"{number_in(threads)} threads of a block are no multiple of 32 from 64 to 512"
        cost = f"NCCL takes {taken} instead, and says so with NCCL_DEBUG=INFO alone"
        yield Finding(Level.WARNING, "NCCL_NTHREADS", text, cost, "64, 128, 256 or 512, or unset it")


def _files(values: Mapping[str, str], exists: Exists) -> Iterator[Finding]:
    def there(path: Path) -> bool:
        try:
            return exists(path)
        except (OSError, ValueError):
            return False

    topology, graph = values.get("NCCL_TOPO_FILE"), values.get("NCCL_GRAPH_FILE")
    if topology and not there(Path(topology)):
        cost = "NCCL goes by the PCIe tree that it sees; in a virtual machine that is often the wrong one"
        yield Finding(Level.WARNING, "NCCL_TOPO_FILE", f"there is no file {topology}", cost, "correct or unset it")
    if graph and not there(Path(graph)):
        cost = "NCCL fails when the first group of ranks is made"
        yield Finding(Level.BREAKS, "NCCL_GRAPH_FILE", f"there is no file {graph}", cost, "correct or unset it")
    for name in ("NCCL_DEBUG_FILE", "NCCL_TOPO_DUMP_FILE", "NCCL_GRAPH_DUMP_FILE"):
        path = values.get(name)
        if path and not there(Path(path).parent):
            yield Finding(Level.WARNING, name, f"there is no folder {Path(path).parent}", "nothing is written")


def _buffers(values: Mapping[str, str]) -> Iterator[Finding]:
    value = values.get("NCCL_BUFFSIZE", "")
    size = number_in(value)
    if not is_whole_number(value) or size <= 0:
        return
    if size & (size - 1):
        text = f"{size} bytes are no power of two"
        yield Finding(Level.NOTE, "NCCL_BUFFSIZE", text, "chunks do not fill the buffer", "take one, such as 4194304")
    if size < _LEAST_BUFFER:
        text = f"{size} bytes, of which NCCL sends {size // _STEPS} at a time; the default is 4 MiB"
        yield Finding(Level.WARNING, "NCCL_BUFFSIZE", text, "small messages: most of the bandwidth is lost", "unset it")
    if size > 2**24:
        memory = f"{size / 2**20:.0f} MiB, {size / 2**22:g} times the default, of GPU memory in every channel"
        cost = "with up to 32 channels and many groups of ranks that is gigabytes"
        yield Finding(Level.WARNING, "NCCL_BUFFSIZE", memory, cost)


def _debug(values: Mapping[str, str]) -> Iterator[Finding]:
    level = values.get("NCCL_DEBUG", "").upper()
    if level in ("INFO", "TRACE"):
        cost = "every rank prints hundreds of lines at start" + ("; every call too" if level == "TRACE" else "")
        where = "" if "NCCL_DEBUG_FILE" in values else "; NCCL_DEBUG_FILE=/tmp/nccl.%h.%p keeps them apart"
        yield Finding(Level.NOTE, "NCCL_DEBUG", f"{level} is for looking at trouble", cost, f"WARN when done{where}")
    elif "NCCL_DEBUG_SUBSYS" in values:
        text = "it chooses among messages of NCCL_DEBUG=INFO, which is not set"
        yield Finding(Level.NOTE, "NCCL_DEBUG_SUBSYS", text, "it has no effect")


def _torch(values: Mapping[str, str]) -> Iterator[Finding]:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    if name in values and is_whole_number(values[name]) and number_in(values[name]) == 0:
        cost = "when a rank dies the others wait in their collective for ever; only a watchdog from outside sees it"
        yield Finding(Level.WARNING, name, "errors of collectives are not handled", cost, "unset it, or 3")
    name = "TORCH_NCCL_BLOCKING_WAIT"
    if number_in(values.get(name, "")) == 1:
        cost = "the host waits for every collective: computing and communication no longer overlap"
        yield Finding(Level.WARNING, name, "wait() blocks the host", cost, "unset it")
    name = "TORCH_NCCL_ENABLE_MONITORING"
    if name in values and is_whole_number(values[name]) and number_in(values[name]) == 0:
        yield Finding(Level.NOTE, name, "a watchdog thread that is stuck is not noticed", "such a rank never ends")
