"""Several trainings one after the other, as one rank of a launcher's job: processes start once for all of them.

python -m tests.cluster.trainings RUNS SETTING...      RUNS is JSON: settings of each, which end in its run folder
"""

from __future__ import annotations

import json
import os
import sys

from meshwright.config import load_config
from meshwright.trainer import train


def main(runs: list[list[str]], settings: list[str]) -> None:
    """Train each; each meets at a port of its own, since stores of earlier ones may still be there."""
    port = int(os.environ["MASTER_PORT"])
    for number, own in enumerate(runs):
        os.environ["MASTER_PORT"] = str(port + 1000 * number)
        assert train(load_config(overrides=[*settings, *own])) == 0


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:])
