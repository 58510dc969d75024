"""On hosts with slow links between them, where ranks lie decides how long a step takes, and the model says so."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from meshwright.axis_order import AUTO, parse_order
from meshwright.cluster.cluster import Cluster, parse_cluster
from meshwright.cluster.fabric import fabric_of
from meshwright.config import load_config
from meshwright.planning.answer import plan
from meshwright.planning.axis_traffic import axis_traffic
from meshwright.planning.placement import Placement, place
from meshwright.planning.software import constants
from meshwright.strategy import Strategy
from meshwright.training.job import model_spec
from tests.chaos.machines import Machines
from tests.hosts import Hosts

pytestmark = pytest.mark.slow

STRATEGY = "dp=2 tp=2"
SETTINGS = [
    "model.preset=tiny", "model.spec.num_hidden_layers=4", "data.sequence_length=128", "train.global_batch=8",
    "train.steps=5", "train.eval_sequences=0", "checkpoint.every=0", "observe.tensorboard=false",
    "observe.profile_every=0", "observe.straggler_every=0", "elastic.check_replicas_every=0",
    f"parallel.strategy={STRATEGY}", "run.device=cpu",
]  # fmt: skip
BETWEEN = '[[path]]\nbetween = [["a", "c"], ["b", "d"]]\ngb_s = 0.00625\n'


def cluster_file(folder: Path, nodes: int, each: int, nic: float, *paths: str) -> Path:
    """Hosts a, b, ... with some CPU ranks each, as a test limits their links."""
    names = [chr(ord("a") + number) for number in range(nodes)]
    file = folder / "cluster.toml"
    head = f'chip = "cpu"\nnodes = {nodes}\ngpus_per_node = {each}\ndomain = {each}\nnic = {nic}\n'
    file.write_text(head + f"names = {json.dumps(names)}\n" + "\n".join(paths))
    return file


def modelled(cluster: Cluster, placement: str, *, nodes: bool = True) -> Placement:
    """What the search finds for these tests' runs with axes in that order, or in any with auto; without `nodes`,
    machines as they come."""
    strategy, given = Strategy.parse(STRATEGY, 4), {"sequence_length": 128, "global_batch": 8, "micro_batch": 4}
    spec = model_spec(load_config(overrides=SETTINGS))
    candidate = plan(spec, cluster, precision="float32", strategy=STRATEGY, **given).candidates[0]  # type: ignore[arg-type]
    traffic, fabric = axis_traffic(candidate.scenario, constants()), fabric_of(cluster)
    only = () if placement == AUTO else parse_order(placement, strategy)
    best, plain = place(strategy, traffic, fabric, only=only)
    return best if nodes else plain


def train(hosts: Hosts, each: int, folder: Path, corpus: Path, runs: dict[str, list[str]]) -> dict[str, Run]:
    """Two trainings with each of these settings, in turn: medians of their steps, and what they computed."""
    turns = [
        (f"{name}-{turn}", [*own, f"run.dir={folder / name}-{turn}"]) for turn in "12" for name, own in runs.items()
    ]
    settings = [*SETTINGS, f"data.path={corpus}"]
    words = ("tests.cluster.trainings", json.dumps([own for _, own in turns]), *settings)
    ended = hosts.run_ranks(each, *words, env={"XDG_CACHE_HOME": str(folder)}, timeout=240)
    assert [one.code for one in ended] == [0] * len(ended), ended[0].err + ended[-1].err
    return {name: Run.of([folder / f"{name}-{turn}" for turn in "12"]) for name in runs}


class Run:
    """What was measured of trainings with the same settings."""

    def __init__(self, step_s: float, losses: list[float], hosts: list[str]) -> None:
        self.step_s, self.losses, self.hosts = step_s, losses, hosts

    @classmethod
    def of(cls, folders: list[Path]) -> Run:
        """From their run folders; the first step of each does not count."""
        rows = [[json.loads(line) for line in (one / "metrics.jsonl").read_text().splitlines()] for one in folders]
        step_s = statistics.median(row["step_s"] for run in rows for row in run[1:])
        return cls(step_s, [row["loss"] for row in rows[0]], hosts_of(folders[0]))


def hosts_of(folder: Path) -> list[str]:
    """The host of every rank."""
    ranks = sorted((folder / "ranks").glob("?????.jsonl"))
    return [json.loads(one.read_text().splitlines()[0])["host"] for one in ranks]


def test_tensor_parallel_inside_a_host_beats_tensor_parallel_across(corpus: Path, tmp_path: Path) -> None:
    runs = {"inside": ["parallel.placement=in-order"], "across": ["parallel.placement=tp,dp"]}
    with Hosts(2, Path.cwd()) as hosts:
        for name in hosts.names:
            hosts.limit(name, mbit=100)
        found = train(hosts, 2, tmp_path, corpus, runs)
    cluster = parse_cluster(str(cluster_file(tmp_path, 2, 2, 0.00625)))
    expected = {name: modelled(cluster, text).seconds for name, text in (("inside", "dp,tp"), ("across", "tp,dp"))}
    print({name: (round(run.step_s, 3), round(expected[name], 3)) for name, run in found.items()})
    assert found["across"].losses == pytest.approx(found["inside"].losses, rel=1e-4)
    assert found["across"].step_s > 1.2 * found["inside"].step_s
    assert expected["across"] > 1.2 * expected["inside"]


def test_machines_in_the_searched_order_beat_machines_as_they_come(corpus: Path, tmp_path: Path) -> None:
    file = cluster_file(tmp_path, 4, 1, 0.5, BETWEEN)
    given = f"parallel.cluster={file}"
    # Of the second the machines are searched, and not the axes; of the third both.
    runs = {name: [given, f"parallel.placement={name}"] for name in ("in-order", "dp,tp", AUTO)}
    with Hosts(4, Path.cwd(), islands=["ac", "bd"]) as hosts:
        hosts.limit_between(mbit=50)
        found = train(hosts, 1, tmp_path, corpus, runs)
    cluster = parse_cluster(str(file))
    expected = modelled(cluster, "dp,tp", nodes=False).seconds, modelled(cluster, "dp,tp").seconds
    print({name: round(run.step_s, 3) for name, run in found.items()}, [round(one, 3) for one in expected])
    assert found["in-order"].hosts == ["a", "b", "c", "d"]
    assert found["dp,tp"].hosts == ["a", "c", "b", "d"]
    assert found["dp,tp"].losses == pytest.approx(found["in-order"].losses, rel=1e-4)
    assert found["in-order"].step_s > 1.2 * found["dp,tp"].step_s
    assert expected[0] > 1.2 * expected[1]
    # Left to the search, a training stands as the search says, and is as fast as it says.
    searched = modelled(cluster, AUTO)
    assert searched.nodes != (0, 1, 2, 3)
    assert found[AUTO].hosts == [cluster.names[one] for one in searched.nodes]
    assert found[AUTO].losses == pytest.approx(found["in-order"].losses, rel=1e-4)
    assert found["in-order"].step_s > 1.2 * found[AUTO].step_s


def test_paths_are_measured_and_say_which_machines_belong_together(tmp_path: Path) -> None:
    file = tmp_path / "measured.toml"
    with Hosts(4, tmp_path, islands=["ac", "bd"]) as hosts:
        for name in hosts.names:
            hosts.limit(name, mbit=400)
        hosts.limit_between(mbit=50)
        ended = hosts.run_ranks(1, "meshwright", "bench", "comm", "--paths", str(file), "--device", "cpu", timeout=240)
    assert [one.code for one in ended] == [0] * 4, ended[0].err
    cluster = parse_cluster(str(file))
    found = {one.sides[0] + one.sides[1]: one.bandwidth for one in cluster.paths}
    assert len(found) == 6
    print(found)
    near = [bandwidth for pair, bandwidth in found.items() if set(pair) in ({"a", "c"}, {"b", "d"})]
    far = [bandwidth for pair, bandwidth in found.items() if set(pair) not in ({"a", "c"}, {"b", "d"})]
    assert max(near) < 1.2 * 0.05
    assert max(far) < 1.2 * 0.00625
    assert min(near) > 2 * max(far)
    order = [cluster.names[one] for one in modelled(cluster, "dp,tp").nodes]
    assert sorted(order[:2]) in (["a", "c"], ["b", "d"])


@pytest.mark.parametrize("cards", [1, 2])
def test_a_path_carries_what_all_ranks_of_two_machines_send_at_once(cards: int, tmp_path: Path) -> None:
    # 100 Mbit/s between the machines: of one card that two ranks share, or of two, of which each rank has one.
    file, facts = tmp_path / "measured.toml", tmp_path / "paths.json"
    words = ("meshwright", "bench", "comm", "--paths", str(file), "--json", str(facts), "--device", "cpu")
    with Hosts(2, tmp_path, cards=cards) as hosts:
        for name in hosts.names:
            hosts.limit(name, mbit=100 / cards)
        ended = hosts.run_ranks(2, *words, timeout=240)
    assert [one.code for one in ended] == [0] * 4, ended[0].err
    cluster = parse_cluster(str(file))
    assert (cluster.node, cluster.gpus, cluster.names) == (2, 4, ("a", "b"))
    (path,) = cluster.paths
    print(path.bandwidth)
    assert 0.8 * 0.0125 < path.bandwidth < 1.1 * 0.0125
    found = json.loads(facts.read_text())
    assert found["paths"] == [{"between": ["a", "b"], "gb_s": path.bandwidth}]
    assert (found["backend"], found["device"]) == ("gloo", "cpu")


def test_machines_that_meet_are_numbered_in_the_searched_order(corpus: Path, tmp_path: Path) -> None:
    given = f"parallel.cluster={cluster_file(tmp_path, 4, 1, 0.5, BETWEEN)}"
    settings = [*SETTINGS, f"data.path={corpus}", given, "parallel.placement=auto"]
    with Machines(4, tmp_path, settings) as machines:
        trainings = [machines.train(name, "train.steps=2", nodes="4") for name in "abcd"]
        ended = [one.wait(timeout=240) for one in trainings]
    assert [one.code for one in ended] == [0] * 4, ended[0].err
    assert hosts_of(tmp_path / "run") == ["a", "c", "b", "d"]
    assert any("machines a c b d" in one.out for one in ended)
