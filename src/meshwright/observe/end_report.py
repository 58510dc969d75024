"""At the end of a run: report.html in its folder, and what came of it in a few lines on the console."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path

from meshwright.observe.line_writer import PERIOD_S
from meshwright.observe.report import summary
from meshwright.observe.view import RunView, View
from meshwright.observe.web.report import write_report
from meshwright.training.hooks import RETUNED, Hook
from meshwright.training.loop import TrainingLoop
from meshwright.training.run_folder import RunFolder

PATIENCE_S = 4 * PERIOD_S
"""Seconds that a report waits for lines of ranks that are still on their way to a file."""


class EndReport(Hook):
    """Writes the report on the first rank. First of the hooks, so that all others have had their say at the end."""

    def at_end(self, trainer: TrainingLoop) -> None:
        if trainer.world.is_first and trainer.worked and trainer.stop_reason != RETUNED:
            leave_report(trainer.job.folder, patience_s=PATIENCE_S)


def leave_report(folder: RunFolder, patience_s: float = 0.0) -> None:
    """Write the report of a run that is over, and print its lines; ranks have that long to write their last."""
    try:
        folder.check_generation()
        path, view = write_report(folder.path, view=_settled(folder.path, patience_s))
        lines = [*summary(view), f"the report is in {path}"]
    except Exception as error:
        # A training is worth more than its report.
        print(f"meshwright: the report could not be written: {error}", file=sys.stderr, flush=True)
        return
    with suppress(BrokenPipeError):
        print("\n".join(lines), flush=True)


def _settled(path: Path, patience_s: float) -> View:
    """The run once every rank whose file is seen here has its last step in it."""
    run, until = RunView(path), time.monotonic() + patience_s
    while True:
        view = run.refresh()
        ends = [rank.record.last["step"] for rank in view.ranks if rank.record.last is not None]
        if all(step >= view.step for step in ends) or time.monotonic() >= until:
            return view
        time.sleep(0.05)
