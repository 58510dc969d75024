"""Activations in host memory: what layers keep for their backward pass waits there, and comes back ahead of its use.

    forward     computes  layer 3 | layer 4 | layer 5         backward    computes  layer 5 | layer 4 | layer 3
                down                layer 3 | layer 4                     up        layer 4 | layer 3 | layer 2

The device holds what two layers keep: of the layer at work, and of its neighbour that is on its way. Copies run on
streams of their own. Nothing is given back to the device's allocator before the stream that computes has been made to
wait for the copy, so memory is used again in the order of that stream, however far ahead the host runs.

What moves are whole storages, each once, however many operations keep views of them. Parameters stay, and so does what
is not the layer's own: inputs without a gradient, which all layers share, and leaves, which a pipeline holds. The
model's last layer keeps its activations where they are: its backward pass comes at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from meshwright.models.parts import local_of
from meshwright.models.reads import around_forward
from meshwright.parallel.host_memory import Buffer, HostMemory
from meshwright.torch_private import FakeTensor

SMALLEST = 1 << 18
"""Bytes below which a storage stays on a GPU: starting its copy would take longer than the copy."""
_PLAIN = (Tensor, nn.Parameter, FakeTensor)


class HostActivations:
    """What the layers of a model keep, in host memory."""

    def __init__(self) -> None:
        self.memory = HostMemory()
        self._rehearsed = False
        self._hooks: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] = self.pack, unpack
        self._open: _Layer | None = None
        self._leaving: _Layer | None = None
        """The layer whose activations are on their way down, and on the device still."""
        self._last_made: weakref.ref[Any] | None = None
        self._last_layer: _Layer | None = None
        self._streams: dict[torch.device, tuple[Any, Any]] = {}

    def apply(self, blocks: Sequence[nn.Module], *, has_last: bool, compiled: bool = False) -> None:
        """Arrange it for the layers of a model; `has_last` says whether the last of them is the model's."""
        if compiled:
            # Compiled layers call them as they are; a compiler would follow them, and compile them for every shape.
            self._hooks = torch.compiler.disable(self.pack), torch.compiler.disable(unpack)
        for block in blocks:
            stays = has_last and block is blocks[-1]
            around_forward(block, partial(self._forward, block, stays))

    def _forward(self, block: nn.Module, stays: bool, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs, **options)
        given = [leaf for leaf in tree_leaves((inputs, options)) if isinstance(leaf, Tensor)]
        layer = _Layer(self, block, given, self._before(given))
        if stays:
            output = forward(*inputs, **options)
        else:
            self._open = layer
            try:
                with saved_tensors_hooks(*self._hooks):
                    output = forward(*inputs, **options)
            finally:
                self._open = None
        self._made(layer, output)
        return output

    def rehearse(self) -> None:
        """Take tensors without memory for those of a GPU, and let host memory be on the meta device, not with them."""
        self.memory, self._rehearsed = HostMemory("meta"), True

    def smallest(self, device: torch.device) -> int:
        """Bytes of the smallest storage that moves; on a CPU, which is for proofs, all do."""
        return SMALLEST if self._rehearsed or device.type == "cuda" else 1

    def pack(self, tensor: Tensor) -> Tensor | View:
        """What to keep in place of a tensor that the layer at work wants to keep."""
        return tensor if self._open is None else self._open.pack(tensor)

    def _before(self, given: list[Tensor]) -> _Layer | None:
        """The layer that made what another one is given: its activations are wanted next in the backward pass."""
        made = self._last_made() if self._last_made is not None else None
        if made is not None and any(_storage(tensor) is made for tensor in given):
            return self._last_layer
        return None

    def _made(self, layer: _Layer, output: Any) -> None:
        """A layer's forward pass is done."""
        self._let_go()
        layer.seal()
        if layer.send():
            self._leaving = layer
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if tensors:
            self._last_made, self._last_layer = weakref.ref(_storage(tensors[0])), layer
            tensors[0].register_hook(layer.begin_backward)

    def _let_go(self, unless: Sequence[_Layer | None] = ()) -> None:
        """Let the device forget what has been copied."""
        layer = self._leaving
        if layer is not None and layer not in unless:
            self._leaving = None
            layer.forget()

    def streams(self, device: torch.device) -> tuple[Any, Any]:
        """Those of a GPU's copies down and up."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return self._streams[device]


class _Layer:
    """What one layer keeps of one forward pass."""

    def __init__(self, host: HostActivations, block: nn.Module, given: list[Tensor], before: _Layer | None) -> None:
        self.host, self.before = host, before
        self._block: nn.Module | None = block
        self._device = given[0].device if given else None
        self._shared = {_key(one) for one in given if not one.requires_grad or one.is_leaf}
        self._pieces: dict[int, _Piece] = {}
        self._held: list[weakref.ref[_Piece]] = []
        self._unsettled: list[Any] = []
        self._sent: Any = None

    def pack(self, tensor: Tensor) -> Tensor | View:
        """A view of a storage that will move, or the tensor itself where it is to stay."""
        if type(tensor) not in _PLAIN or tensor.layout != torch.strided or tensor.device != self._device:
            return tensor
        size, key = _storage(tensor).nbytes(), _key(tensor)
        if size < self.host.smallest(tensor.device) or size % tensor.itemsize:
            return tensor
        if key not in self._pieces:
            if key in self._shared or self._is_parameter(key):
                return tensor
            flat = tensor.as_strided((size // tensor.itemsize,), (1,), 0)
            self._pieces[key] = _Piece(self, flat)
        return View(self._pieces[key], tensor)

    def _is_parameter(self, key: int) -> bool:
        # Asked each time: gathered parameters come and go while the layer computes.
        assert self._block is not None
        return any(_key(local_of(parameter)) == key for parameter in self._block.parameters())

    def seal(self) -> None:
        """The forward pass is done: from here on, what is kept lives as long as the graph has a use for it."""
        self._held = [weakref.ref(piece) for piece in self._pieces.values()]
        self._pieces, self._block = {}, None

    def _alive(self) -> list[_Piece]:
        return [piece for piece in (held() for held in self._held) if piece is not None]

    def send(self) -> bool:
        """Start the copies down; whether there are any."""
        pieces = [(piece, piece.flat) for piece in self._alive() if piece.flat is not None]
        if not pieces:
            return False
        device = pieces[0][1].device
        on_gpu = device.type == "cuda"
        for piece, flat in pieces:
            piece.buffer = self.host.memory.take(flat.numel() * flat.itemsize, pinned=on_gpu)
        if not on_gpu:
            for piece, flat in pieces:
                piece.in_host.copy_(flat)
            return True
        down, _ = self.host.streams(device)
        down.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(down):
            for piece, flat in pieces:
                if piece.buffer is not None and piece.buffer.free_after is not None:
                    down.wait_event(piece.buffer.free_after)
                piece.in_host.copy_(flat, non_blocking=True)
        self._sent = down.record_event()
        self._wait_for(self._sent, [piece for piece, _ in pieces])
        return True

    def forget(self) -> None:
        """Drop what is on the device, once it is in host memory."""
        self.settle()
        for piece in self._alive():
            piece.flat = None

    def bring(self) -> None:
        """Start the copies up, of what is not on the device."""
        pieces = [piece for piece in self._alive() if piece.flat is None]
        if not pieces:
            return
        for piece in pieces:
            # Memory of the stream that computes: it is free there, as far as that stream has been told what to do.
            piece.flat = torch.empty(piece.elements, dtype=piece.dtype, device=piece.device)
        device = pieces[0].device
        if device.type != "cuda":
            for piece in pieces:
                piece.there.copy_(piece.in_host)
            return
        _, up = self.host.streams(device)
        up.wait_stream(torch.cuda.current_stream(device))
        up.wait_event(self._sent)
        with torch.cuda.stream(up):
            for piece in pieces:
                piece.there.copy_(piece.in_host, non_blocking=True)
        self._wait_for(up.record_event(), pieces)

    def _wait_for(self, event: Any, pieces: list[_Piece]) -> None:
        """Copies end with an event: before it, neither end of them may be used for anything else."""
        self._unsettled.append(event)
        for piece in pieces:
            assert piece.buffer is not None
            piece.buffer.free_after = event

    def settle(self) -> None:
        """Let the stream that computes wait for all copies of this layer."""
        for event in self._unsettled:
            event.wait()
        self._unsettled = []

    def begin_backward(self, gradient: Tensor) -> None:
        """The layer's own backward pass comes now, and then that of the one before it."""
        self.host._let_go(unless=(self, self.before))
        self.bring()
        self.settle()
        if self.before is not None:
            self.before.bring()


