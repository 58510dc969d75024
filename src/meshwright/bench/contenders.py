"""Who is compared: a table of contenders, what each needs, and why one that is missing is missing. No torch.

A contender is a module with `train(trial, clock) -> Facts`: it builds its model, calls `clock.begin()`, trains
`trial.total` steps on the trial's tokens and calls `clock.stepped(loss)` after each. One that cannot do what is asked
raises `Unable` with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from meshwright._version import __version__
from meshwright.errors import UserError, nearest


class Unable(UserError):
    """A contender cannot train this model in this way, or not here."""


@dataclass(frozen=True)
class Contender:
    """One row of the table."""

    name: str
    module: str
    """Of this package."""
    summary: str
    needs: tuple[tuple[str, ...], ...] = ()
    """Modules that it imports; of each group one will do."""
    distributions: tuple[str, ...] = ("torch",)
    """Whose version is its version: the first of them that is installed."""
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Set for its process, as its own launcher does."""

    def missing(self) -> str | None:
        """Why it cannot be run here; None when its modules are there."""
        lacking = [group for group in self.needs if not any(map(_is_there, group))]
        return f"not installed: {', '.join(' or '.join(group) for group in lacking)}" if lacking else None

    @property
    def version(self) -> str:
        """Of the package behind it, as installed."""
        if self.module == CONTENDERS[OURS].module:
            return __version__
        for name in self.distributions:
            with suppress(PackageNotFoundError):
                return version(name)
        return ""

    def variant(self, name: str, settings: str) -> Contender:
        """The same contender once more, with other settings."""
        return replace(self, name=f"{self.name} {name}", summary=f"{self.summary}, with {settings}")


OURS, BARE = "meshwright", "bare"
_ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}

CONTENDERS = {
    one.name: one
    for one in (
        Contender(OURS, "ours", "the trainer's own step"),
        Contender(BARE, "bare", "a bare PyTorch loop: autocast, SDPA, fused AdamW, blocks and loss compiled on a GPU"),
        Contender(
            "torchtitan",
            "titan",
            "TorchTitan's Trainer with torch.compile, as at one GPU: autocast, nothing sharded",
            (("torchtitan",), ("torchdata",), ("tyro",), ("triton",)),
            ("torchtitan",),
            _ALLOCATOR,
        ),
        Contender(
            "hf-trainer",
            "hugging_face",
            "transformers' Trainer with its own model, bf16, SDPA, fused AdamW, not compiled",
            (("transformers",), ("accelerate",)),
            ("transformers",),
        ),
        Contender(
            "fabric",
            "fabric",
            "Lightning Fabric around transformers' model, bf16-mixed, SDPA, fused AdamW, not compiled",
            (("lightning_fabric", "lightning"), ("transformers",)),
            ("pytorch-lightning", "lightning"),
        ),
    )
}


def chosen(names: Sequence[str] | None) -> list[Contender]:
    """The contenders of these names, or all."""
    for name in names or ():
        if name not in CONTENDERS:
            raise UserError(
                f"--contenders: unknown contender '{name}'{nearest(name, CONTENDERS)}; known: {', '.join(CONTENDERS)}"
            )
    return [CONTENDERS[name] for name in dict.fromkeys(names or CONTENDERS)]


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False
