"""Kills ranks, and now and then the launcher, at random moments; then the run must be the one that nobody disturbed.

    python -m tests.chaos.killer --kills 200 --seed 1

The seed decides who is killed and after how many steps, so that a run that went wrong can be tried again.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from meshwright.data.prepare import prepare
from meshwright.errors import ExitCode
from meshwright.observe.ledger import account
from tests.chaos.conftest import SETTINGS
from tests.chaos.runs import Training, assert_same_run, checkpoints, events, last_step, losses, start
from tests.conftest import write_text

STEPS_A_KILL = 6


def run_with_kills(folder: Path, settings: list[str], kills: int, seed: int) -> Path:
    """A run that is killed that often and reaches its end; gives its folder."""
    draw = random.Random(seed)
    options = [
        f"train.steps={STEPS_A_KILL * kills}",
        "checkpoint.every=2",
        "checkpoint.background=true",
        "elastic.max_restarts=100000",
        # Kills may hit the same step again and again by chance.
        "elastic.same_step_failures=1000",
        "observe.log_every=1000",
        "observe.ledger=true",
    ]
    output = (folder / "output.txt").open("w")
    training = start(folder, settings, *options, name="killed", output=output)
    launchers = 0
    for number in range(kills):
        base = checkpoints(training.folder)[-1] if checkpoints(training.folder) else 0
        wanted = base + draw.randint(1, 4)
        if draw.random() < 0.5:
            # Else a run whose saves take longer than its steps would be killed for ever before the first is done.
            training.wait_for(lambda run=training, base=base: checkpoints(run.folder)[-1:] > [base], "save", 120)
        else:
            training.wait_for_step(wanted, 120)
        time.sleep(draw.random() * 0.15)
        choice, who = draw.random(), draw.randrange(2)
        if choice < 0.05:
            launchers += 1
            training.launcher.kill()
            training.process.wait()
            training = start(folder, settings, *options, name="killed", output=output)
        else:
            # All ranks, or one of them: whichever generation is there.
            kill_some(training, [0, 1] if choice < 0.2 else [who])
        if (number + 1) % 20 == 0:
            print(f"{number + 1} kills, step {last_step(training.folder)}", flush=True)
    ended = training.wait(600)
    assert ended.code == ExitCode.DONE, (folder / "output.txt").read_text()[-4000:]
    restarts = events(training.folder, "restarted")
    failures = events(training.folder, "failed")
    times = sorted(line["restart_s"] for line in restarts)
    print(
        f"{kills} kills, {launchers} of them of the launcher: {len(failures)} failures noticed, "
        f"{len(restarts)} restarts that came to a new step, "
        f"median {times[len(times) // 2]:.2f} s and at most {times[-1]:.2f} s to the first new step, "
        f"{sum(line['steps_lost'] for line in restarts)} steps done again"
        if times
        else f"{kills} kills"
    )
    return training.folder


def kill_some(training: Training, numbers: list[int]) -> None:
    """Kill these ranks, as soon as they are there."""
    deadline = time.monotonic() + 60
    while True:
        ranks = training.ranks()
        if set(numbers) <= ranks.keys():
            with suppress(psutil.NoSuchProcess):
                for number in numbers:
                    ranks[number].kill()
                return
        assert time.monotonic() < deadline, f"no ranks {numbers}"
        time.sleep(0.01)


def undisturbed_run(folder: Path, settings: list[str], kills: int) -> Path:
    """The same run without kills."""
    options = [f"train.steps={STEPS_A_KILL * kills}", "checkpoint.every=1000"]
    options += ["observe.log_every=1000", "observe.ledger=true"]
    training: Training = start(folder, settings, *options, name="undisturbed")
    ended = training.wait(600)
    assert ended.code == ExitCode.DONE, ended.err
    return training.folder


def assert_same_samples(found: Path, expected: Path) -> None:
    """Every step was fed the samples that it would have been fed, and none was lost or repeated."""
    killed, whole = account(found), account(expected)
    assert not killed.problems, killed.problems[:5]
    assert killed.steps == whole.steps


def main() -> int:
    """Kill, compare, say how it went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(3):
            write_text(folder / "text" / f"{number}.txt", 20_000, seed=number)
        prepare([folder / "text"], folder / "packed", "bytes", workers=1)
        settings = [*SETTINGS, f"data.path={folder / 'packed'}"]
        expected = undisturbed_run(folder, settings, args.kills)
        found = run_with_kills(folder, settings, args.kills, args.seed)
        assert_same_run(found, expected)
        assert_same_samples(found, expected)
        print(f"{len(losses(found))} steps, each recorded once; losses and weights are those of the undisturbed run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
