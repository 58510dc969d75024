"""Checkpoints of a loop of one's own: any module, its optimizer, the loss scale, and what the loop wants to remember.

They are those of the trainer, in the same folders: whole or not there, checked byte by byte, for any strategy. Of a
module that is no decoder of ours the manifest has no shape: names, shapes and dtypes are compared with the module that
is to be filled. What the loop remembers is JSON. Random numbers of torch are not in it, as they are not in the
trainer's.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from meshwright._version import __version__
from meshwright.checkpoint.find import latest_checkpoint
from meshwright.checkpoint.format import MANIFEST, DamageError, Manifest, list_steps, step_name
from meshwright.checkpoint.place import open_place
from meshwright.checkpoint.reader import CheckpointReader
from meshwright.checkpoint.retention import Retention
from meshwright.checkpoint.saver import Saver
from meshwright.checkpoint.training_state import model_tensors, parts_of, restore
from meshwright.checkpoint.unsent import left_out, restore_unsent, unsent_parts
from meshwright.comm.compression import NONE
from meshwright.comm.compressors import Compressor
from meshwright.errors import CheckpointError, UserError
from meshwright.models.decoder import Decoder
from meshwright.parallel.exchange import Exchange
from meshwright.parallel.local_optimizer import inner_of
from meshwright.parallel.own_loop import Parallel

Result = TypeVar("Result")
_ALL = 10**9
"""Of the checkpoints stay: a loop removes its own."""


def save(
    parallel: Parallel, folder: str | Path, optimizer: torch.optim.Optimizer | None, state: Mapping[str, Any]
) -> str:
    """Write a checkpoint; gives its folder once it is on the disk, has been read again and is what was meant."""
    place, exchange = open_place(folder), parallel.exchange
    _together(exchange, lambda: _check_state(state))
    step = state.get("step", parallel.loop.steps)
    if not isinstance(step, int) or step < 0:
        raise UserError(f"step={step!r} numbers the checkpoint; give a whole number from 0")
    module, loop, compressor = parallel.module, parallel.loop, parallel.compressor
    facts = Manifest(
        step=step,
        position=0,
        strategy=str(parallel.strategy),
        ranks=parallel.strategy.world,
        model=module.spec if isinstance(module, Decoder) else None,
        saved_at=time.time(),
        written_by=f"meshwright {__version__}, torch {torch.__version__}",
        state={
            "loop": dict(state),
            "steps": loop.steps,
            "travelled": loop.steps + loop.by_hand if compressor is None else compressor.steps_done,
            "optimizer": None if optimizer is None else _described(optimizer),
            **parallel.loss_scale.state(),
        },
        tensors={},
    )
    if exchange.is_first:
        place.prepare()
    parallel.reshard()
    saver = Saver(place, exchange, Retention(last=_ALL))
    saver.save(facts, parts_of(module, optimizer) | unsent_parts(compressor), background=False)
    for outcome in saver.outcomes():
        wrong = outcome.error or outcome.unseen or next((one.what for one in outcome.damage), None)
        if wrong is not None:
            raise CheckpointError(f"the checkpoint of step {step} is not saved: {wrong}")
    return place.path_of(step_name(step))


def _check_state(state: Mapping[str, Any]) -> None:
    """Raise unless all of it comes back from JSON as it is."""
    for name, value in state.items():
        try:
            same = json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError) as error:
            raise UserError(
                f"save({name}=...) is kept as JSON, which cannot hold it: {error}; tensors belong into the model, "
                "numbers and texts, lists and dictionaries of them are fine"
            ) from None
        if not same:
            raise UserError(
                f"save({name}=...) is kept as JSON, and would come back changed: use lists for tuples, texts as keys"
            )


def _described(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The settings of an optimizer's groups, as far as they are numbers."""
    groups = []
    for group in optimizer.param_groups:
        told = {name: float(one) if isinstance(one, Tensor) else one for name, one in group.items()}
        groups.append({name: one for name, one in told.items() if _is_plain(one)})
    return {"kind": type(inner_of(optimizer)).__name__, "groups": groups}


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, bool | int | float | str)


def load(
    parallel: Parallel, folder: str | Path, optimizer: torch.optim.Optimizer | None, must_exist: bool
) -> dict[str, Any]:
    """Fill the model, the optimizer and the loss scale; gives what the loop had remembered."""
    exchange = parallel.exchange
    # As the first rank sees them: others may see a network disk late.
    found = _together(exchange, lambda: _find(folder, must_exist) if exchange.is_first else None)
    exchange.collect(None)
    where = exchange.answer([found] * exchange.size)
    if where is None:
        return {}
    reader = _together(exchange, lambda: CheckpointReader(open_place(where)))
    manifest = reader.manifest
    _check_same(parallel, where, manifest, optimizer)
    _together(exchange, lambda: _fill(parallel, reader, optimizer))
    parallel.loss_scale.restore(manifest.state)
    parallel.loop.steps = manifest.state.get("steps", manifest.step)
    parallel.loop.by_hand = _travelled(manifest) - parallel.loop.steps
    return dict(manifest.state.get("loop", {}))


