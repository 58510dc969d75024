"""Writes a run as one HTML file that needs nothing else: the page of `meshwright watch --web`, with the data in it.

Every training writes it to report.html in its run folder when it ends; this command writes it at any time, also of a
run that goes on or has failed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from meshwright.cli.watch import existing_run
from meshwright.errors import UserError


def describe(parser: argparse.ArgumentParser) -> None:
    """What the command line takes."""
    parser.add_argument("run", metavar="RUN", help="a run folder (run.dir of a training)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to (default: report.html in the run folder)")


def run(args: argparse.Namespace) -> int:
    """Write the file and say what it says."""
    from meshwright.observe.report import summary
    from meshwright.observe.web.report import write_report

    folder = existing_run(args.run)
    try:
        path, view = write_report(folder, args.out)
    except OSError as error:
        where = args.out or folder
        raise UserError(
            f"the report cannot be written to {where}: {error.strerror or error}; name another --out"
        ) from None
    for line in summary(view):
        print(line)
    print(f"the report is in {path}")
    return 0
