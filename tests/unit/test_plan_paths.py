"""Paths between machines in the planner's times: what waits for them loses, and the search still finds the best."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import pytest

from meshwright.cluster.cluster import Cluster, parse_cluster
from meshwright.cluster.fabric import Path as NodePath
from meshwright.config import load_config
from meshwright.models.spec import ModelSpec
from meshwright.planning.answer import plan
from meshwright.planning.answer_json import plan_json
from meshwright.planning.carried import Carried
from meshwright.planning.constraints import parse_constraints
from meshwright.planning.emit import run_file
from meshwright.planning.explain import explain
from meshwright.planning.made import Plan
from meshwright.planning.placement import with_paths
from meshwright.planning.question import Candidate, Question, estimate
from meshwright.planning.runners import loss
from meshwright.planning.search import search
from meshwright.planning.space import Space, plain
from meshwright.planning.timing import Timer
from meshwright.schedules import stages_per_rank
from meshwright.training.placed import is_placed
from tests.unit.specs import PLANNED as SMALL
from tests.unit.test_plan_search import SPARSE, everything, machines


def joined(cluster: Cluster, *gb_s: float) -> Cluster:
    """The machines of a cluster with a path for every two of them, of these bandwidths in turn."""
    names = tuple("abcdefgh"[: cluster.nodes])
    pairs = list(combinations(names, 2))
    paths = tuple(NodePath(((one,), (other,)), gb_s[at % len(gb_s)]) for at, (one, other) in enumerate(pairs))
    return replace(cluster, names=names, paths=paths)


def best_of_all(question: Question) -> Candidate:
    """By trying everything; what is worse already without paths is not placed."""
    best: Candidate | None = None
    for one in everything(question):
        if best is None or one.score("throughput") < best.score("throughput"):
            placed = with_paths(one)
            if best is None or placed.score("throughput") < best.score("throughput"):
                best = placed
    assert best is not None
    return best


@pytest.mark.parametrize(
    ("spec", "cluster", "batch", "words"),
    [
        (SMALL, joined(machines(8, 12), 0.5), 16, "offload=none"),
        (SMALL, joined(machines(8, 12), 5), 16, "offload=none"),
        (SMALL, joined(machines(8, 12), 40), 16, "offload=none"),
        (SMALL, joined(machines(8, 4), 2), 16, "offload=none"),
        (SMALL, joined(machines(8, 4), 20), 32, "cp=1 micro_batch<=2"),
        (SMALL, joined(machines(8, 3), 10), 64, "micro_batch<=2 cp=1 tp<=2"),
        (SMALL, joined(machines(12, 5), 1, 30, 30), 24, "offload=none cp=1"),
        (SPARSE, joined(machines(8, 9), 3), 8, "tp=1 micro_batch<=2 offload=none"),
    ],
)
def test_with_paths_the_search_finds_what_trying_everything_finds(
    spec: ModelSpec, cluster: Cluster, batch: int, words: str
) -> None:
    question = Question(spec, cluster, 2048, batch, constraints=parse_constraints([words]))
    found, best = search(question).best, best_of_all(question)
    assert found is not None
    assert found.score("throughput")[0] == pytest.approx(best.score("throughput")[0], rel=1e-9), best.strategy
    assert found.parts.paths == pytest.approx(best.parts.paths, rel=1e-6)


@pytest.mark.parametrize(
    ("spec", "cluster", "words"),
    [
        (SMALL, joined(machines(8, 12), 0.5), "micro_batch=2"),
        (SMALL, joined(machines(8, 12), 20), "micro_batch=1 tp<=2"),
        (SMALL, joined(machines(12, 12), 1, 30, 30), "micro_batch=1"),
        (SPARSE, joined(machines(8, 24), 3), "micro_batch=1 tp<=2"),
    ],
)
def test_nothing_waits_less_for_paths_than_the_bound_says(spec: ModelSpec, cluster: Cluster, words: str) -> None:
    constraints = parse_constraints([f"offload=none {words}"])
    question = Question(spec, cluster, 4096, 4 * cluster.gpus, constraints=constraints)
    space, compared = Space(question), 0
    for degrees in space.degrees():
        for zero, shard, method in space.states(degrees):
            base = replace(plain(degrees), zero=zero, shard=shard, cp_method=method)
            stages = max(map(stages_per_rank, space.schedules(degrees, zero)))
            floor = space.waits.floor(question.scenario(base, degrees.micro_batch), stages)
            for (schedule, layers), recompute in product(space.orders(degrees, zero), ("none", "first:3", "full")):
                layout = replace(base, schedule=schedule, layers=layers)
                least = Timer(question.scenario(layout, degrees.micro_batch), question.known).parts(simulate=False)
                one = estimate(question, replace(layout, recompute=recompute).strategy(), degrees.micro_batch)
                assert least.total + floor.beside(least.total) <= one.step_s * (1 + 1e-9), one.strategy
                compared += floor.beside(least.total) > 0
    assert compared > 20


def test_paths_that_carry_anything_change_nothing() -> None:
    """Where there are none, or none that is narrow, answers and times are those of links and cards alone."""
    for cluster in (machines(8, 5, 5), machines(16, 12), machines(12, 5)):
        question = Question(SMALL, cluster, 2048, 48, constraints=parse_constraints(["offload=none"]))
        known, wide = search(question), search(replace(question, cluster=joined(cluster, 1e6)))
        assert [(one.strategy, one.micro_batch, one.parts) for one in known.ranked] == [
            (one.strategy, one.micro_batch, one.parts) for one in wide.ranked
        ]
        assert known.best is not None
        assert known.best.parts == Timer(known.best.scenario, question.known).parts()
        assert known.estimated == wide.estimated


SLOW = 'chip = "h100"\nnodes = 2\nnames = ["a", "b"]\n[[path]]\nbetween = ["a", "b"]\ngb_s = 0.5\n'


def slow(folder: Path, strategy: str | None = None, micro_batch: int | None = None) -> Plan:
    """A plan for two machines with next to nothing between them."""
    (folder / "slow.toml").write_text(SLOW)
    return plan(
        "llama3.2-1b",
        str(folder / "slow.toml"),
        sequence_length=4096,
        global_batch=64,
        strategy=strategy,
        micro_batch=micro_batch,
    )


def test_the_search_keeps_gradients_off_a_slow_path(tmp_path: Path) -> None:
    made, given = slow(tmp_path), slow(tmp_path, "dp=16 zero=2", 4)
    best, summed = made.best, given.best
    assert best is not None
    assert summed is not None
    # 7 GB in each direction over half a GB a second, of which next to nothing hides.
    assert 13 < summed.step_s < 14.5
    assert best.step_s < 0.3 * summed.step_s
    assert best.strategy.pp > 1
    found = plan_json(made)["best"]["step_time"]
    assert found["paths"] == pytest.approx(best.parts.paths, abs=1e-6)
    assert sum(found.values()) == pytest.approx(best.step_s, abs=1e-5)
    assert "waiting for paths between machines" in loss(best, summed)
    assert any("waiting for paths between machines" in line for line in explain(made))


def test_what_compression_saves_on_a_slow_path_is_predicted(tmp_path: Path) -> None:
    whole, less = slow(tmp_path, "dp=16", 4).best, slow(tmp_path, "dp=16 compress=topk:0.01", 4).best
    assert whole is not None
    assert less is not None
    assert less.step_s < 0.5 * whole.step_s


@pytest.mark.parametrize("name", ["slow.toml", "slow"])
def test_a_run_that_is_written_knows_the_paths_that_it_was_planned_with(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(SLOW)
    made = plan("llama3.2-1b", f"./{name}", sequence_length=4096, global_batch=64, compare=False)
    Path("run.toml").write_text(run_file(made, Carried()))
    config = load_config(Path("run.toml"))
    assert config.parallel.cluster is not None
    assert parse_cluster(config.parallel.cluster).paths == made.question.cluster.paths
    assert is_placed(config)
    # Where nothing is known of paths, ranks on any machines stay in order.
    other = plan("llama3.2-1b", "16xh100", sequence_length=4096, global_batch=64, compare=False)
    Path("run.toml").write_text(run_file(other, Carried()))
    assert load_config(Path("run.toml")).parallel.cluster is None
