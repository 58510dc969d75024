"""Which strategy trains a model best on some machines: does it fit, how fast, why, and why not the others.

Needs no GPU and no network. Machines are `64xh100` (chips), `8x4xh100` (machines x chips), `32xh100+32xa100`
(several kinds), a cluster.toml, or `here`.
Constraints are written after the options: tp<=8, zero=3, pp=1, micro_batch=2, recompute=none."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.errors import UserError
from meshwright.interop import FORMS
from meshwright.known_names import in_our_words

if TYPE_CHECKING:
    from meshwright.interop.emit import Limits
    from meshwright.planning.carried import Carried
    from meshwright.planning.made import Plan

_PLAIN_WIDTH = 160
ASKED = ("longest-sequence", "largest-micro-batch", "largest-model", "fewest-gpus")


def describe(parser: argparse.ArgumentParser) -> None:
    """Arguments of `meshwright plan`."""
    _describe_question(parser)
    _describe_answers(parser)
    parser.epilog = (
        "exit code: 0 something fits, 1 nothing fits, 2 something to change in the command\n\n"
        "examples:\n"
        "  meshwright plan --model llama3.1-70b --cluster 64xh100 --seq-len 8192\n"
        "  meshwright plan --model llama3.1-8b --cluster 8xa100 'tp=1' --html plan.html\n"
        "  meshwright plan --model llama3.1-8b --cluster 8xh100 --emit run --out run.toml\n"
        "  meshwright plan --model llama3.1-8b --cluster 8xh100 --emit deepspeed\n"
        "  meshwright plan --megatron-args gpt.args --cluster 128x8xa100\n"
        "  meshwright plan --model llama3.1-8b --cluster 8xh100+8xa100 --seq-len 4096\n"
        "  meshwright plan --model llama3.1-8b --cluster 8xh100 --ask longest-sequence\n"
        "  meshwright plan --calibrate && meshwright plan --model llama3.2-1b --cluster here --try 3 --emit run\n"
    )


def _describe_question(parser: argparse.ArgumentParser) -> None:
    """What is planned, for which machines, and what must hold."""
    parser.add_argument("--model", metavar="PRESET|FOLDER|CONFIG.JSON", help="a preset, a Hugging Face folder or file")
    parser.add_argument(
        "--megatron-args", metavar="FILE", help="plan the run of a file of Megatron-LM's flags; docs/interop.md"
    )
    parser.add_argument("--cluster", metavar="64xh100|FILE|here", help="the machines")
    parser.add_argument(
        "--seq-len", type=int, metavar="N", help="tokens of a sequence (default: the model's, up to 4096)"
    )
    parser.add_argument("--global-batch", type=int, metavar="N", help="sequences of a step (default: about 4M tokens)")
    parser.add_argument(
        "--precision",
        metavar="DTYPE",
        help="bf16 (default), fp16, tf32, float32, fp8, some of them (a,b) or auto: all but fp8 and tf32",
    )
    parser.add_argument("--stored", metavar="DTYPE", help="weights and gradients: float32 (default) or bf16")
    parser.add_argument("--moments", metavar="DTYPE", help="AdamW's moments: float32 (default), bf16 or int8")
    parser.add_argument(
        "--objective", default="throughput", metavar="WHAT", help="throughput, memory, cost, fewest-gpus"
    )
    parser.add_argument("--strategy", metavar="STRATEGY", help="estimate this one instead of searching")
    parser.add_argument("--micro-batch", type=int, metavar="N", help="samples of a forward pass (default: the best)")
    parser.add_argument("--tokens", metavar="N", help="tokens of the whole training, such as 1e12 or 2T: days and cost")
    parser.add_argument("--price", type=float, metavar="X", help="money for a chip and hour")
    parser.add_argument("constraints", nargs="*", metavar="CONSTRAINT", help="such as 'tp<=8' zero=3 pp=1")


def _describe_answers(parser: argparse.ArgumentParser) -> None:
    """What else is asked, measured and written."""
    parser.add_argument("--ask", choices=ASKED, help="an inverse question: what is the most that fits")
    parser.add_argument(
        "--spot", type=float, metavar="N", help="interruptions a day: what they cost, the best interval"
    )
    parser.add_argument("--interval", type=float, metavar="S", help="with --spot: seconds between checkpoints")
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="measure this machine (under two minutes, needs torch) for plans on it and on clusters of its chip",
    )
    parser.add_argument(
        "--try",
        type=int,
        dest="try_out",
        metavar="K",
        help="train a few steps with the best K on this machine (--cluster here) and choose the measured best",
    )
    parser.add_argument(
        "--try-limit", type=float, metavar="S", help="with --try: seconds for each candidate (default 120)"
    )
    parser.add_argument(
        "--rehearse",
        type=int,
        nargs="?",
        const=0,
        metavar="RANK",
        help="run a step of that rank (0) without memory and count (needs torch)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object; docs/plan.md says what is in it")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page that needs nothing else")
    parser.add_argument(
        "--emit",
        choices=FORMS,
        help="write a run file for `meshwright train`, or another trainer's configuration, to which the search keeps",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="where --emit writes, replacing what is there (default run.toml for run; no default is replaced)",
    )


def run(args: argparse.Namespace) -> int:
    """Plan and show it."""
    from meshwright.cluster.cluster import parse_cluster
    from meshwright.planning.answer import plan
    from meshwright.planning.carried import Carried

    if args.calibrate:
        return _calibrate()
    _refuse(args)
    for note in in_our_words(" ".join([args.strategy or "", *args.constraints]))[1]:
        print(f"note   {note}", file=sys.stderr)
    cluster = parse_cluster(args.cluster)
    if args.price is not None:
        cluster = cluster.with_price(args.price)
    carried = Carried() if args.megatron_args is None else _take_flags(args, cluster.gpus)
    asked = "fewest-gpus" if args.ask == "fewest-gpus" else args.objective
    limits = _limits(args, carried)
    made = plan(
        "llama3.1-8b" if args.model is None else args.model,
        cluster,
        sequence_length=args.seq_len,
        global_batch=args.global_batch,
        precision=args.precision or "bf16",
        stored=args.stored,
        moments=args.moments,
        objective=asked,
        constraints=args.constraints,
        strategy=args.strategy,
        micro_batch=args.micro_batch,
        tokens=_tokens(args.tokens),
        compare=args.ask is None,
        only=limits,
    )
    if args.try_out is not None:
        made = _try(args, made)
    further = _further(args, made)
    said = [str(answer["text"]) for answer in further.values()]
    if args.html is not None:
        from meshwright.planning.page import page

        _write("--html", args.html, page(made, said))
        said.append(f"wrote {args.html}")
    if args.emit is not None:
        further["emitted"] = _emitted(args, made, carried, limits)
        said.append(further["emitted"]["text"])
    if args.json:
        print(json.dumps(made.as_json() | further, indent=2, allow_nan=False))
    else:
        _print(made, said)
    answered = made.best is not None if args.ask is None else further["asked"]["answer"] is not None
    return 0 if answered else 1


def _limits(args: argparse.Namespace, carried: Carried) -> Limits | None:
    """What the file of --emit can hold; our own holds all, and --strategy names one."""
    from meshwright.interop.emit import Limits
    from meshwright.strategy import AUTO

    named = args.strategy is not None and args.strategy.split()[:1] not in ([], [AUTO])
    if args.emit in (None, FORMS[0]) or named:
        return None
    return Limits(args.emit, carried, _tokens(args.tokens))


def _further(args: argparse.Namespace, made: Plan) -> dict[str, dict[str, Any]]:
    """Answers to what else was asked, by their key in the JSON form; each has its `text`."""
    found = {}
    if args.ask is not None:
        found["asked"] = _inverse(args.ask, made)
    if args.spot is not None and made.best is not None:
        found["spot"] = _spot(args, made)
    # Also of what does not fit: how much is missing is what they want to know.
    shown = made.best or (made.found.nearest if made.found is not None else None)
    if args.rehearse is not None and shown is not None:
        from meshwright.planning.rehearse import rehearse

        rehearsal = rehearse(shown, args.rehearse)
        found["rehearsal"] = rehearsal.as_json() | {"text": str(rehearsal)}
    return found


def _emitted(args: argparse.Namespace, made: Plan, carried: Carried, limits: Limits | None) -> dict[str, Any]:
    """Write the file of --emit; gives which it is, what limited the search, and which settings nobody has chosen."""
    from meshwright.interop.emit import forms

    form, limited = forms()[args.emit], [str(limits)] if limits is not None else []
    found = {"form": args.emit, "file": None, "limited": limited[0] if limited else None, "defaults": []}
    if made.best is None:
        return {**found, "text": "\n\n".join(["nothing fits, so --emit wrote nothing", *limited])}
    out = args.out or Path(form.file)
    _write("--out", out, form.write(made, carried))
    cluster = made.best.scenario.cluster
    machines = max(1, cluster.gpus // cluster.node)
    told, defaults = [f"wrote {out}; {form.advice(out, carried, machines)}", *limited], []
    if form.has_training:
        told, defaults = [*told, carried.told], carried.defaults
    return {**found, "file": str(out), "defaults": defaults, "text": "\n\n".join(told)}


def _take_flags(args: argparse.Namespace, gpus: int) -> Carried:
    """Fill in what the flags of a Megatron-LM run say and the options do not; gives what else they say."""
    from meshwright.interop.plan_args import asked_by_megatron

    asked = asked_by_megatron(args.megatron_args, gpus, args.strategy)
    if not args.json:
        from meshwright.interop.show import print_translation

        print_translation(asked.translation, asked.resolved)
    args.model = asked.spec
    args.seq_len = args.seq_len or asked.sequence_length
    args.global_batch = args.global_batch or asked.global_batch
    args.precision = args.precision or asked.precision
    args.stored = args.stored or asked.carried.config.precision.stored
    args.moments = args.moments or asked.carried.config.precision.moments
    if args.strategy is None and args.ask is None and args.objective == "throughput":
        args.strategy, args.micro_batch = asked.strategy, args.micro_batch or asked.micro_batch
    return asked.carried


def _refuse(args: argparse.Namespace) -> None:
    """Raise a UserError where options are missing, contradict each other, or are no such number."""
    from meshwright.cluster.cluster import HERE

    if args.cluster is None:
        raise UserError("--cluster is missing; write a number of chips (64xh100), a cluster file, or here")
    if args.strategy is not None and args.ask is not None:
        raise UserError(
            f"--ask {args.ask} searches, and --strategy is one; write what must hold as constraints instead"
        )
    if args.ask == "fewest-gpus" and args.objective not in ("throughput", "fewest-gpus"):
        raise UserError(f"--ask fewest-gpus and --objective={args.objective} are two questions; ask one of them")
    if args.model is not None and args.megatron_args is not None:
        raise UserError("--model and --megatron-args both give a shape; leave one of them out")
    if args.model is None and args.megatron_args is None and args.ask != "largest-model":
        raise UserError("--model is missing; give a preset (`meshwright models` lists them), a folder or a config.json")
    if args.out is not None and args.emit is None:
        raise UserError(f"--out says where --emit writes; add --emit {', '.join(FORMS[:-1])} or {FORMS[-1]}")
    if args.interval is not None and args.spot is None:
        raise UserError("--interval says how often to save under interruptions; add --spot N")
    if args.spot is not None and not 0 < args.spot <= 86_400:
        raise UserError(f"--spot={args.spot} is not a number of interruptions a day; give one above 0, up to 86400")
    if args.interval is not None and not 1e-3 <= args.interval <= 1e9:
        raise UserError(f"--interval={args.interval} is not a number of seconds between checkpoints; give one above 0")
    _check_writable("--html", args.html)
    _check_writable("--out", args.out)
    if args.emit is not None and args.out is None:
        _check_new(args.emit)
    if args.try_limit is not None and (args.try_out is None or args.try_limit <= 0):
        raise UserError("--try-limit is a number of seconds above 0 for each candidate of --try; add --try K")
    if args.try_out is not None and args.cluster != HERE:
        raise UserError(
            f"--try runs candidates on this machine, and --cluster={args.cluster} is not this machine; "
            "use --cluster here, or give the command on one that has these chips"
        )
    if args.price is not None and not 0 < args.price < 1e9:
        raise UserError(f"--price={args.price} is not money for a chip and hour; give a number above 0")


def _check_writable(option: str, path: Path | None) -> None:
    """Raise a UserError where a file cannot be written, before the work is done."""
    if path is not None and path.is_dir():
        raise UserError(f"{option}={path} is a folder; name a file in it")
    if path is not None and not path.parent.is_dir():
        raise UserError(f"{option}={path}: there is no folder {path.parent}; make it first")


def _check_new(form: str) -> None:
    """Raise a UserError where a file that nobody has named is there already."""
    from meshwright.interop.emit import forms

    file = forms()[form].file
    if Path(file).exists():
        raise UserError(f"--emit {form} would write {file}, which is there already; --out {file} replaces it")


def _write(option: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{option}={path} cannot be written: {error.strerror}") from None


def _try(args: argparse.Namespace, made: Plan) -> Plan:
    """Run the best candidates."""
    from meshwright.planning.tryout import LIMIT_S, try_out
    from meshwright.torch_support import require_torch

    require_torch()
    return try_out(
        made, args.try_out, args.try_limit or LIMIT_S, say=lambda line: print(line, file=sys.stderr, flush=True)
    )


def _calibrate() -> int:
    """Measure this machine."""
    from meshwright.torch_support import require_torch

    require_torch()
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    from meshwright.planning.calibrate import calibrate, lines_of

    found, path = calibrate(say=lambda line: print(line, flush=True))
    for line in lines_of(found):
        print(line)
    print(f"wrote {path}; plans for this machine and for clusters of this chip use it from now on")
    return 0


def _print(made: Plan, said: list[str]) -> None:
    from rich.console import Console

    from meshwright.planning.show import show

    console = Console() if sys.stdout.isatty() else Console(width=int(os.environ.get("COLUMNS", _PLAIN_WIDTH)))
    show(made, console)
    for line in said:
        console.print(f"\n{line}", highlight=False, markup=False, soft_wrap=True)


def _tokens(text: str | None) -> float | None:
    if text is None:
        return None
    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper(), 1.0)
    try:
        value = float(text[:-1] if scale != 1.0 else text) * scale
    except ValueError:
        value = 0.0
    if not 0 < value < 1e18:
        raise UserError(f"--tokens={text} is not a number of tokens; write 300e9, 300B or 2T")
    return value


def _inverse(ask: str, made: Plan) -> dict[str, object]:
    """The answer to an inverse question."""
    from meshwright.planning import inverse

    question = made.question
    if ask == "fewest-gpus":
        if made.best is None:
            return {"question": ask, "answer": None, "text": f"{ask}: nothing fits on {question.cluster}"}
        gpus = question.cluster.gpus
        return {
            "question": ask,
            "answer": gpus,
            "text": f"fewest GPUs on which it fits: {gpus} ({made.best.strategy})",
        }
    found: tuple[object, object] | None
    if ask == "longest-sequence":
        found = inverse.longest_sequence(question)
    elif ask == "largest-micro-batch":
        found = inverse.largest_micro_batch(question)
    else:
        found = inverse.largest_model(question)
    if found is None:
        return {"question": ask, "answer": None, "text": f"{ask}: nothing fits"}
    value, candidate = found
    words = ask.replace("-", " ")
    strategy = candidate.strategy
    bounded = ask == "longest-sequence" and value == question.spec.max_position_embeddings
    limit = "; the model has no more positions" if bounded else ""
    return {
        "question": ask,
        "answer": value,
        "strategy": str(strategy),
        "text": f"{words} that fits: {value} ({strategy}){limit}",
    }


def _spot(args: argparse.Namespace, made: Plan) -> dict[str, object]:
    """What interruptions cost."""
    from meshwright.planning.inverse import spot

    assert made.best is not None
    found = spot(made.best, args.spot, args.interval)
    text = (
        f"with {args.spot:g} interruptions a day and a checkpoint of {found.checkpoint_s:.1f} s every "
        f"{found.interval_s:.0f} s, {found.slower:.1%} of the time is lost; the best interval is "
        f"{found.best_interval_s:.0f} s ({found.best_slower:.1%} lost)"
    )
    if found.best_slower >= 1:
        text = (
            f"with {args.spot:g} interruptions a day training does not get on: a checkpoint takes "
            f"{found.checkpoint_s:.1f} s, and at every interval more than all of the time is lost"
        )
    elif found.slower >= 1:
        text = (
            f"with {args.spot:g} interruptions a day and a checkpoint of {found.checkpoint_s:.1f} s every "
            f"{found.interval_s:.0f} s training does not get on: more than all of the time is lost; the best interval "
            f"is {found.best_interval_s:.0f} s ({found.best_slower:.1%} lost)"
        )
    days, cost = made.days(made.best), made.cost(made.best)
    if days is None or found.slower >= 1:
        return {**vars(found), "text": text}
    # So much of the time is lost, not added.
    longer = 1 / (1 - found.slower)
    text += f"; all tokens take {days * longer:,.1f} days instead of {days:,.1f}"
    text += f", for {cost * longer:,.0f} instead of {cost:,.0f}" if cost is not None else ""
    return {**vars(found), "days": days * longer, "cost": None if cost is None else cost * longer, "text": text}