def _find(folder: str | Path, must_exist: bool) -> str | None:
    place = open_place(folder)
    names = place.names()
    if not must_exist and MANIFEST not in names and not list_steps(place):
        return None
    if not names:
        raise CheckpointError(f"{folder} has no checkpoint: there is no such folder, or nothing in it")
    return str(latest_checkpoint(folder))


def _check_same(parallel: Parallel, where: str, manifest: Manifest, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise, on all ranks, unless the checkpoint is of this model and has what the optimizer needs."""
    exchange = parallel.exchange
    mine = {name: list(tensor.shape) for name, tensor in model_tensors(parallel.module).items()}
    # A pipeline's rank has those of its own stages.
    said = exchange.collect(mine)
    here: dict[str, list[int]] = {name: shape for told in said for name, shape in told.items()}
    complaint = _complaint(where, manifest, here, optimizer) if exchange.is_first else None
    complaint = exchange.answer([complaint] * exchange.size)
    if complaint is not None:
        raise CheckpointError(complaint)


def _complaint(
    where: str, manifest: Manifest, here: Mapping[str, list[int]], optimizer: torch.optim.Optimizer | None
) -> str | None:
    saved = {
        name.removeprefix("model."): list(entry.shape)
        for name, entry in manifest.tensors.items()
        if name.startswith("model.")
    }
    for what, names in (("lacks", here.keys() - saved.keys()), ("has beyond it", saved.keys() - here.keys())):
        if names:
            listed = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            return f"{where} is of another model than this one: it {what} {listed}"
    for name, shape in here.items():
        if saved[name] != shape:
            return f"{where} is of another model than this one: {name} is {saved[name]} in it and {shape} here"
    if optimizer is None:
        return None
    told, kind = manifest.state.get("optimizer"), type(inner_of(optimizer)).__name__
    if told is None:
        return f"{where} was saved without an optimizer: load it without one, or give save the optimizer"
    if told["kind"] != kind:
        return f"{where} has the state of {told['kind']}, and this optimizer is {kind}; give the same"
    if len(told["groups"]) != len(optimizer.param_groups):
        counts = f"{len(told['groups'])} parameter groups, and this optimizer {len(optimizer.param_groups)}"
        return f"{where} has the state of {counts}; give the same"
    return None


def _fill(parallel: Parallel, reader: CheckpointReader, optimizer: torch.optim.Optimizer | None) -> None:
    parallel.reshard()
    if optimizer is not None:
        inner_of(optimizer).state.clear()
    restore(reader, parallel.module, optimizer)
    if parallel.strategy.compress != NONE:
        # What compresses comes with the replica, which else is made when it is first called.
        _ = parallel.replica
    if restore_unsent(reader, parallel.module, parallel.compressor) and parallel.exchange.is_first:
        print(f"meshwright: {left_out(reader.manifest.step, parallel.strategy)}", file=sys.stderr, flush=True)
    if parallel.compressor is not None:
        _go_on(parallel, parallel.compressor, reader.manifest)
    if optimizer is not None:
        for group, told in zip(optimizer.param_groups, reader.manifest.state["optimizer"]["groups"], strict=True):
            for name, value in told.items():
                held = group.get(name)
                if isinstance(held, Tensor):
                    held.fill_(value)
                else:
                    group[name] = tuple(value) if isinstance(value, list) else value


def _go_on(parallel: Parallel, compressor: Compressor, manifest: Manifest) -> None:
    """Let gradients travel on from where the checkpoint was."""
    travelled, asked = _travelled(manifest), parallel.travel.whole_steps(compressor.how)
    compressor.begin_step(travelled)
    # What was not sent would wait, and be of less use the longer it does: compression that has begun goes on.
    compressor.whole_steps = min(asked, travelled) if compressor.unsent else asked
    if compressor.whole_steps < asked and parallel.exchange.is_first:
        print(
            f"meshwright: compress={parallel.strategy.compress} goes on at once and not after {asked} steps, since it "
            f"had begun before the checkpoint of step {manifest.step}",
            file=sys.stderr,
            flush=True,
        )


def _travelled(manifest: Manifest) -> int:
    """Steps whose gradients have travelled."""
    return int(manifest.state.get("travelled", manifest.state.get("steps", manifest.step)))


def _together(exchange: Exchange, work: Callable[[], Result]) -> Result:
    """What this rank's work gives; where it fails on any rank, an error on all of them."""
    result, error = None, None
    try:
        result = work()
    except (UserError, OSError) as caught:
        error = caught
    told = None if error is None else [str(error), isinstance(error, DamageError)]
    said = exchange.collect(told)
    first = next((one for one in said if one is not None), None)
    heard = exchange.answer([first] * exchange.size)
    if error is not None:
        raise error
    if heard is not None:
        raise (DamageError if heard[1] else CheckpointError)(heard[0])
    return result  # type: ignore[return-value]
