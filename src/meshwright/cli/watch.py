"""Shows runs while they go on, or afterwards: on this terminal, or as a page for a browser on this machine.

On a terminal a picture that stays in place, ended by q or Ctrl-C; where there is no terminal, a line when there is
something new. With --web a page with curves, ranks, schedule, memory and events; several runs are laid over each other.
Nobody but this machine can reach it, unless --host says so; that needs a token in a file. Run folders are only read.

  meshwright watch runs/demo                                    the run as it goes on
  meshwright watch runs/demo --once                             one picture of it
  meshwright watch runs/demo --trace trace.json --steps 50:60   a timeline of all ranks for Perfetto
  meshwright watch runs/demo --web                              the page
"""

from __future__ import annotations

import argparse
from pathlib import Path

from meshwright.errors import UserError


def describe(parser: argparse.ArgumentParser) -> None:
    """What the command line takes."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder (run.dir of a training)")
    parser.add_argument("--once", action="store_true", help="print one picture and end")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write profiled steps as a trace-event file and end")
    parser.add_argument("--steps", metavar="A:B", help="with --trace: from step A to before B; either may be left out")
    parser.add_argument("--web", action="store_true", help="serve a page and say where it is")
    parser.add_argument("--port", type=int, default=0, help="port of the page (default: one that is free)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file with a token that browsers must send; needed with an address that other machines reach",
    )


def run(args: argparse.Namespace) -> int:
    """Show the runs until interrupted, or write a timeline."""
    folders = [existing_run(name) for name in args.runs]
    if args.web:
        return _serve(args, folders)
    if len(folders) > 1:
        raise UserError("several runs are shown together by the page only: say --web, or give one run")
    if args.trace is not None:
        from meshwright.observe.trace_file import write_trace

        print(write_trace(folders[0], args.trace, args.steps))
        return 0
    if args.steps is not None:
        raise UserError("--steps says which steps --trace writes; say --trace FILE, too")
    from meshwright.observe.terminal import watch

    return watch(folders[0], args.once)


def _serve(args: argparse.Namespace, folders: list[Path]) -> int:
    from meshwright.observe.view import RunView
    from meshwright.observe.web.server import serve
    from meshwright.secrets import read_token

    if not 0 <= args.port <= 65535:
        raise UserError(f"--port {args.port} is not a port; use 0 to 65535")
    token = read_token(str(args.token_file), "--token-file") if args.token_file is not None else None
    serve([RunView(folder) for folder in folders], args.host, args.port, token)
    return 0


def existing_run(name: str) -> Path:
    """A folder that a run may be in; one in which nothing is yet is waited for."""
    path = Path(name)
    if not path.is_dir():
        raise UserError(f"{path} is not a folder; give the run.dir of a training")
    if not any((path / known).exists() for known in (".lock", "config.toml", "metrics.jsonl", "events.jsonl")):
        raise UserError(f"{path} holds no run; give the run.dir of a training")
    return path
