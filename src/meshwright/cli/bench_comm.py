"""Collectives timed over all ranks, or over each axis of a strategy."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.bench.comm_rows import Row, kept_lines, lines_through, sizes
from meshwright.bench.comm_series import size_words
from meshwright.comm.bandwidth import bus_factor
from meshwright.errors import UserError, nearest

if TYPE_CHECKING:
    from meshwright.bench.comm import Asked

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send_receive")
NCCL_TESTS = {"alltoall": "all_to_all", "sendrecv": "send_receive"}
"""Names that programs of nccl-tests have, where they differ."""
DTYPES = ("float32", "float64", "bf16", "fp16")
TERMINAL = "-"
"""What `--plot` alone means."""
_FACTS = ("backend", "device", "torch")
_HOW: dict[str, Any] = {
    "begin": "8", "end": "128M", "factor": 2, "dtype": "float32", "warm_up": 5, "iters": 20, "no_check": False,
}  # fmt: skip
"""How collectives are measured, unless told otherwise; paths have nothing of it."""


def describe(parser: argparse.ArgumentParser) -> None:
    """What `meshwright bench comm` takes."""
    parser.add_argument("operations", nargs="*", metavar="OPERATION", help=f"{', '.join(COLLECTIVES)} (default: all)")
    parser.add_argument("--nproc", type=int, default=2, metavar="N", help="ranks of this machine (default 2)")
    parser.add_argument("-b", "--begin", metavar="SIZE", help="smallest size in bytes (default 8)")
    parser.add_argument("-e", "--end", metavar="SIZE", help="largest size (default 128M)")
    parser.add_argument("-f", "--factor", type=int, metavar="N", help="from size to size (default 2)")
    parser.add_argument("--strategy", metavar="TEXT", help="measure over each of its groups (default: all ranks)")
    parser.add_argument("--dtype", choices=DTYPES, help="of elements")
    parser.add_argument(
        "--algorithms", action="store_true", help="all-reduce algorithms over messages beside the backend's own instead"
    )
    parser.add_argument(
        "--node-size", type=int, metavar="N", help="with --algorithms: take N neighbouring ranks each for a machine"
    )
    parser.add_argument(
        "--paths",
        type=Path,
        metavar="FILE",
        help="between every two machines instead: writes a cluster file",
    )
    parser.add_argument("--warm-up", type=int, metavar="N", help="calls before those that count (default 5)")
    parser.add_argument("--iters", type=int, metavar="N", help="calls that count, if they are short")
    parser.add_argument("--no-check", action="store_true", help="do not look whether results are right")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "cuda-shared"), help="where")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows and the lines through them, or paths")
    parser.add_argument(
        "--plot", nargs="?", const=TERMINAL, metavar="FILE.png",
        help="draw bandwidth and time by size: in the terminal, or into a file",
    )  # fmt: skip
    parser.add_argument("--no-save", action="store_true", help="do not keep latencies and bandwidths for later plans")
    parser.set_defaults(**_HOW)
    parser.epilog = (
        "Sizes and bandwidths are those of nccl-tests; on CPU cores times are medians of the calls, not means.\n"
        "Under torchrun or srun all ranks of the job take part.\n"
        "exit code: 0 all results were right, 1 one was wrong, 2 something to change in the command\n\n"
        "examples:\n"
        "  meshwright bench comm all_reduce --nproc 4 -b 8 -e 128M -f 2 --plot\n"
        "  meshwright bench comm --algorithms --nproc 4 -b 8 -e 64M -f 64 --plot algorithms.png\n"
        '  meshwright bench comm all_reduce all_gather --nproc 4 --strategy "dp=2 tp=2" --json comm.json\n'
    )


def run(args: argparse.Namespace) -> int:
    """Measure, and say whether all was right."""
    wanted = _check(args)
    from meshwright.torch_support import require_torch

    require_torch()
    if args.paths is not None:
        return _paths(args)
    from meshwright.bench.comm import Asked

    asked = Asked(
        tuple(args.operations or COLLECTIVES), tuple(wanted), args.strategy, args.dtype, args.warm_up, args.iters,
        not args.no_check,
    )  # fmt: skip
    found = _measure(args, asked)
    if found is None:
        # Another rank prints.
        return 0
    wrong = sum(row["wrong"] or 0 for row in found["rows"])
    if args.algorithms:
        facts: dict[str, Any] = {"algorithms": found["rows"]}
    else:
        rows = [Row(**row) for row in found["rows"]]
        facts = _lines(rows)
    facts |= {fact: found[fact] for fact in _FACTS}
    print(f"out of bounds values: {_verdict(wrong, asked.check)}")
    if args.json is not None:
        _write(args.json, as_json(facts))
    if not (args.algorithms or args.no_save or wrong):
        _save(rows, found)
    if args.plot is not None:
        _plot(args, found)
    return 1 if wrong else 0


def _verdict(wrong: int, looked: bool) -> str:
    """As nccl-tests has it; where nobody looked nothing is right."""
    if not looked:
        return "not looked for (--no-check)"
    return f"{wrong} {'OK' if not wrong else 'FAILED'}"


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--json {path} cannot be written: {error.strerror}") from None


def as_json(facts: dict[str, Any]) -> str:
    """For a file; null where there is no number."""
    return json.dumps(_finite(facts), indent=1, allow_nan=False) + "\n"


def _finite(tree: Any) -> Any:
    """The same without numbers that JSON has no word for."""
    if isinstance(tree, dict):
        return {key: _finite(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_finite(value) for value in tree]
    return None if isinstance(tree, float) and not isfinite(tree) else tree


def _check(args: argparse.Namespace) -> list[int]:
    """Refuse what makes no sense; gives the sizes."""
    for option, path in (("--json", args.json), ("--paths", args.paths)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise UserError(f"{option} {path} is no file in a folder that is there; make {path.parent} first")
    plain = [name.removesuffix("_perf") for name in args.operations]
    args.operations = [NCCL_TESTS.get(name, name) for name in plain]
    unknown = [name for name in args.operations if name not in COLLECTIVES]
    if unknown:
        raise UserError(f"{unknown[0]} is no operation{nearest(unknown[0], COLLECTIVES)}; {', '.join(COLLECTIVES)} are")
    if args.iters < 1 or args.warm_up < 0:
        raise UserError("--iters takes a whole number from 1, --warm-up one from 0")
    if args.algorithms and (args.operations or args.strategy is not None):
        raise UserError("--algorithms are those of an all-reduce over all ranks: without operations and --strategy")
    if args.node_size is not None and (not args.algorithms or args.node_size < 1):
        raise UserError("--node-size takes a whole number from 1, and goes with --algorithms")
    if args.paths is not None:
        _check_paths(args)
    if args.plot not in (None, TERMINAL):
        from meshwright.bench.comm_picture import require_matplotlib

        path = Path(args.plot)
        if path.suffix != ".png" or path.is_dir() or not path.parent.is_dir():
            raise UserError(
                f"--plot={args.plot} is no .png file in a folder that is there; --plot alone draws in the terminal, "
                "and goes after the operations"
            )
        require_matplotlib()
    return sizes(args.begin, args.end, args.factor)


def _check_paths(args: argparse.Namespace) -> None:
    """Refuse what is about collectives."""
    named = [name for name in ("strategy", "algorithms", "plot") if getattr(args, name)]
    named += [name for name, usual in _HOW.items() if getattr(args, name) != usual]
    told = [*args.operations, *(f"--{name.replace('_', '-')}" for name in named)]
    if told:
        raise UserError(
            f"--paths measures messages of its own between machines, and nothing else: leave {', '.join(told)} out"
        )


def _paths(args: argparse.Namespace) -> int:
    """Measure between machines, of whose ranks this is one."""
    from meshwright.bench.comm import facts_of
    from meshwright.bench.comm_paths import measure_paths
    from meshwright.parallel.world import join_world, launched_ranks

    launched = launched_ranks()
    if launched is None:
        raise UserError("--paths goes between machines: start it under torchrun or srun")
    with join_world(args.device, 600.0, launched) as joined:
        found = measure_paths(args.paths, joined)
        if found is not None and args.json is not None:
            facts = facts_of(joined)
            _write(args.json, as_json({"paths": found} | {fact: facts[fact] for fact in _FACTS}))
    return 0


def _measure(args: argparse.Namespace, asked: Asked) -> dict[str, Any] | None:
    """What the first rank found, in that rank or in the process that started all of them; None in others."""
    from meshwright.bench import comm, comm_algorithms
    from meshwright.launch.local import run_ranks
    from meshwright.parallel.world import join_world, launched_ranks
    from meshwright.strategy import Strategy

    launched = launched_ranks()
    world = launched[1] if launched is not None else args.nproc
    if world < 2:
        raise UserError("one rank has nobody to talk to; use --nproc 2 or more")
    if args.strategy is not None:
        Strategy.parse(args.strategy, world)
    work = partial(comm_algorithms.measure, asked, args.node_size) if args.algorithms else partial(comm.measure, asked)
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
        out = Path(folder) / "rows.json"
        if launched is None:
            run_ranks(partial(work, str(out)), args.nproc, device=args.device)
        else:
            with join_world(args.device, 600.0, launched) as joined:
                work(str(out), joined)
        return json.loads(out.read_text(encoding="utf-8")) if out.exists() else None


def _lines(rows: Sequence[Row]) -> dict[str, Any]:
    """Print latencies and bandwidths; gives all that is to be written."""
    found = list(lines_through(rows))
    if found:
        print("\nlatency and bus bandwidth, from all sizes:")
    else:
        print("\nlatency and bus bandwidth: not known from one size; -b and -e further apart tell them")
    lines = []
    for row, line in found:
        bent = ""
        if line.bend is not None and line.beyond is not None:
            whole = line.bend / bus_factor(row.operation, row.ranks)
            bent = f", above {size_words(whole)} {line.beyond / 1e9:.3g} GB/s"
        print(
            f"  {row.operation:16}{row.axis:12}{line.latency_s * 1e6:10.1f} us{line.bandwidth / 1e9:10.3g} GB/s{bent}"
        )
        lines.append(
            {"operation": row.operation, "axis": row.axis, "ranks": row.ranks, "inside": row.inside, **line._asdict()}
        )
    return {"rows": [row.as_json() for row in rows], "lines": lines}


def _save(rows: Sequence[Row], found: dict[str, Any]) -> None:
    """Keep the lines where `plan` finds them, and say so."""
    from meshwright.cluster.calibration import write_lines

    if not found["chip"]:
        print(f"nothing is kept for plans: {found['device']} is in no table of chips (docs/plan.md)")
        return
    when = datetime.now(UTC).isoformat(timespec="seconds")
    kept, left = kept_lines(rows, found["backend"], found["torch"], when)
    if left:
        print(f"not kept for plans: {', '.join(left)}, whose sizes say little about bandwidth; a larger -e tells more")
    if kept:
        try:
            path, ignored = write_lines(found["chip"], kept)
        except OSError as error:
            raise UserError(f"what was measured cannot be kept for plans: {error}; --no-save keeps nothing") from None
        if ignored:
            print(ignored)
        print(f"kept for later plans in {path}: {len(kept)} line{'s' * (len(kept) > 1)}")


def _plot(args: argparse.Namespace, found: dict[str, Any]) -> None:
    from meshwright.bench.comm_series import of_algorithms, of_rows

    series = (
        of_algorithms(found["rows"], found["ranks"])
        if args.algorithms
        else of_rows([Row(**row) for row in found["rows"]])
    )
    if args.plot == TERMINAL:
        from meshwright.bench.terminal_plot import show

        show(series, sys.stdout)
        return
    from meshwright.bench.comm_picture import draw

    draw(series, Path(args.plot))
    print(f"drawn in {args.plot}")
