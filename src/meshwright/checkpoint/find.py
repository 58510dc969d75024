"""Find the checkpoints that somebody means: by a run, by a folder of checkpoints, or by one of them."""

from __future__ import annotations

from pathlib import Path

from meshwright.checkpoint.format import MANIFEST, list_steps, step_name
from meshwright.checkpoint.place import Place, open_place
from meshwright.config import load_config
from meshwright.errors import CheckpointError


def checkpoints_of(where: str | Path) -> Place:
    """The place of checkpoints that a run, or the place itself, means."""
    path = Path(where)
    if (path / "config.toml").exists():
        elsewhere = load_config(path / "config.toml").checkpoint.dir
        return open_place(elsewhere or path / "checkpoints")
    if (path / "checkpoints").is_dir():
        return open_place(path / "checkpoints")
    place = open_place(where)
    if not list_steps(place):
        raise CheckpointError(f"{where} is no run and no folder with checkpoints (step-000100, ...)")
    return place


def find_checkpoints(where: str | Path) -> list[Place]:
    """The checkpoints that are meant, oldest first: one, or all of a run; damaged ones too."""
    found, unusable = find_all(where)
    if unusable:
        raise CheckpointError(unusable[0])
    return found


def find_all(where: str | Path) -> tuple[list[Place], list[str]]:
    """The checkpoints that are meant, and what is wrong with those that are not even looked into, such as links."""
    place = open_place(where)
    if MANIFEST in place.names():
        return [place], []
    checkpoints = checkpoints_of(where)
    found: list[Place] = []
    unusable: list[str] = []
    for step in list_steps(checkpoints):
        try:
            found.append(checkpoints.child(step_name(step)))
        except CheckpointError as error:
            unusable.append(str(error))
    return found, unusable


def latest_checkpoint(where: str | Path) -> Place:
    """The checkpoint that is meant, the latest one of a run."""
    found = [folder for folder in find_checkpoints(where) if MANIFEST in folder.names()]
    if not found:
        raise CheckpointError(f"{where} has no checkpoint yet")
    return found[-1]
