"""An object store that does not answer is told in words, and is no damage."""

from __future__ import annotations

import socket

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from meshwright.checkpoint.checked import find_damage
from meshwright.checkpoint.marks import verified_at
from meshwright.checkpoint.pieces import Held
from meshwright.checkpoint.place import open_place, own_place
from meshwright.checkpoint.reader import CheckpointReader, load_parts
from meshwright.checkpoint.retention import Retention, doomed_after_reading, known_checkpoints
from meshwright.checkpoint.saver import Saver
from meshwright.errors import StoreError
from meshwright.parallel.exchange import Exchange
from tests.conftest import CommandLine
from tests.unit.checkpoints import facts


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> str:
    """An address of this machine where nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    for name, value in {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    return address


@pytest.mark.parametrize("action", ["ls", "verify", "prune"])
def test_commands_name_the_store_and_what_to_check(meshwright: CommandLine, nobody: str, action: str) -> None:
    result = meshwright("checkpoint", action, "s3://runs/a")
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    for word in ("s3://runs/a cannot be used", nobody, "AWS_ENDPOINT_URL", "credentials", "network"):
        assert word in result.stderr


def test_training_does_not_begin_without_its_store(meshwright: CommandLine, tiny_run: list[str], nobody: str) -> None:
    result = meshwright("train", *tiny_run, "run.dir=a", "checkpoint.dir=s3://runs/a")
    assert result.returncode == 2, result.stderr
    assert "s3://runs/a cannot be used" in result.stderr
    assert nobody in result.stderr


def test_a_store_that_goes_away_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    place = open_place("memory://away/checkpoints")
    own_place(place, "a-run")
    saver = Saver(place, Exchange(None), Retention())
    parts = {"model.x": Held.of(torch.randn(4))}
    saver.save(facts(3), parts, background=False)
    (outcome,) = saver.outcomes()
    assert outcome.error is None
    folder = place.child("step-000003")
    assert verified_at(folder) is not None
    assert find_damage(folder) == []

    def cut_off(*_: object, **__: object) -> None:
        raise OSError("connection reset")

    # The manifest still comes, the tensors do not; then nothing does.
    fetch = MemoryFileSystem.cat_file
    with monkeypatch.context() as patch:
        patch.setattr(
            MemoryFileSystem,
            "cat_file",
            lambda self, path, **bounds: (fetch if path.endswith(".json") else cut_off)(self, path, **bounds),
        )
        with pytest.raises(StoreError, match="connection reset"):
            find_damage(folder)
        with pytest.raises(StoreError, match="memory://away/checkpoints/step-000003 cannot be used"):
            load_parts(CheckpointReader(folder), parts)
        patch.setattr(MemoryFileSystem, "cat_file", cut_off)
        for ask in (
            lambda: find_damage(folder),
            lambda: verified_at(folder),
            lambda: known_checkpoints(place),
            lambda: own_place(place, "a-run"),
            lambda: doomed_after_reading(place, Retention()),
        ):
            with pytest.raises(StoreError, match="connection reset"):
                ask()
    assert "damaged.json" not in folder.names()
    assert find_damage(folder) == []


def test_a_save_that_cannot_be_read_again_is_neither_verified_nor_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    place = open_place("memory://unseen/checkpoints")
    own_place(place, "a-run")
    saver = Saver(place, Exchange(None), Retention(last=1))
    parts = {"model.x": Held.of(torch.randn(4))}
    saver.save(facts(3), parts, background=False)

    def cut_off(*_: object, **__: object) -> None:
        raise OSError("connection reset")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "cat_file", cut_off)
        saver.save(facts(6), parts, background=False)
    first, second = saver.outcomes()
    assert first.unseen is None
    assert second.error is None
    assert second.damage == ()
    assert "connection reset" in (second.unseen or "")
    folder = place.child("step-000006")
    assert not {"verified.json", "damaged.json"} & set(folder.names())
    assert find_damage(folder) == []
    # What is not known to be whole replaces nothing.
    assert verified_at(place.child("step-000003")) is not None
    saver.save(facts(9), parts, background=False)
    assert [one.unseen for one in saver.outcomes()] == [None]
    assert verified_at(place.child("step-000009")) is not None
