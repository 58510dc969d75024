"""Checkpoints in an object store: a real S3 server on this machine, and trainings that go on from it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import CommandLine

pytestmark = pytest.mark.slow


def keys(client: object, prefix: str) -> list[str]:
    found = client.list_objects_v2(Bucket="runs", Prefix=prefix).get("Contents", [])  # type: ignore[attr-defined]
    return [entry["Key"] for entry in found]


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_saves_to_s3_and_goes_on_from_there_on_another_number_of_ranks(
    bucket: object, meshwright: CommandLine, tiny_run: list[str], tmp_path: Path
) -> None:
    options = [*tiny_run, "run.dir=a", "checkpoint.dir=s3://runs/a", "train.precision=float64"]
    options.append("train.schedule=constant")
    stopped = meshwright("train", *options, "--nproc", 2, "checkpoint.every=2", "train.steps=4")
    assert stopped.returncode == 0, stopped.stderr
    assert not (tmp_path / "a/checkpoints").exists()
    assert {key.split("/")[1] for key in keys(bucket, "a/step")} == {"step-000002", "step-000004"}
    verified = meshwright("checkpoint", "verify", "s3://runs/a")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert verified.stdout.count("ok ") == 2
    resumed = meshwright("train", *options, "--nproc", 1, "train.steps=6")
    assert resumed.returncode == 0, resumed.stderr
    assert "from step 4" in resumed.stdout
    plain = [*options, "train.steps=6", "run.dir=b", "checkpoint.dir=b-checkpoints"]
    assert meshwright("train", *plain).returncode == 0
    for expected, found in zip(metrics(tmp_path / "b"), metrics(tmp_path / "a"), strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-12)
    listed = meshwright("checkpoint", "ls", "a")
    assert "verified" in listed.stdout

    # Damage is found there as it is on a disk.
    name = next(key for key in keys(bucket, "a/") if key.startswith("a/step-000006/model"))
    body = bytearray(bucket.get_object(Bucket="runs", Key=name)["Body"].read())  # type: ignore[attr-defined]
    body[-5] ^= 1
    bucket.put_object(Bucket="runs", Key=name, Body=bytes(body))  # type: ignore[attr-defined]
    damaged = meshwright("checkpoint", "verify", "a")
    assert damaged.returncode == 1
    assert name.split("/")[-1] in damaged.stdout


def test_a_run_whose_store_is_away_says_so_and_goes_on_once_it_is_back(
    bucket: object, meshwright: CommandLine, tiny_run: list[str]
) -> None:
    options = [*tiny_run, "run.dir=a", "checkpoint.dir=s3://runs/c", "train.schedule=constant"]
    stopped = meshwright("train", *options, "checkpoint.every=2", "train.steps=4")
    assert stopped.returncode == 0, stopped.stderr
    before = keys(bucket, "c/")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{listener.getsockname()[1]}"
    away = meshwright("train", *options, AWS_ENDPOINT_URL=nobody, AWS_MAX_ATTEMPTS="1")
    assert away.returncode == 2, away.stderr
    assert "s3://runs/c cannot be used" in away.stderr
    assert "damaged" not in away.stderr
    assert keys(bucket, "c/") == before
    back = meshwright("train", *options)
    assert back.returncode == 0, back.stderr
    assert "from step 4" in back.stdout


def test_uploads_without_a_manifest_are_no_checkpoint_and_are_cleared_away(bucket: object) -> None:
    bucket.put_object(Bucket="runs", Key="b/step-000003/model-00000.safetensors", Body=b"half")  # type: ignore[attr-defined]
    program = "from meshwright.checkpoint.place import open_place; open_place('s3://runs/b').clear_unfinished()"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    assert keys(bucket, "b/") == []
