"""Secrets stay where they are: canaries in every place that holds one, and every byte that a run leaves looked at."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.conftest import CommandLine
from tests.e2e.test_exporters import events, served, training, until

pytestmark = pytest.mark.slow

CANARY = "canary7Q"
"""Part of every planted value, so that one search finds them all."""
VARIABLES = {
    "WANDB_API_KEY": f"{CANARY}wandb" + "0" * 27,
    "HF_TOKEN": f"hf_{CANARY}token",
    "AWS_SESSION_TOKEN": f"{CANARY}session",
    "MLFLOW_TRACKING_PASSWORD": f"{CANARY}password",
    "MLFLOW_TRACKING_URI": f"http://someone:{CANARY}tracking@127.0.0.1:9/",
}
PLACE = f"s3://AKIA{CANARY}KEYID:{CANARY}%2Fsecret@runs/a"


def leaks(root: Path, *texts: str) -> list[str]:
    """Where a canary is found: files below a folder, and texts."""

    def content(path: Path) -> bytes:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()

    found = [str(path) for path in root.rglob("*") if path.is_file() and CANARY.encode() in content(path)]
    found += [str(path) for path in root.rglob("*") if CANARY in path.name]
    return found + [text for text in texts if CANARY in text]


@pytest.fixture
def planted(bucket: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Settings of a run whose store, exporters and environment have canaries; the store's login is in its URL alone."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    home = tmp_path.parent / f"{tmp_path.name}-home"
    home.mkdir()
    for name, value in {
        **VARIABLES,
        "WANDB_MODE": "offline",
        "AWS_EC2_METADATA_DISABLED": "true",
        "HOME": str(home),
    }.items():
        monkeypatch.setenv(name, value)
    (home / "token").touch(0o600)
    (home / "token").write_text(f"{CANARY}-bearer-token\n")
    file = home / "run.toml"
    file.write_text(f'[checkpoint]\ndir = "{PLACE}"\nevery = 2\nbackground = false\n')
    return [
        str(file),
        "run.dir=a",
        "observe.wandb=true",
        "observe.prometheus=:0",
        "observe.profile_steps=1:2",
        f"observe.prometheus_token_file={home / 'token'}",
    ]


def test_no_secret_is_in_what_a_run_leaves_or_serves_and_it_goes_on(
    planted: list[str], meshwright: CommandLine, tiny_run: list[str], tmp_path: Path
) -> None:
    options = [*planted, *tiny_run]
    explained = meshwright("train", *options, "--explain")
    wrong = meshwright("train", *options, f"checkpoint.every={PLACE}")
    assert wrong.returncode == 2
    assert "checkpoint.every = 's3://***@runs/a'" in wrong.stderr
    # A rank that fails on the way: its error is told, and the run goes on from the store.
    first = meshwright("train", *options, MESHWRIGHT_FAULT="step=4,phase=backward,kind=raise")
    assert first.returncode == 0, first.stderr
    assert "InjectedError: injected fault raise" in first.stderr
    assert len(events(tmp_path / "a", "failed")) == 1
    assert 'dir = "s3://runs/a"' in (tmp_path / "a/config.toml").read_text()
    assert list((tmp_path / "a/profile").glob("*.trace.json.gz"))
    assert list((tmp_path / "a/wandb").glob("offline-run-*/*.wandb"))
    # Without the login, which the run folder does not have, nobody gets in.
    refused, listed = meshwright("checkpoint", "ls", "a"), meshwright("checkpoint", "ls", PLACE)
    assert refused.returncode == 2
    assert "s3://runs/a cannot be used" in refused.stderr
    assert "verified" in listed.stdout
    (tmp_path / "a/events.jsonl").unlink()
    # Now the login is on the command line, which services would like to know.
    with training(tmp_path, *options, f"checkpoint.dir={PLACE}") as process:
        url = served(tmp_path / "a", process)
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {CANARY}-bearer-token"})

        def scraped() -> str:
            with urllib.request.urlopen(request, timeout=10) as answer:
                text = str(answer.read().decode())
            return text if "meshwright_loss" in text else ""

        metrics = until(scraped, process)
    assert "from step 6 to step 1000000" in (tmp_path / "said.txt").read_text()
    said = [text for run in (explained, first, refused, listed, wrong) for text in (run.stdout, run.stderr)]
    assert not leaks(tmp_path, metrics, *said)


def test_no_secret_is_in_the_traceback_of_our_own_mistake(tmp_path: Path) -> None:
    # Something that no check foresees, with a secret in its words.
    code = (
        "import sys, meshwright.cli.models as models, meshwright.cli.main as main\n"
        "def run(args): raise LookupError('cannot open http://me:%s@host/x with %s' % (sys.argv[1], sys.argv[2]))\n"
        "models.run = run\n"
        "sys.exit(main.main(['models']))\n"
    )
    environment = {**os.environ, "SOME_API_KEY": f"{CANARY}-key"}
    command = [sys.executable, "-c", code, f"{CANARY}-x", f"{CANARY}-key"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert "LookupError: cannot open http://***@host/x with ***" in result.stderr
    assert CANARY not in result.stdout + result.stderr


def test_events_lose_secrets_and_nothing_else(tmp_path: Path) -> None:
    from meshwright.secrets import Secrets
    from meshwright.training.run_folder import RunFolder

    secrets = Secrets.known({"dir": "s3://me:pass%2Fword-x@bucket"}, ["token-in-a-file"], {"MY_TOKEN": "0123456789"})
    folder = RunFolder(tmp_path, secrets)
    facts = {"text": "pass/word-x of https://host:80/a@b, 0123456789 and 01234", "list": ["token-in-a-file", 5]}
    folder.event("failed", **facts)
    (line,) = map(json.loads, folder.events.read_text().splitlines())
    assert line["text"] == "*** of https://host:80/a@b, *** and 01234"
    assert line["list"] == ["***", 5]
