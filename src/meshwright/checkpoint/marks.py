"""What was found out about a checkpoint after it was saved: small files beside the manifest."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from meshwright.checkpoint.checked import Damage
from meshwright.checkpoint.format import MANIFEST
from meshwright.checkpoint.place import Place
from meshwright.errors import StoreError

VERIFIED, DAMAGED = "verified.json", "damaged.json"
_LARGEST = 2**20


def mark(folder: Place, damage: Sequence[Damage]) -> None:
    """Remember that all of a checkpoint was read and found to be what was saved, or what was wrong."""
    if damage:
        facts = [{"file": one.file, "tensor": one.tensor, "what": one.what} for one in damage[:100]]
        folder.put(DAMAGED, json.dumps({"at": time.time(), "damage": facts}, indent=1).encode())
        folder.drop(VERIFIED)
    else:
        folder.put(VERIFIED, json.dumps({"at": time.time()}).encode())
        folder.drop(DAMAGED)


def verified_at(folder: Place) -> float | None:
    """When a checkpoint was last found whole; None when never, or when damage was found since."""
    names = folder.names()
    if VERIFIED not in names or DAMAGED in names or MANIFEST not in names:
        return None
    try:
        return float(json.loads(folder.read_all(VERIFIED, _LARGEST))["at"])
    except StoreError:
        raise
    except (ValueError, KeyError, TypeError, OSError):
        return None


def is_marked_damaged(folder: Place) -> bool:
    """Whether damage was found in it."""
    return DAMAGED in folder.names()
