"""Look after checkpoints: what there is, whether it can be trusted, what differs, to and from other formats."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from meshwright.cli.main import Action
from meshwright.errors import CheckpointError

WHERE = "a run, a folder of checkpoints, s3://... or one checkpoint"


def _describe_where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("where", metavar="RUN|FOLDER", help=WHERE)


def _describe_list(parser: argparse.ArgumentParser) -> None:
    _describe_where(parser)
    parser.add_argument("--json", action="store_true", help="one JSON list instead of a table")


def _list(args: argparse.Namespace) -> int:
    from meshwright.checkpoint.find import find_all
    from meshwright.checkpoint.format import read_manifest
    from meshwright.checkpoint.marks import is_marked_damaged, verified_at

    found, unusable = find_all(args.where)
    rows: list[dict[str, Any]] = []
    for folder in found:
        try:
            manifest = read_manifest(folder)
        except CheckpointError as error:
            rows.append({"folder": str(folder), "step": None, "state": "damaged", "error": str(error)})
            continue
        state = "damaged" if is_marked_damaged(folder) else "verified" if verified_at(folder) else "not verified"
        rows.append(
            {
                "folder": str(folder),
                "step": manifest.step,
                "bytes": manifest.nbytes,
                "strategy": manifest.strategy,
                "ranks": manifest.ranks,
                "saved_at": manifest.saved_at,
                "loss": manifest.metrics.get("eval_loss", manifest.metrics.get("loss")),
                "state": state,
            }
        )
    rows += [{"folder": None, "step": None, "state": "damaged", "error": what} for what in unusable]
    if args.json:
        print(json.dumps(rows, indent=1))
        return 0
    print(f"{'step':>9}  {'size':>9}  {'age':>8}  {'state':<12}  {'loss':>8}  strategy")
    for row in rows:
        if row["step"] is None:
            print(f"{'?':>9}  {'':>9}  {'':>8}  {'damaged':<12}  {'':>8}  {row['error']}")
            continue
        loss = f"{row['loss']:.4f}" if row["loss"] is not None else ""
        age = _age(time.time() - float(row["saved_at"])) if row["saved_at"] else "?"
        ranks = f" on {row['ranks']} rank{'s' if row['ranks'] != 1 else ''}"
        size = _size(int(row["bytes"]))
        print(f"{row['step']:>9}  {size:>9}  {age:>8}  {row['state']:<12}  {loss:>8}  {row['strategy']}{ranks}")
    return 0


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _describe_verify(parser: argparse.ArgumentParser) -> None:
    _describe_where(parser)
    parser.add_argument("--jobs", type=int, metavar="N", help="threads that read and check (default: all cores)")
    parser.epilog = "Exit code 0: all that was looked at is what was saved. 1: something is damaged; it is named."


def _verify(args: argparse.Namespace) -> int:
    from meshwright.checkpoint.checked import find_damage
    from meshwright.checkpoint.find import find_all
    from meshwright.checkpoint.format import read_manifest
    from meshwright.checkpoint.marks import mark

    found, unusable = find_all(args.where)
    count = len(found) + len(unusable)
    if not count:
        raise CheckpointError(f"{args.where} has no checkpoint yet")
    for what in unusable:
        print(f"DAMAGED  {what}")
    broken = len(unusable)
    for folder in found:
        started = time.perf_counter()
        damage = find_damage(folder, threads=args.jobs)
        seconds = time.perf_counter() - started
        for one in damage:
            print(f"DAMAGED  {one.what}" + (f" (tensor {one.tensor})" if one.tensor else ""))
        broken += bool(damage)
        if not damage:
            manifest = read_manifest(folder)
            held = f"{len(manifest.tensors)} tensors, {_size(manifest.nbytes)}"
            print(f"ok       {folder}: step {manifest.step}, {held}, {seconds:.2f} s")
        try:
            mark(folder, damage)
        except OSError as error:
            print(f"         {folder}: the result cannot be noted there: {error.strerror or error}", file=sys.stderr)
    if broken:
        print(f"{broken} of {count} checkpoint{'s' if count != 1 else ''} damaged", file=sys.stderr)
    return 1 if broken else 0


def _describe_diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("one", metavar="A", help=WHERE + " (of a run: the latest)")
    parser.add_argument("other", metavar="B", help="another")
    parser.add_argument("--only", default="", metavar="PREFIX", help="tensors whose names start so: model., optimizer.")
    parser.epilog = "Exit code 0: the same bits. 1: they differ."


def _diff(args: argparse.Namespace) -> int:
    from meshwright.torch_support import imported_for_good, require_torch

    require_torch()
    with imported_for_good():
        from meshwright.checkpoint.compare import differences
        from meshwright.checkpoint.find import latest_checkpoint
        from meshwright.checkpoint.format import read_manifest

    one, other = latest_checkpoint(args.one), latest_checkpoint(args.other)
    first, second = read_manifest(one), read_manifest(other)
    for fact in ("run", "step", "position", "strategy", "ranks", "model", "seed", "corpora"):
        here, there = getattr(first, fact), getattr(second, fact)
        if here != there:
            print(f"{fact}: {here}  |  {there}" if fact != "model" else "model: the shapes differ")
    differing = 0
    for found in differences(one, other, args.only):
        differing += 1
        if found.what:
            print(f"{found.name}: {found.what}")
        else:
            share = f"{found.elements:,} of {found.of:,} elements"
            print(f"{found.name}: {share}, largest {found.largest:.3g}, relative {found.relative:.3g}")
    total = sum(name.startswith(args.only) for name in first.tensors)
    print(f"{differing} tensors differ" if differing else f"all {total} tensors are the same, bit for bit")
    return 1 if differing else 0


def _describe_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("where", metavar="RUN|FOLDER", help=WHERE + " (of a run: the latest)")
    parser.add_argument("--hf", required=True, metavar="DIR", help="the Hugging Face folder to make; new or empty")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights (default: as saved)"
    )


def _export(args: argparse.Namespace) -> int:
    from meshwright.torch_support import imported_for_good, require_torch

    require_torch()
    with imported_for_good():
        import torch

        from meshwright.checkpoint.load_model import load_model, tokenizer_folder_of
        from meshwright.models.hf import save_hf

    model = load_model(args.where, dtype=getattr(torch, args.dtype) if args.dtype else None)
    tokenizer = tokenizer_folder_of(args.where)
    save_hf(model, args.hf, tokenizer_folder=tokenizer)
    print(f"{args.hf}: {model.spec.family} model" + (" with its tokenizer" if tokenizer else ", without a tokenizer"))
    return 0


def _describe_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hf", required=True, metavar="DIR", help="a Hugging Face folder")
    parser.add_argument(
        "--out", required=True, metavar="FOLDER", help="the folder of checkpoints to put step-000000 in"
    )
    parser.epilog = (
        "The checkpoint has weights and no optimizer: to look at, compare and generate from. "
        "To train from such weights, set model.from_hf."
    )


def _import(args: argparse.Namespace) -> int:
    from meshwright.torch_support import imported_for_good, require_torch

    require_torch()
    with imported_for_good():
        from meshwright.checkpoint.convert import import_hf

    print(f"{import_hf(args.hf, args.out)}: written and verified")
    return 0


def _describe_prune(parser: argparse.ArgumentParser) -> None:
    _describe_where(parser)
    parser.add_argument("--keep", type=int, default=2, metavar="K", help="the latest ones that stay (default: 2)")
    parser.add_argument("--keep-every", type=int, default=0, metavar="N", help="also those of steps that N divides")
    parser.add_argument("--keep-best", type=int, default=0, metavar="M", help="also the best ones by --best")
    parser.add_argument("--best", default="eval_loss", metavar="METRIC", help="less is better; -METRIC: more is")
    parser.add_argument("--dry-run", action="store_true", help="say what would go, remove nothing")
    parser.epilog = (
        "All that stays is read again before anything is removed. "
        "Exit code 0: it is what was saved. 1: something is damaged; it is named, and an older one stays in its place."
    )


def _prune(args: argparse.Namespace) -> int:
    from meshwright.checkpoint.find import checkpoints_of
    from meshwright.checkpoint.retention import Retention, doomed_after_reading, remove
    from meshwright.training.run_folder import RunFolder

    if args.keep < 1:
        raise CheckpointError("--keep must be at least 1: the last verified checkpoint is never removed")
    place = checkpoints_of(args.where)
    metric = args.best.removeprefix("-")
    retention = Retention(args.keep, args.keep_every, args.keep_best, metric, args.best.startswith("-"))
    run = RunFolder(args.where)
    lock = run.hold(fresh=False) if run.holds_run else None
    try:
        gone, damage = doomed_after_reading(place, retention)
        if not args.dry_run:
            remove(place, gone)
    finally:
        if lock is not None:
            lock.close()
    for one in damage:
        print(f"DAMAGED  {one.what}" + (f" (tensor {one.tensor})" if one.tensor else ""), file=sys.stderr)
    if damage:
        print("what is damaged does not count among those that stay", file=sys.stderr)
    steps = ", ".join(map(str, gone)) or "none"
    print(f"{'would remove' if args.dry_run else 'removed'}: {steps}")
    return 1 if damage else 0


ACTIONS = {
    "ls": Action("what checkpoints there are: step, size, age, whether verified, strategy", _describe_list, _list),
    "verify": Action("read every byte and say which file and tensor is damaged", _describe_verify, _verify),
    "diff": Action("which tensors of two checkpoints differ, and by how much", _describe_diff, _diff),
    "export": Action("write a checkpoint's model as a Hugging Face folder", _describe_export, _export),
    "import": Action("write a Hugging Face folder's weights as a checkpoint", _describe_import, _import),
    "prune": Action("remove old checkpoints; the last verified one always stays", _describe_prune, _prune),
}
