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

from meshwright.errors import ConfigError, UserError


def describe(parser: argparse.ArgumentParser) -> None:
    """What the command line takes."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder (run.dir of a training)")
    parser.add_argument("--once", action="store_true", help="print one picture and end")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write profiled steps as a trace-event file and end")
    parser.add_argument("--steps", metavar="A:B", help="with --trace: from step A to step B; either may be left out")
    parser.add_argument("--web", action="store_true", help="serve a page and say where it is")
    parser.add_argument("--port", type=int, help="with --web: port of the page (default: one that is free)")
    parser.add_argument("--host", help="with --web: address to listen on (default: 127.0.0.1)")
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="with --web: file with a token that browsers must send; needed with an address that other machines reach",
    )


def run(args: argparse.Namespace) -> int:
    """Show the runs until interrupted, or write a timeline."""
    _check_options(args)
    folders = [existing_run(name) for name in args.runs]
    if args.web:
        return _serve(args, folders)
    if len(folders) > 1:
        raise UserError("several runs are shown together by the page only: say --web, or give one run")
    if args.trace is not None:
        from meshwright.observe.trace_file import write_trace

        print(write_trace(folders[0], args.trace, args.steps))
        return 0
    from meshwright.observe.terminal import watch

    return watch(folders[0], args.once)


def _check_options(args: argparse.Namespace) -> None:
    """Refuse options that would do nothing beside the others."""
    ways = [way for way, asked in (("--web", args.web), ("--trace", args.trace), ("--once", args.once)) if asked]
    if len(ways) > 1:
        raise ConfigError(f"{ways[0]} and {ways[1]} are two ways to look at a run; give one of them")
    if args.steps is not None and args.trace is None:
        raise ConfigError("--steps says which steps --trace writes; say --trace FILE, too")
    of_page = {"--port": args.port, "--host": args.host, "--token-file": args.token_file}
    given = [option for option, value in of_page.items() if value is not None]
    if given and not args.web:
        raise ConfigError(f"{given[0]} says how the page is served; say --web, too, or leave it out")


def _serve(args: argparse.Namespace, folders: list[Path]) -> int:
    from meshwright.observe.view import RunView
    from meshwright.observe.web.server import serve
    from meshwright.secrets import read_token

    port = args.port if args.port is not None else 0
    if not 0 <= port <= 65535:
        raise UserError(f"--port {port} is not a port; use 0 to 65535")
    token = read_token(str(args.token_file), "--token-file") if args.token_file is not None else None
    host = args.host if args.host is not None else "127.0.0.1"
    different = {folder.resolve(): folder for folder in folders}
    serve([RunView(folder) for folder in different.values()], host, port, token)
    return 0


def existing_run(name: str) -> Path:
    """A folder that holds a run, be it one that has only begun; others are refused."""
    path = Path(name)
    if not path.is_dir():
        raise UserError(f"{path} is not a folder; give the run.dir of a training")
    if not any((path / known).exists() for known in (".lock", "config.toml", "metrics.jsonl", "events.jsonl")):
        raise UserError(f"{path} holds no run; give the run.dir of a training")
    return path
