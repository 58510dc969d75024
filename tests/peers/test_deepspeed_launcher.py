"""DeepSpeed's own launcher starts ranks of ours."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.trainings import metrics
from tests.ports import free_ports


@pytest.mark.parametrize("more", [[], ["--no_local_rank"]])
def test_its_launcher_starts_a_run(more: list[str], tiny_run: list[str], tmp_path: Path) -> None:
    world = base64.urlsafe_b64encode(json.dumps({"localhost": [0, 1]}).encode()).decode()
    meeting = ["--master_addr=127.0.0.1", f"--master_port={free_ports(1)[0]}"]
    launcher = [sys.executable, "-m", "deepspeed.launcher.launch", f"--world_info={world}", *meeting, *more]
    command = [*launcher, "--module", "meshwright", "train", *tiny_run, "run.dir=run"]
    place = os.environ | {"DS_ACCELERATOR": "cpu"}
    ended = subprocess.run(command, cwd=tmp_path, env=place, capture_output=True, text=True, timeout=180, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "2 processes over gloo" in ended.stdout
    assert len(metrics(tmp_path / "run")) == 6
