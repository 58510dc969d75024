"""Collectives timed over all ranks, or over each axis of a strategy."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.bench.comm_rows import Row, lines_through, sizes
from meshwright.errors import UserError, nearest

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send_receive")
DTYPES = ("float32", "float64", "bf16", "fp16")


def describe(parser: argparse.ArgumentParser) -> None:
    """What `meshwright bench comm` takes."""
    parser.add_argument("operations", nargs="*", metavar="OPERATION", help=f"{', '.join(COLLECTIVES)} (default: all)")
    parser.add_argument("--nproc", type=int, default=2, metavar="N", help="ranks of this machine (default 2)")
    parser.add_argument("-b", "--begin", default="8", metavar="SIZE", help="smallest size in bytes (default 8)")
    parser.add_argument("-e", "--end", default="128M", metavar="SIZE", help="largest size (default 128M)")
    parser.add_argument("-f", "--factor", type=int, default=2, metavar="N", help="from size to size (default 2)")
    parser.add_argument("--strategy", metavar="TEXT", help="measure over each of its axes (default: all ranks)")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="of elements")
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
    parser.add_argument("--warm-up", type=int, default=5, metavar="N", help="calls before those that count (default 5)")
    parser.add_argument("--iters", type=int, default=20, metavar="N", help="calls that count, if they are short")
    parser.add_argument("--no-check", action="store_true", help="do not look whether results are right")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "cuda-shared"), help="where")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows and the lines through them")
    parser.epilog = (
        "Sizes, times and bandwidths are those of nccl-tests. Under torchrun or srun all ranks of the job take part.\n"
        "exit code: 0 all results were right, 1 one was wrong, 2 something to change in the command\n\n"
        "examples:\n"
        "  meshwright bench comm all_reduce --nproc 4 -b 8 -e 128M -f 2\n"
        "  meshwright bench comm --algorithms --nproc 4 -b 8 -e 64M -f 64\n"
        '  meshwright bench comm all_reduce all_gather --nproc 4 --strategy "dp=2 tp=2" --json comm.json\n'
    )


def run(args: argparse.Namespace) -> int:
    """Measure, and say whether all was right."""
    unknown = [name for name in args.operations if name not in COLLECTIVES]
    if unknown:
        raise UserError(f"{unknown[0]} is no operation{nearest(unknown[0], COLLECTIVES)}; {', '.join(COLLECTIVES)} are")
    if args.iters < 1 or args.warm_up < 0:
        raise UserError("--iters takes a whole number from 1, --warm-up one from 0")
    wanted = sizes(args.begin, args.end, args.factor)
    from meshwright.torch_support import require_torch

    require_torch()
    from meshwright.bench import comm_algorithms
    from meshwright.bench.comm import Asked, measure
    from meshwright.bench.comm_paths import measure_paths
    from meshwright.launch.local import run_ranks
    from meshwright.parallel.world import join_world, launched_ranks
    from meshwright.strategy import Strategy

    launched = launched_ranks()
    world = launched[1] if launched is not None else args.nproc
    if world < 2:
        raise UserError("one rank has nobody to talk to; use --nproc 2 or more")
    if args.strategy is not None:
        Strategy.parse(args.strategy, world)
    if args.algorithms and (args.operations or args.strategy is not None):
        raise UserError("--algorithms are those of an all-reduce over all ranks: without operations and --strategy")
    if args.node_size is not None and (not args.algorithms or args.node_size < 1):
        raise UserError("--node-size takes a whole number from 1, and goes with --algorithms")
    if args.paths is not None:
        if launched is None or args.operations or args.strategy is not None or args.algorithms:
            raise UserError("--paths goes between machines, under torchrun or srun, without other measurements")
        with join_world(args.device, 600.0, launched) as joined:
            measure_paths(args.paths, joined)
        return 0
    asked = Asked(
        tuple(args.operations or COLLECTIVES), tuple(wanted), args.strategy, args.dtype, args.warm_up, args.iters,
        not args.no_check,
    )  # fmt: skip
    work = partial(comm_algorithms.measure, asked, args.node_size) if args.algorithms else partial(measure, asked)
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
        out = Path(folder) / "rows.json"
        if launched is None:
            run_ranks(partial(work, str(out)), args.nproc, device=args.device)
        else:
            with join_world(args.device, 600.0, launched) as joined:
                work(str(out), joined)
        if not out.exists():
            # Another rank prints.
            return 0
        found = json.loads(out.read_text(encoding="utf-8"))
    wrong = sum(row["wrong"] or 0 for row in found)
    facts = {"algorithms": found} if args.algorithms else _lines([Row(**row) for row in found])
    print(f"out of bounds values: {wrong} {'OK' if not wrong else 'FAILED'}")
    if args.json is not None:
        args.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return 1 if wrong else 0


def _lines(rows: Sequence[Row]) -> dict[str, Any]:
    """Print latencies and bandwidths; gives all that is to be written."""
    print("\nlatency and bus bandwidth, from all sizes:")
    lines = []
    for row, line in lines_through(rows):
        print(f"  {row.operation:16}{row.axis:8}{line.latency_s * 1e6:10.1f} us{line.bandwidth / 1e9:10.2f} GB/s")
        lines.append({"operation": row.operation, "axis": row.axis, "ranks": row.ranks, **line._asdict()})
    return {"rows": [row.as_json() for row in rows], "lines": lines}
