"""Errors that come from a limit of the operating system on this process: which limit, and how to raise it."""

from __future__ import annotations

import resource


def limit_reached(text: str) -> str | None:
    """The limit that an error's text, with its traceback, is about, in words that help; None when it is none."""
    if "Too many open files" in text:
        limit = _shown(resource.RLIMIT_NOFILE)
        return f"this process may open {limit} files and sockets, too few: raise `ulimit -n` (systemd: LimitNOFILE)"
    # As Python, PyTorch's own threads and a fork have it; alone, "unavailable" may be about anything.
    threads = ("can't start new thread", "RuntimeError: Resource temporarily unavailable")
    if any(sign in text for sign in threads) or ("fork()" in text and "Resource temporarily unavailable" in text):
        limit = _shown(resource.RLIMIT_NPROC)
        return (
            f"no process or thread more may be started: `ulimit -u` is {limit}; raise it (systemd: "
            "LimitNPROC, TasksMax; containers: --pids-limit)"
        )
    return None


def _shown(limit: int) -> str:
    soft, _ = resource.getrlimit(limit)
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
