"""Trains on the Ray at RAY_ADDRESS through the Python form, and prints what Ray has of it as JSON.

python -m tests.cluster.ray_fit MIN MAX STORAGE SETTING...
"""

from __future__ import annotations

import json
import sys
from typing import Any

import ray
from ray.train import UserCallback

from meshwright.config_load import resolve_config
from meshwright.launch.ray import fit
from meshwright.launch.ray_driver import Workers


class Steps(UserCallback):
    """What the first rank has reported."""

    def __init__(self, file: str) -> None:
        self.file = file

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        with open(self.file, "a", encoding="utf-8") as file:
            file.write(json.dumps({**metrics[0], "workers": len(metrics), "saved": checkpoint is not None}) + "\n")


def main(least: str, most: str, storage: str, *settings: str) -> None:
    """Train."""
    ray.init(log_to_driver=True)
    config = resolve_config(None, list(settings)).config
    workers = Workers(int(least), int(most), look_s=2.0)
    result = fit(config, workers, storage_path=storage, callbacks=[Steps(f"{config.run.dir}.reports")])
    kept = [[checkpoint.path, metrics] for checkpoint, metrics in result.best_checkpoints]
    found = {"metrics": result.metrics, "path": result.path, "checkpoint": result.checkpoint.path, "kept": kept}
    print("RESULT " + json.dumps(found), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
