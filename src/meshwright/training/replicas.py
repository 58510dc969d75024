"""What several ranks hold alike must be the same bit for bit; a chip that computes wrongly, or memory, makes it differ.

Every rank sums up the bit patterns of what it holds, tensor by tensor, on its device. Tensors that the same ranks hold
are added up (times a number of their own), so that a check sends a few numbers a rank, whatever the model's size. Only
when these differ are the sums of single tensors sent, to name the one.

Which ranks hold the same is not taken from the strategy, but from the names and places of what they hold: copies of
data parallel ranks, shards that replicas share, norms beside split matrices, tied embeddings on two stages.
"""

from __future__ import annotations

import hashlib
import socket
import sys
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.checkpoint.training_state import parts_of
from meshwright.errors import ExitCode, UserError
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.world import World
from meshwright.training.hooks import Hook, Metrics
from meshwright.training.loop import TrainingLoop
from meshwright.training.rollback import GoBack


class ReplicaError(UserError):
    """Ranks that must hold the same do not."""

    exit_code = ExitCode.FAILED


@dataclass(frozen=True)
class Difference:
    """A tensor that ranks hold differently."""

    name: str
    ranks: tuple[int, ...]
    """Who holds it alike."""
    odd: tuple[int, ...]
    """Those that differ from most of them; all, where there is no majority."""
    hosts: tuple[str, ...]
    """The hosts of the odd ones."""
    over_tp: bool = False
    """Whether only ranks that split the same matrices differ: each computes the update of such a tensor by itself."""

    def __str__(self) -> str:
        where = ", ".join(f"rank {rank} on {host}" for rank, host in zip(self.odd, self.hosts, strict=True))
        if self.odd == self.ranks:
            return f"{self.name} differs between {where}, and there is no majority to say which is right"
        return f"{self.name} of {where} differs from that of {len(self.ranks) - len(self.odd)} other ranks"


class ReplicaCheck:
    """Compares what ranks hold alike; knows from the first time on who holds what."""

    def __init__(self, world: World, mesh: Mesh | None = None) -> None:
        """Of the ranks along `tp` of a mesh each holds another part of split matrices."""
        self.world = world
        tp = torch.zeros(world.size, dtype=torch.int64)
        if mesh is not None:
            ranks = mesh.axes.mesh
            tp[ranks] = torch.arange(ranks.shape[-1]).expand_as(ranks)
        self._tp: list[int] = tp.tolist()
        """The place of each rank along tp."""
        self._layout = ""
        self._kept: list[int] = []
        self._factors = torch.zeros(0, dtype=torch.int64)
        self._set_of = torch.zeros(0, dtype=torch.int64)
        self._sets: list[tuple[int, ...]] = []
        """The sets of ranks that hold the same, on all ranks in the same order."""

    @torch.no_grad()
    def __call__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Difference]:
        """What differs, the same on every rank; all of them must ask."""
        if self.world.size == 1:
            return []
        held = [(name, part) for name, part in parts_of(model, optimizer).items() if part.local.numel()]
        keys = [f"{name} {part.offset} {tuple(part.local.shape)} {part.dtype}" for name, part in held]
        layout = hashlib.blake2b("\n".join(keys).encode(), digest_size=8).hexdigest()
        # Optimizer state appears with the first step; then all look again.
        if int(self.world.sum(torch.tensor([int(layout != self._layout)]))):
            self._look(keys)
            self._layout = layout
        if not self._sets:
            return []
        sums = torch.stack(
            [_sum_of_bits(held[index][1].values()).to(self.world.device) for index in self._kept] or [_NOTHING]
        )
        totals = torch.zeros(len(self._sets), dtype=torch.int64, device=sums.device)
        if self._kept:
            totals.index_add_(0, self._set_of.to(sums.device), sums * self._factors.to(sums.device))
        everyone = self.world.gather(totals.cpu())
        unlike = [number for number, ranks in enumerate(self._sets) if len(everyone[list(ranks), number].unique()) > 1]
        return self._name(unlike, [held[index][0] for index in self._kept], sums.tolist()) if unlike else []

    def _look(self, keys: list[str]) -> None:
        """Find out who holds what."""
        factors = [int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) >> 1 | 1 for key in keys]
        # Rank by rank, since lists may be of different lengths.
        lengths = self.world.gather(torch.tensor([len(keys)])).flatten().tolist()
        padded = torch.zeros(max(lengths), dtype=torch.int64)
        padded[: len(keys)] = torch.tensor(factors, dtype=torch.int64)
        holders: dict[int, list[int]] = {}
        for rank, (row, length) in enumerate(zip(self.world.gather(padded).tolist(), lengths, strict=True)):
            for factor in row[:length]:
                holders.setdefault(factor, []).append(rank)
        several = {factor: tuple(ranks) for factor, ranks in holders.items() if len(ranks) > 1}
        self._sets = sorted(set(several.values()))
        number = {ranks: index for index, ranks in enumerate(self._sets)}
        self._kept = [index for index, factor in enumerate(factors) if factor in several]
        self._factors = torch.tensor([factors[index] for index in self._kept], dtype=torch.int64)
        self._set_of = torch.tensor([number[several[factors[index]]] for index in self._kept], dtype=torch.int64)

    def _name(self, unlike: list[int], names: list[str], sums: list[int]) -> list[Difference]:
        """Which tensors they are, and whose."""
        mine = [entry for entry in zip(self._set_of.tolist(), names, sums, strict=True) if entry[0] in unlike]
        everyone = self.world.exchange({"host": socket.gethostname(), "sums": mine})
        hosts = [one["host"] for one in everyone]
        held: dict[tuple[int, str], dict[int, int]] = {}
        for rank, one in enumerate(everyone):
            for number, name, total in one["sums"]:
                held.setdefault((number, name), {})[rank] = total
        found = []
        for (_, name), totals in sorted(held.items(), key=lambda entry: entry[0][1]):
            if len(set(totals.values())) > 1:
                (common, count), *_ = Counter(totals.values()).most_common()
                majority = count * 2 > len(totals)
                odd = tuple(rank for rank, total in totals.items() if not majority or total != common)
                # Those at the same place among their neighbours are added up by the same sums, bit for bit.
                alike = {self._tp[rank]: total for rank, total in totals.items()}
                over_tp = max(self._tp) > 0 and all(alike[self._tp[rank]] == total for rank, total in totals.items())
                found.append(Difference(name, tuple(totals), odd, tuple(hosts[rank] for rank in odd), over_tp))
        return found


