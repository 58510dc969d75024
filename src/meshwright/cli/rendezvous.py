"""Serve the store where the machines of a run meet: on one address, in a process that no machine's fault takes along.

Start it first, on a machine that stays, and give every machine's `meshwright train` the line that it prints. It ends by
itself when the run is over. The store asks nobody who they are: let only the run's machines reach it."""

from __future__ import annotations

import argparse
import ipaddress
import os
import signal
import sys
import threading
import time

from meshwright.torch_support import imported_for_good, require_torch


def describe(parser: argparse.ArgumentParser) -> None:
    """Arguments of `meshwright rendezvous`."""
    parser.add_argument(
        "--listen",
        default="127.0.0.1:29400",
        metavar="HOST:PORT",
        help="address to listen on, and no other; port 0 takes a free one (default: 127.0.0.1:29400)",
    )
    parser.add_argument(
        "--idle",
        type=float,
        metavar="S",
        help="end also when no machine was heard of for so many seconds (default: wait for them for ever)",
    )
    parser.add_argument("--run-id", help="name of the run; machines that ask for another are refused (default: random)")


def run(args: argparse.Namespace) -> int:
    """Serve until the run is over or a signal comes; 0."""
    require_torch()
    with imported_for_good():
        from meshwright.elastic.meeting import MEETING
        from meshwright.elastic.rendezvous import END, LINGER_S, Endpoint, listen, serve

    run_id = args.run_id or os.urandom(6).hex()
    listener = listen(Endpoint.parse(args.listen, "--listen"))
    where = Endpoint(*listener.getsockname()[:2])
    store = serve(listener, run_id)
    print(f"meshwright train ... --rendezvous {where} --run-id {run_id}", flush=True)
    if not ipaddress.ip_address(where.host).is_loopback:
        print(f"meshwright rendezvous: whoever reaches {where} can read and change it", file=sys.stderr, flush=True)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    over_since: float | None = None
    beat, heard = b"", time.monotonic()
    while not stop.wait(0.5):
        # Whoever is there changes what the meeting's key says every second.
        if (now := store.compare_set(MEETING, "", "")) != beat:
            beat, heard = now, time.monotonic()
        if args.idle is not None and time.monotonic() - heard > args.idle:
            print(f"meshwright rendezvous: no machine was heard of for {args.idle:g} s", file=sys.stderr, flush=True)
            break
        if over_since is None and store.check([END]):
            over_since = time.monotonic()
        if over_since is not None and time.monotonic() - over_since > LINGER_S:
            break
    return 0
