"""The commands that look after checkpoints, as a user gives them: on the checkpoints of one short training."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meshwright.checkpoint.load_model import load_model
from meshwright.checkpoint.reader import load_whole
from tests.conftest import CommandLine


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("trained")
    options = ["model.preset=tiny", "model.spec.num_hidden_layers=1", f"data.path={corpus}", "data.sequence_length=32"]
    options += ["train.steps=6", "train.global_batch=4", "train.lr=1e-2", "checkpoint.every=2", "checkpoint.keep=9"]
    command = [sys.executable, "-m", "meshwright", "train", *options, "run.dir=run"]
    result = subprocess.run(
        [*command, "train.eval_sequences=4", "checkpoint.background=false"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of that run, to do harm to."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def steps(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))


def flip_a_byte(run: Path, step: int) -> Path:
    path = run / f"checkpoints/step-{step:06d}/model-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    return path


def test_ls_says_what_there_is(meshwright: CommandLine, run: Path) -> None:
    rows = json.loads(meshwright("checkpoint", "ls", run, "--json").stdout)
    assert [(row["step"], row["state"], row["ranks"]) for row in rows] == [(step, "verified", 1) for step in (2, 4, 6)]
    assert all(row["bytes"] > 0 and row["loss"] > 0 and row["saved_at"] > 0 for row in rows)
    shown = meshwright("checkpoint", "ls", run).stdout.splitlines()
    assert [line.split()[0] for line in shown] == ["step", "2", "4", "6"]


def test_verify_names_what_is_damaged_and_ls_remembers_it(meshwright: CommandLine, run: Path) -> None:
    sound = meshwright("checkpoint", "verify", run)
    assert (sound.returncode, sound.stdout.count("ok ")) == (0, 3)
    path = flip_a_byte(run, 4)
    found = meshwright("checkpoint", "verify", run)
    assert found.returncode == 1
    assert found.stdout.count("ok ") == 2
    assert re.search(rf"DAMAGED +{path} is damaged: .*\(tensor model\.", found.stdout)
    assert "1 of 3 checkpoints damaged" in found.stderr
    states = [row["state"] for row in json.loads(meshwright("checkpoint", "ls", run, "--json").stdout)]
    assert states == ["verified", "damaged", "verified"]


def test_diff_of_a_checkpoint_with_its_copy_finds_nothing(meshwright: CommandLine, run: Path, trained: Path) -> None:
    result = meshwright("checkpoint", "diff", run, trained)
    assert result.returncode == 0, result.stderr
    count = len(load_whole(trained / "checkpoints/step-000006"))
    assert result.stdout == f"all {count} tensors are the same, bit for bit\n"


def test_diff_measures_what_differs(meshwright: CommandLine, run: Path) -> None:
    one, other = (run / f"checkpoints/step-{step:06d}" for step in (2, 6))
    result = meshwright("checkpoint", "diff", one, other, "--only", "model.")
    assert result.returncode == 1, result.stderr
    assert "step: 2  |  6" in result.stdout
    assert "optimizer." not in result.stdout
    here, there = load_whole(one, "model."), load_whole(other, "model.")
    differing = [name for name in here if not here[name].equal(there[name])]
    assert result.stdout.splitlines()[-1] == f"{len(differing)} tensors differ"
    name = "model.model.embed_tokens.weight"
    a, b = here[name].double(), there[name].double()
    elements, largest = int((a != b).sum()), float((a - b).abs().max())
    relative = float((a - b).norm() / a.norm())
    expected = f"{name}: {elements:,} of {a.numel():,} elements, largest {largest:.3g}, relative {relative:.3g}"
    assert expected in result.stdout.splitlines()


def test_export_and_import_bring_the_weights_back_bit_for_bit(
    meshwright: CommandLine, run: Path, tmp_path: Path
) -> None:
    exported = meshwright("checkpoint", "export", run, "--hf", "hf")
    assert exported.returncode == 0, exported.stderr
    assert "with its tokenizer" in exported.stdout
    imported = meshwright("checkpoint", "import", "--hf", "hf", "--out", "again")
    assert imported.returncode == 0, imported.stderr
    assert "again/step-000000: written and verified" in imported.stdout
    result = meshwright("checkpoint", "diff", run, "again", "--only", "model.")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "the same, bit for bit" in result.stdout
    before, after = load_whole(run / "checkpoints/step-000006", "model."), load_whole(tmp_path / "again/step-000000")
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)
    # A folder with something in it is not written over.
    assert meshwright("checkpoint", "export", run, "--hf", "hf").returncode == 2


def test_export_in_another_type(meshwright: CommandLine, run: Path, tmp_path: Path) -> None:
    exported = meshwright("checkpoint", "export", run, "--hf", "hf", "--dtype", "bfloat16")
    assert exported.returncode == 0, exported.stderr
    ours, theirs = load_model(run).state_dict(), load_model(tmp_path / "hf").state_dict()
    assert all(theirs[name].equal(ours[name].to(torch.bfloat16)) for name in ours)


def test_prune_removes_what_need_not_stay(meshwright: CommandLine, run: Path) -> None:
    tried = meshwright("checkpoint", "prune", run, "--keep", 1, "--keep-every", 4, "--dry-run")
    assert (tried.returncode, tried.stdout, steps(run)) == (0, "would remove: 2\n", [2, 4, 6])
    done = meshwright("checkpoint", "prune", run, "--keep", 1, "--keep-every", 4)
    assert (done.returncode, done.stdout, steps(run)) == (0, "removed: 2\n", [4, 6])
    assert meshwright("checkpoint", "verify", run).returncode == 0
    none = meshwright("checkpoint", "prune", run, "--keep", 0)
    assert (none.returncode, steps(run)) == (2, [4, 6])


def test_prune_reads_again_what_was_once_found_whole(meshwright: CommandLine, run: Path) -> None:
    path = flip_a_byte(run, 6)
    done = meshwright("checkpoint", "prune", run, "--keep", 1)
    # The one before takes the place of the damaged one.
    assert (done.returncode, done.stdout, steps(run)) == (1, "removed: 2\n", [4, 6])
    assert str(path) in done.stderr


def test_prune_removes_nothing_while_all_that_would_stay_is_damaged(meshwright: CommandLine, run: Path) -> None:
    paths = [flip_a_byte(run, step) for step in (4, 6)]
    done = meshwright("checkpoint", "prune", run, "--keep", 1)
    assert (done.returncode, done.stdout, steps(run)) == (1, "removed: none\n", [2, 4, 6])
    assert all(str(path) in done.stderr for path in paths)


@pytest.mark.parametrize("action", ["ls", "verify", "prune"])
def test_a_file_is_no_folder_of_checkpoints(meshwright: CommandLine, tmp_path: Path, action: str) -> None:
    (tmp_path / "file.txt").write_text("words")
    result = meshwright("checkpoint", action, "file.txt")
    assert result.returncode == 2
    assert result.stderr == f"meshwright checkpoint {action}: file.txt is not a folder\n"


def test_one_that_cannot_be_looked_into_does_not_hide_the_others(
    meshwright: CommandLine, run: Path, trained: Path
) -> None:
    linked = run / "checkpoints/step-000004"
    shutil.rmtree(linked)
    linked.symlink_to(trained / "checkpoints/step-000004")
    (run / "checkpoints/step-000005").write_text("no folder")
    result = meshwright("checkpoint", "verify", run)
    assert result.returncode == 1, result.stderr
    assert result.stdout.count("ok ") == 2
    assert f"DAMAGED  {linked} is a link" in result.stdout
    assert "step-000005 is not a checkpoint" in result.stdout
    assert "2 of 4 checkpoints damaged" in result.stderr
    rows = json.loads(meshwright("checkpoint", "ls", run, "--json").stdout)
    assert [row["step"] for row in rows] == [2, None, 6, None]
    assert [row["state"] for row in rows] == ["verified", "damaged", "verified", "damaged"]


def test_verify_finds_a_checkpoint_under_the_name_of_another_step(meshwright: CommandLine, run: Path) -> None:
    (run / "checkpoints/step-000006").rename(run / "checkpoints/step-000008")
    result = meshwright("checkpoint", "verify", run)
    assert result.returncode == 1, result.stderr
    assert "manifest.json is that of step 6, in the folder of step 8" in result.stdout
    assert result.stdout.count("ok ") == 2
