"""What this device reaches at best: a large matrix product, and a copy in its memory.

A program for `run.py`: `python -m meshwright.bench.ceilings ASKED.json FOUND.json`. The measurements are those of
`meshwright plan --calibrate`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from meshwright.files import write_atomically
from meshwright.parallel.world import join_world
from meshwright.planning.measure import ON_CPU, ON_GPU, Bench, copy_speed, product_speed

LARGEST = 3
"""Of the shapes in the calibration's table, how many of the largest are tried: which is fastest differs by chip."""


def main() -> int:
    """Measure in the dtype and on the device that the first file asks for; leave it in the second."""
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with join_world(asked["device"], 120.0) as world:
        sizes = ON_CPU if world.device.type == "cpu" else ON_GPU
        bench = Bench(world, sizes)
        largest = sorted(sizes.products, key=lambda shape: shape[0] * shape[1] * shape[2])[-LARGEST:]
        found = {
            "flops": max(product_speed(bench, shape, asked["dtype"])[-1] for shape in largest),
            "bytes_per_s": copy_speed(bench),
        }
    write_atomically(Path(sys.argv[2]), json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
