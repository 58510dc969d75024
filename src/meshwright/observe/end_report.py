"""At the end of a run: report.html in its folder, and what came of it in a few lines on the console."""

from __future__ import annotations

import sys
from contextlib import suppress

from meshwright.observe.report import summary
from meshwright.observe.web.report import write_report
from meshwright.training.hooks import RETUNED, Hook
from meshwright.training.loop import TrainingLoop
from meshwright.training.run_folder import RunFolder


class EndReport(Hook):
    """Writes the report on the first rank. First of the hooks, so that all others have had their say at the end."""

    def at_end(self, trainer: TrainingLoop) -> None:
        if trainer.world.is_first and trainer.worked and trainer.stop_reason != RETUNED:
            leave_report(trainer.job.folder)


def leave_report(folder: RunFolder) -> None:
    """Write the report of a run that is over, and print its lines."""
    try:
        folder.check_generation()
        path, view = write_report(folder.path)
        lines = [*summary(view), f"the report is in {path}"]
    except Exception as error:
        # A training is worth more than its report.
        print(f"meshwright: the report could not be written: {error}", file=sys.stderr, flush=True)
        return
    with suppress(BrokenPipeError):
        print("\n".join(lines), flush=True)
