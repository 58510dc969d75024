"""Shows runs while they go on: curves, ranks, schedule, memory and events, in a page for a browser on this machine.

The page only reads the run folder and changes nothing; it works on runs that are over, too. Several runs are laid over
each other. Nobody but this machine can reach it, unless --host says so; that needs a token in a file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from meshwright.errors import UserError


def describe(parser: argparse.ArgumentParser) -> None:
    """What the command line takes."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder (run.dir of a training)")
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
    """Show the runs until interrupted."""
    folders = [existing_run(name) for name in args.runs]
    if not args.web:
        raise UserError("say --web: the page is the only display that there is")
    from meshwright.observe.view import RunView
    from meshwright.observe.web.access import read_token
    from meshwright.observe.web.server import serve

    if not 0 <= args.port <= 65535:
        raise UserError(f"--port {args.port} is not a port; use 0 to 65535")
    token = read_token(args.token_file) if args.token_file is not None else None
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
