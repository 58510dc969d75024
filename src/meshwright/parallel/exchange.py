"""Ranks tell each other things as JSON: what one says may be read, never run."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


class Exchange:
    """A group of ranks, on the CPU; the first one collects and answers. Without a group it is alone."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1

    @property
    def is_first(self) -> bool:
        """Whether this rank collects and answers."""
        return self.rank == 0

    def collect(self, said: Any) -> list[Any]:
        """On the first rank what everyone said, in their order; on the others nothing."""
        if self._group is None:
            return [said]
        if self.is_first:
            return [said, *(self._receive(source) for source in range(1, self.size))]
        self._send(said, 0)
        return []

    def answer(self, answers: list[Any]) -> Any:
        """What the first rank has for this one; it gives one answer for each."""
        if self._group is None:
            return answers[0]
        if not self.is_first:
            return self._receive(0)
        for target in range(1, self.size):
            self._send(answers[target], target)
        return answers[0]

    def _send(self, said: Any, target: int) -> None:
        text = torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)
        dist.send(torch.tensor([len(text)]), group=self._group, group_dst=target)
        dist.send(text, group=self._group, group_dst=target)

    def _receive(self, source: int) -> Any:
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, group=self._group, group_src=source)
        text = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(text, group=self._group, group_src=source)
        return json.loads(text.numpy().tobytes())