_NOTHING = torch.zeros((), dtype=torch.int64)
_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sum_of_bits(local: Tensor) -> Tensor:
    """The bit patterns of all values, added up: changes with every single bit, and with no order of summation."""
    return local.detach().view(_WHOLE_NUMBERS[local.element_size()]).sum(dtype=torch.int64)


class CheckReplicas(Hook):
    """Compares the copies every elastic.check_replicas_every steps, and before every checkpoint and the end."""

    def __init__(self) -> None:
        self.check: ReplicaCheck | None = None
        self._warned = False

    def after_step(self, trainer: TrainingLoop, metrics: Metrics) -> None:
        elastic, saves = trainer.config.elastic, trainer.config.checkpoint.every
        if not elastic.check_replicas_every:
            return
        saving = trainer.finished or trainer.stopping or (saves and trainer.step % saves == 0)
        if not saving and trainer.step % elastic.check_replicas_every:
            return
        self.check = self.check or ReplicaCheck(trainer.world, trainer.one_step.mesh)
        found = self.check(trainer.model, trainer.optimizer)
        if not found:
            return
        more = f" (and {len(found) - 1} more tensors)" if len(found) > 1 else ""
        reason = f"step {trainer.step}: {found[0]}{more}"
        if trainer.world.is_first:
            tensors = [{"name": one.name, "ranks": one.odd, "hosts": one.hosts, "of": one.ranks} for one in found[:20]]
            trainer.job.folder.event("replicas_differ", step=trainer.step, tensors=tensors, count=len(found))
        exact = trainer.world.device.type == "cpu" or trainer.config.train.deterministic
        if not exact and all(one.over_tp for one in found):
            # Kernels that add up in any order make such copies drift apart by roundings; nothing is broken.
            if trainer.world.is_first and not self._warned:
                print(
                    f"meshwright: {reason}; with kernels that are not deterministic tp ranks may drift apart by "
                    "roundings (train.deterministic=true has none); told once",
                    file=sys.stderr,
                    flush=True,
                )
            self._warned = True
            return
        if elastic.replica_policy == "stop" or trainer.stopping:
            raise ReplicaError(
                f"{reason}. A chip or its memory on that host is not to be trusted: test it or leave it out, and start "
                "the same command again: it goes on from the last checkpoint, before which the copies were the same"
            )
        trainer.go_back(GoBack("replicas", reason, trainer.step, trainer.step, skips=False))
