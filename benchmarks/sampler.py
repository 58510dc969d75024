"""How long it takes to find the sample at any position, and how much memory, as the corpus grows.

The order is computed, so both should not depend on the number of sequences. Next to it, what a stored shuffle of
the same length (one 64-bit number for each sequence) takes to make, and the memory that it holds.
"""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc
from collections.abc import Callable

import numpy as np

from meshwright.data.sampler import PERIOD, Order, slot_shares


def median_microseconds(run: Callable[[int], object], repeats: int) -> float:
    """Median time of a call, each at another position."""
    seconds = []
    for number in range(repeats):
        start = time.perf_counter()
        run(number)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e6


def stored(count: int, limit: int) -> str:
    """Seconds to make a stored shuffle, where it is small enough to be made here."""
    if count > limit:
        return "-"
    start = time.perf_counter()
    np.random.default_rng(0).permutation(count)
    return f"{time.perf_counter() - start:.3f}"


def measure(count: int, corpora: int, batch: int, repeats: int, limit: int) -> str:
    """One line of the table."""
    tracemalloc.start()
    order = Order([count] * corpora, slot_shares([1.0] * corpora), 0, [count // 100] * corpora)
    positions = np.random.default_rng(0).integers(0, 3 * count, size=repeats)
    order.locate(np.arange(batch, dtype=np.int64) + positions[0])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    one = median_microseconds(lambda number: order.locate(positions[number : number + 1]), repeats)
    many = median_microseconds(lambda number: order.locate(np.arange(batch) + positions[number]), repeats)
    return (
        f"{count:>16,}{corpora:>9}{one:>14.0f}{many / batch:>16.2f}{peak / 1024:>12,.0f}"
        f"{stored(count, limit):>16}{count * 8 / 1024:>18,.0f}"
    )


def main() -> None:
    """Print the table."""
    measure(1000, 1, 8, 1, 0)  # what is loaded on first use is not memory of the first line
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--largest-stored", type=int, default=10**7, help="make stored shuffles up to this length")
    arguments = parser.parse_args()
    print(f"blocks of {PERIOD}, 1% held out, random positions in three epochs, batches of {arguments.batch}\n")
    print(
        f"{'sequences':>16}{'corpora':>9}{'one call, us':>14}{'in a batch, us':>16}{'peak, KiB':>12}"
        f"{'stored, s':>16}{'stored, KiB':>18}"
    )
    for corpora in (1, 4):
        for count in (10**4, 10**6, 10**8, 10**10):
            print(measure(count, corpora, arguments.batch, arguments.repeats, arguments.largest_stored))


if __name__ == "__main__":
    main()
