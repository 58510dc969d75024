"""At the end of a run: report.html in its folder, and what came of it in five lines on the console."""

from __future__ import annotations

import sys
from contextlib import suppress

from meshwright.observe.report import summary
from meshwright.observe.web.report import write_report
from meshwright.training.hooks import RETUNED, Hook
from meshwright.training.loop import TrainingLoop


class EndReport(Hook):
    """Writes the report on the first rank. First of the hooks, so that all others have had their say at the end."""

    def at_end(self, trainer: TrainingLoop) -> None:
        if not trainer.world.is_first or not trainer.worked or trainer.stop_reason == RETUNED:
            return
        try:
            trainer.job.folder.check_generation()
            path, view = write_report(trainer.job.folder.path)
            lines = [*summary(view), f"the report is in {path}"]
        except Exception as error:
            # A training is worth more than its report.
            print(f"meshwright: the report could not be written: {error}", file=sys.stderr, flush=True)
            return
        with suppress(BrokenPipeError):
            print("\n".join(lines), flush=True)
