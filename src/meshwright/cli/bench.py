"""One training step on this machine's device: Meshwright, a bare PyTorch loop and every peer that is installed."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.cli import bench_comm
from meshwright.cli.main import Action
from meshwright.errors import ConfigError, UserError

if TYPE_CHECKING:
    from meshwright.bench.roofline import Ceilings
    from meshwright.bench.run import Entry
    from meshwright.bench.trial import Trial

_PLAIN_WIDTH = 160
PRECISIONS = ("bf16", "float32")
RECOMPUTE = ("none", "selective", "full")


def describe_step(parser: argparse.ArgumentParser) -> None:
    """What `meshwright bench step` takes."""
    parser.add_argument("--model", metavar="PRESET", help="a preset's name; settings of model.spec change its shape")
    parser.add_argument("--sequence", type=int, metavar="N", help="tokens of a sequence (default: up to 4096)")
    parser.add_argument(
        "--micro-batch",
        default="1",
        metavar="N[,N...]",
        help="sequences of a step (default 1); of several, each contender's fastest is shown",
    )
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="timed steps of a process (default 20)")
    parser.add_argument("--warm-up", type=int, default=5, metavar="N", help="steps before them (default 5)")
    parser.add_argument("--repeats", type=int, default=2, metavar="N", help="processes of each contender (default 2)")
    parser.add_argument("--precision", default="bf16", choices=PRECISIONS, help="of products (default bf16)")
    parser.add_argument("--recompute", default="none", choices=RECOMPUTE, help="of activations (default none)")
    parser.add_argument("--contenders", metavar="A,B", help="only these (default: all that are installed)")
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="NAME:SETTINGS",
        help="Meshwright once more, with these settings besides; as often as wanted",
    )
    parser.add_argument("--baseline", default="bare", metavar="NAME", help="what ratios are taken to (default bare)")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="where (default auto)")
    parser.add_argument(
        "--compile", default="auto", choices=("auto", "on", "off"), help="of bare and torchtitan (default: on a GPU)"
    )
    parser.add_argument("--full-attention", action="store_true", help="MFU counts attention of all tokens to all")
    parser.add_argument("--limit", type=float, default=900.0, metavar="S", help="seconds for a process (default 900)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything; docs/bench.md says what is in it")
    parser.add_argument("settings", nargs="*", metavar="section.key=value", help="settings of Meshwright's run")
    parser.epilog = (
        "exit code: 0 all that are installed ran, 1 one of them failed, 2 something to change in the command\n\n"
        "examples:\n"
        "  meshwright bench step --model llama3.2-1b --sequence 8192 --micro-batch 1,2,4\n"
        "  meshwright bench step --model llama3.2-1b model.spec.tie_word_embeddings=false --json step.json\n"
        "  meshwright bench step --model llama3.2-1b --variant fp8:train.precision=fp8 "
        "--variant \"lean:'parallel.strategy=dp=1 recompute=selective'\"\n"
        "  meshwright bench step --model tiny --contenders meshwright,bare --device cpu --sequence 64 --steps 5\n"
    )


def _step(args: argparse.Namespace) -> int:
    from meshwright.bench.run import run_all
    from meshwright.bench.table import Report, rows_of, show
    from meshwright.torch_support import require_torch

    entries = entries_of(args)
    contenders, trials = [one.contender for one in entries], entries[0].trials
    require_torch()
    found = run_all([one for one in entries if one.contender.missing() is None], args.repeats, args.limit, say=_say)
    ceilings, no_ceilings = _ceilings(trials[0], args.limit)
    rows = rows_of(contenders, trials, found)
    report = Report(tuple(trials), rows, args.baseline, ceilings, no_ceilings, args.full_attention)
    if args.json is not None:
        args.json.write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
    from rich.console import Console

    width = None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", _PLAIN_WIDTH))
    show(report, Console(width=width, highlight=False))
    asked_for = args.contenders is not None
    failed = [
        row for row in report.best() if row.trouble is not None and (asked_for or row.trouble.startswith("failed: "))
    ]
    return 1 if failed else 0


def entries_of(args: argparse.Namespace) -> list[Entry]:
    """Who is compared, each with its trials; refused before a process starts."""
    from meshwright.bench.contenders import CONTENDERS, OURS, chosen
    from meshwright.bench.run import Entry

    contenders = chosen(None if args.contenders is None else args.contenders.split(","))
    if args.baseline not in CONTENDERS:
        raise UserError(f"--baseline={args.baseline} is no contender; they are {', '.join(CONTENDERS)}")
    trials = _trials(args)
    entries = [Entry(one, trials) for one in contenders]
    for name, settings in _variants(args.variant):
        entries.append(Entry(CONTENDERS[OURS].variant(name, shlex.join(settings)), _trials(args, settings)))
    return entries


def _variants(texts: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Names and settings of variants."""
    seen: set[str] = set()
    for text in texts:
        name, _, settings = text.partition(":")
        if not re.fullmatch(r"[\w.+-]+", name) or name in seen or not settings.strip():
            raise UserError(
                f"--variant={text}: write a name of its own without spaces, a colon and settings, "
                "such as fp8:train.precision=fp8"
            )
        seen.add(name)
        yield name, shlex.split(settings)


