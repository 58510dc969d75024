"""A run that has saved before never starts from nothing by itself, and touches nobody else's checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.checkpoint.format import Manifest, read_manifest, write_manifest
from meshwright.errors import ExitCode
from tests.conftest import CommandLine

pytestmark = pytest.mark.slow


def forget_optimizer(folder: Path, kind: str | None) -> None:
    """Rewrite a manifest so that it agrees with itself, without a kind of optimizer state, or without any."""
    manifest = read_manifest(folder)
    start = "optimizer." if kind is None else f"optimizer.{kind}."
    tensors = {name: entry for name, entry in manifest.tensors.items() if not name.startswith(start)}
    rewrite(folder, manifest.model_copy(update={"tensors": tensors}))


def add_optimizer_state(folder: Path) -> None:
    """The same with a kind that no optimizer of ours keeps."""
    manifest = read_manifest(folder)
    more = {
        name.replace(".exp_avg.", ".evil_kind."): entry
        for name, entry in manifest.tensors.items()
        if name.startswith("optimizer.exp_avg.")
    }
    rewrite(folder, manifest.model_copy(update={"tensors": {**manifest.tensors, **more}}))


def rewrite(folder: Path, manifest: Manifest) -> None:
    (folder / "manifest.json").write_bytes(write_manifest(manifest))


def steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def run(meshwright: CommandLine, tiny_run: list[str], tmp_path: Path) -> Path:
    """One that is at step 4, with checkpoints of steps 2 and 4."""
    result = meshwright("train", *tiny_run, "run.dir=run", "train.steps=4", "checkpoint.every=2")
    assert result.returncode == 0, result.stderr
    return tmp_path / "run"


def no_folders(run: Path) -> list[str]:
    shutil.rmtree(run / "checkpoints")
    return []


def set_aside(run: Path) -> list[str]:
    for folder in (run / "checkpoints").iterdir():
        folder.rename(folder.with_name(f"{folder.name}.damaged-1"))
    return []


def elsewhere(run: Path) -> list[str]:
    return [f"checkpoint.dir={run.parent / 'elsewhere'}"]


@pytest.mark.parametrize("lose", [no_folders, set_aside, elsewhere])
def test_a_run_that_has_saved_does_not_start_from_nothing(
    meshwright: CommandLine, tiny_run: list[str], run: Path, lose: Callable[[Path], list[str]]
) -> None:
    settings = lose(run)
    result = meshwright("train", *tiny_run, "run.dir=run", "train.steps=6", "checkpoint.every=2", *settings)
    assert result.returncode == ExitCode.DAMAGED, result.stdout
    assert "this run has saved step 4" in result.stderr
    assert "Traceback" not in result.stderr
    assert steps(run) == [1, 2, 3, 4]


def test_a_run_that_had_no_checkpoint_yet_says_that_it_starts_again(
    meshwright: CommandLine, tiny_run: list[str], run: Path
) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "events.jsonl").unlink()
    result = meshwright("train", *tiny_run, "run.dir=run", "train.steps=4", "checkpoint.every=2")
    assert result.returncode == 0, result.stderr
    assert "the 4 steps that were done start again from the first" in result.stderr


def test_checkpoints_of_another_run_are_not_removed(
    meshwright: CommandLine, tiny_run: list[str], tmp_path: Path
) -> None:
    for name in ("one", "other"):
        settings = [f"run.dir={name}", f"checkpoint.dir={tmp_path}/{name}-kept", "train.steps=4", "checkpoint.every=2"]
        assert meshwright("train", *tiny_run, *settings).returncode == 0
    crash = {"windows": [], "count": 1, "past": 3, "removing": 2}
    (tmp_path / "other/rollbacks.json").write_text(json.dumps(crash))
    result = meshwright("train", *tiny_run, "run.dir=other", f"checkpoint.dir={tmp_path}/one-kept", "train.steps=6")
    assert result.returncode == ExitCode.BAD_INPUT, result.stdout
    assert "another run" in result.stderr
    assert sorted(path.name for path in (tmp_path / "one-kept").glob("step-*")) == ["step-000002", "step-000004"]


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda folder: forget_optimizer(folder, None), "lacks exp_avg of"),
        (lambda folder: forget_optimizer(folder, "exp_avg_sq"), "lacks exp_avg_sq of"),
        (add_optimizer_state, "does not keep"),
    ],
)
def test_state_that_the_optimizer_does_not_have_or_keep_is_an_error(
    meshwright: CommandLine, tiny_run: list[str], run: Path, spoil: Callable[[Path], None], expected: str
) -> None:
    spoil(run / "checkpoints/step-000004")
    result = meshwright("train", *tiny_run, "run.dir=run", "train.steps=6", "checkpoint.every=2")
    assert result.returncode == ExitCode.BAD_INPUT, result.stdout
    assert expected in result.stderr
    assert "Traceback" not in result.stderr
