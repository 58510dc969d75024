"""Where the ranks of a run lie on the machines that have met: the order of axes, and that of machines. No torch.

It is in order unless parallel.cluster is a file that knows paths between the machines by name; then the planner's
search says which order should be fastest. The first machine asks it, and the others take its answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from meshwright.axis_order import AUTO, AXES, IN_ORDER, is_plain, parse_order, short
from meshwright.cluster.cluster import parse_cluster
from meshwright.cluster.fabric import fabric_of
from meshwright.config import RunConfig
from meshwright.errors import ConfigError
from meshwright.strategy import Strategy
from meshwright.training.planned import Planned, predict


@dataclass(frozen=True)
class Placed:
    """An order of axes and machines."""

    placement: str
    """For parallel.placement: never auto."""
    machines: tuple[int, ...]
    """In the order of the ranks."""
    said: tuple[str, ...] = ()


def is_placed(config: RunConfig) -> bool:
    """Whether there is something that an order of machines could follow from."""
    given = config.parallel.cluster
    if config.parallel.placement == IN_ORDER or given is None or config.run.device == "cuda-shared":
        return False
    return bool(parse_cluster(given).paths)


def place_run(planned: Planned, machines: Sequence[tuple[str, int]]) -> Placed:
    """The order for a run on machines with these names and ranks."""
    config, strategy = planned.config, Strategy.parse(planned.strategy, planned.world)
    asked, given = config.parallel.placement, tuple(range(len(machines)))
    try:
        order = parse_order(asked, strategy)
    except ConfigError as error:
        if planned.strategy == planned.asked.parallel.strategy:
            raise
        # Made for the strategy that was asked for, and the ranks that are left do not allow that one.
        return Placed(IN_ORDER, given, (f"placement: in order, since {error}",))
    plain = Placed(short(order, strategy), given)
    if len(machines) == 1 or strategy.world == 1 or not is_placed(config):
        return plain
    counts, left = [], strategy.world
    for _, count in machines:
        counts.append(min(count, left))
        left -= counts[-1]
    if 0 in counts:
        return plain  # Somebody stays idle, and who that is follows from the order.
    from meshwright.planning.placement import placements_of

    candidate = predict(config, strategy, max(counts)).candidates[0]
    names = [name for name, _ in machines]
    cluster = candidate.scenario.cluster
    strangers = [name for name in names if name not in cluster.names]
    said: tuple[str, ...] = ()
    if strangers:
        said = (
            f"placement: {config.parallel.cluster} does not name {', '.join(strangers)}, whose links count as free",
        )
    fabric = fabric_of(cluster, names, counts)
    best, usual = placements_of(candidate, fabric, only=() if asked == AUTO else order)
    if best.key == (AXES, given) or best.key == (order, given):
        return Placed(plain.placement, given, said)
    words = f"machines {' '.join(names[node] for node in best.nodes)}"
    if not is_plain(best.order, strategy):
        words = f"axes {short(best.order, strategy)} (outermost first), {words}"
    gain = f"the step should wait {best.seconds:.3g} s for links instead of {usual.seconds:.3g} s in order"
    return Placed(short(best.order, strategy), best.nodes, (*said, f"placement: {words}; {gain}"))


def machines_of_ranks(hosts: Sequence[str]) -> list[tuple[str, int]] | None:
    """Machines and their ranks, from the host of every rank; None where those of one machine are not neighbours."""
    found = [(host, len(list(ranks))) for host, ranks in groupby(hosts)]
    return found if len({host for host, _ in found}) == len(found) else None


def new_rank(rank: int, counts: Sequence[int], machines: Sequence[int]) -> int:
    """The number of a rank once its machine stands elsewhere."""
    node, first = 0, 0
    while rank >= first + counts[node]:
        node, first = node + 1, first + counts[node]
    before = machines[: list(machines).index(node)]
    return sum(counts[one] for one in before) + rank - first
