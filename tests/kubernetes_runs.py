"""Runs for launching on Kubernetes, planned for real, and what is written for them."""

from __future__ import annotations

import argparse
from functools import cache
from typing import Any

import yaml

from meshwright.cli import launch
from meshwright.config_load import resolve_config
from meshwright.launch.kubernetes.cluster import TARGET
from meshwright.launch.submission import Submission, prepare

VOLUME = ("--volume", "work=pvc:training:/training")


def arguments(*words: str) -> argparse.Namespace:
    """The command line, as `meshwright launch --on kubernetes` reads it."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    launch.describe(parser)
    return parser.parse_args(["--on", "kubernetes", "--image", "registry.example.com/team/meshwright:1.2", *words])


@cache
def submission(nodes: str = "2", gpus: int = 0, name: str = "tiny-run", *overrides: str) -> Submission:
    """A tiny run with a named strategy, on so many machines."""
    settings = [
        "run.dir=runs/tiny",
        "data.path=data/packed",
        "model.preset=tiny",
        "parallel.strategy=zero=1",
        *overrides,
    ]
    args = arguments("--nodes", nodes, "--gpus-per-node", str(gpus))
    config = resolve_config(None, [*settings, "train.global_batch=96", *overrides]).config
    return prepare(config, launch._machines(args), "h100" if gpus else "cpu", name, {"NCCL_DEBUG": "WARN"})


def written(args: argparse.Namespace, run: Submission) -> dict[str, dict[str, Any]]:
    """The objects that would be submitted, by file."""
    files = TARGET.files(run, args)
    return {name: yaml.safe_load(text) for name, text in files.items() if name.endswith(".yaml")}


def job_of(args: argparse.Namespace, run: Submission) -> dict[str, Any]:
    """The last object: the job."""
    return list(written(args, run).values())[-1]
