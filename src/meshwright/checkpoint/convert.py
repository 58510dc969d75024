"""Checkpoints from other formats."""

from __future__ import annotations

import time
from pathlib import Path

from meshwright._version import __version__
from meshwright.checkpoint.format import Manifest
from meshwright.checkpoint.place import Place, open_place
from meshwright.checkpoint.retention import Retention
from meshwright.checkpoint.saver import Saver
from meshwright.checkpoint.training_state import parts_of
from meshwright.errors import CheckpointError
from meshwright.models.hf import load_hf
from meshwright.parallel.exchange import Exchange


def import_hf(folder: str | Path, out: str | Path) -> Place:
    """Write the weights of a Hugging Face folder as the checkpoint of step 0, without an optimizer."""
    model = load_hf(folder)
    place = open_place(out)
    facts = Manifest(
        step=0,
        position=0,
        strategy="dp=1",
        model=model.spec,
        saved_at=time.time(),
        written_by=f"meshwright {__version__} from Hugging Face",
        tensors={},
    )
    saver = Saver(place, Exchange(None), Retention())
    saver.save(facts, parts_of(model), background=False)
    (outcome,) = saver.outcomes()
    if outcome.error is not None:
        raise CheckpointError(outcome.error)
    return place.child("step-000000")
