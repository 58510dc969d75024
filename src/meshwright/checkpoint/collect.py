"""Bring together what the ranks of a pipeline hold: each has the state of its own layers."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from torch import Tensor

Files = dict[str, dict[str, Tensor]]


def collect_stages(files: Files, group: dist.ProcessGroup) -> Files:
    """On the group's first rank the files of all of them, merged; on the others what they gave."""
    if dist.get_rank(group) != 0:
        tensors = [(file, name, tensor) for file, held in files.items() for name, tensor in held.items()]
        listing = [(file, name, list(tensor.shape), str(tensor.dtype)) for file, name, tensor in tensors]
        text = torch.frombuffer(bytearray(json.dumps(listing).encode()), dtype=torch.uint8)
        dist.send(torch.tensor([len(text)]), group=group, group_dst=0)
        dist.send(text, group=group, group_dst=0)
        for *_, tensor in tensors:
            dist.send(tensor, group=group, group_dst=0)
        return files
    for source in range(1, dist.get_world_size(group)):
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, group=group, group_src=source)
        text = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(text, group=group, group_src=source)
        for file, name, shape, dtype in json.loads(bytes(text.tolist())):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
            dist.recv(tensor, group=group, group_src=source)
            # Tied embeddings are held twice and alike.
            files[file].setdefault(name, tensor)
    return files