class _Piece:
    """A storage: on the device, in host memory, or in both."""

    def __init__(self, layer: _Layer, flat: Tensor) -> None:
        self.layer = layer
        self.flat: Tensor | None = flat
        """All of it on the device."""
        self.buffer: Buffer | None = None
        self.elements, self.dtype, self.device = flat.numel(), flat.dtype, flat.device

    @property
    def there(self) -> Tensor:
        """On the device."""
        assert self.flat is not None
        return self.flat

    @property
    def in_host(self) -> Tensor:
        """Its copy in host memory."""
        assert self.buffer is not None
        return self.buffer.elements(self.elements, self.dtype)

    def __del__(self) -> None:
        if self.flat is not None:
            # Its memory must not be used again before its copies are done.
            self.layer.settle()
        if self.buffer is not None:
            self.layer.host.memory.give(self.buffer)


class View:
    """One tensor that was kept: where it lies in a storage."""

    def __init__(self, piece: _Piece, tensor: Tensor) -> None:
        self.piece = piece
        self.dtype = tensor.dtype
        self.where = tensor.shape, tensor.stride(), tensor.storage_offset()

    def tensor(self) -> Tensor:
        """It, on the device."""
        self.piece.layer.bring()
        self.piece.layer.settle()
        return self.piece.there.view(self.dtype).as_strided(*self.where)


def unpack(kept: Tensor | View) -> Tensor:
    """The tensor that was packed."""
    return kept.tensor() if isinstance(kept, View) else kept


def _storage(tensor: Tensor) -> Any:
    return local_of(tensor).untyped_storage()


def _key(tensor: Tensor) -> int:
    return int(_storage(tensor)._cdata)
