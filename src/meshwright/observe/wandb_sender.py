"""Sends metrics to Weights & Biases: a process of its own, which takes JSON lines from its input.

The wandb package waits for its service when a process ends, and when it starts. A process that can be ended keeps all
of that away from the training. The first line are the arguments of `wandb.init`, each other one is [step, values]; the
last is whether the run was completed. At the end of the input it finishes, within a limit.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from meshwright.secrets import Secrets, guarded_output

FINISH_S = 60
"""How long it may take to finish once its parent is gone; a parent that is there has less patience."""


def main() -> None:
    """Send what comes in until it ends."""
    # Whoever stops a job stops the training, which tells when it is over.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    import wandb

    settings = wandb.Settings(
        # Command line, console and code may hold what is nobody's business; metrics and settings are what is sent.
        console="off",
        disable_git=True,
        save_code=False,
        x_disable_meta=True,
    )
    arguments: dict[str, Any] = json.loads(sys.stdin.readline())
    run = wandb.init(**arguments, settings=settings)
    completed = False
    for line in sys.stdin:
        message = json.loads(line)
        if isinstance(message, bool):
            completed = message
            break
        step, values = message
        run.log(values, step=step)
    signal.alarm(FINISH_S)
    run.finish(exit_code=0 if completed else 1)


if __name__ == "__main__":
    with guarded_output(Secrets.known()):
        main()
        sys.stdout.flush()
    # What wandb does when Python ends is done.
    os._exit(0)
