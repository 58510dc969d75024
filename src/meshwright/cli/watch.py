"""Show a run from its folder, while it goes on or afterwards.

On a terminal a picture that stays in place, ended by q or Ctrl-C; elsewhere a line when there is something new.

  meshwright watch runs/demo                                    the run as it goes on
  meshwright watch runs/demo --once                             one picture of it
  meshwright watch runs/demo --trace trace.json --steps 50:60   a timeline of all ranks for Perfetto
"""

from __future__ import annotations

import argparse
from pathlib import Path


def describe(parser: argparse.ArgumentParser) -> None:
    """The arguments of `meshwright watch`."""
    parser.add_argument("run", metavar="RUN", help="the folder of a run")
    parser.add_argument("--once", action="store_true", help="print one picture and end")
    parser.add_argument("--trace", metavar="FILE", help="write the spans of all ranks as a trace-event file and end")
    parser.add_argument(
        "--steps", metavar="A:B", help="with --trace: the steps from A to before B; either may be left out"
    )


def run(args: argparse.Namespace) -> int:
    """Show the run, or write its timeline."""
    # Only what is asked for is imported.
    if args.trace is not None:
        from meshwright.observe.trace_file import write_trace

        print(write_trace(Path(args.run), Path(args.trace), args.steps))
        return 0
    from meshwright.observe.terminal import watch

    return watch(Path(args.run), args.once)