def _trials(args: argparse.Namespace, besides: Sequence[str] = ()) -> list[Trial]:
    """What is measured, for each micro-batch; refused before a process starts."""
    from meshwright.bench.trial import Trial
    from meshwright.config_load import load_config
    from meshwright.strategy import Strategy
    from meshwright.training.job import model_spec

    for name in ("steps", "repeats"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name}={getattr(args, name)} measures nothing; use a whole number from 1")
    if args.warm_up < 0 or args.limit <= 0:
        raise UserError("--warm-up takes a number of steps from 0, --limit a number of seconds above 0")
    if args.json is not None and (args.json.is_dir() or not args.json.parent.is_dir()):
        raise UserError(f"--json={args.json} is not a file in a folder that is there")
    if any("=" not in one for one in (*args.settings, *besides)):
        raise ConfigError("settings are section.key=value, such as train.grad_clip=0")
    total = args.steps + args.warm_up
    given = [f"model.preset={args.model}"] if args.model is not None else []
    # What follows wins, so that anything can be set by hand.
    given += [f"parallel.strategy=dp=1 recompute={args.recompute}", f"train.precision={args.precision}"]
    given += ["train.schedule=constant", *args.settings, *besides, f"run.device={args.device}", f"train.steps={total}"]
    spec = model_spec(load_config(None, given))
    length = args.sequence or min(spec.max_position_embeddings, 4096)
    if not 0 < length <= spec.max_position_embeddings:
        raise ConfigError(
            f"--sequence={length} is not from 1 to the model's {spec.max_position_embeddings} positions; "
            "model.spec.max_position_embeddings changes that"
        )
    trials = []
    for text in args.micro_batch.split(","):
        if not text.isdecimal() or int(text) < 1:
            raise UserError(f"--micro-batch={args.micro_batch}: write whole numbers from 1, such as 1,2,4")
        config = load_config(None, [*given, f"data.sequence_length={length}", f"train.global_batch={text}"])
        Strategy.parse(config.parallel.strategy, 1).check(spec, 1, length, config.train.optimizer)
        trials.append(Trial("", config, args.steps, args.warm_up, args.compile))
    return trials


def _ceilings(trial: Trial, limit_s: float) -> tuple[Ceilings | None, str | None]:
    """What the device reaches at best; or why that is not known."""
    from meshwright.bench.roofline import Ceilings
    from meshwright.bench.run import run_module

    _say("ceilings ...")
    asked = {"device": trial.config.run.device, "dtype": trial.config.train.precision}
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
        found = run_module("ceilings", asked, limit_s, Path(folder), {})
    return (None, found) if isinstance(found, str) else (Ceilings(**found), None)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


ACTIONS = {
    "comm": Action("collectives over all ranks or over a strategy's axes", bench_comm.describe, bench_comm.run),
    "step": Action("one training step: ms, tokens/s, MFU, memory, time to first step; the floor", describe_step, _step),
}
