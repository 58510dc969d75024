"""The search finds what trying everything finds, always the same, and what the user's documents recommend."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from meshwright.cluster.chips import make_chip
from meshwright.cluster.cluster import Cluster, of_chip, parse_cluster
from meshwright.errors import UserError
from meshwright.models.presets import preset
from meshwright.models.spec import ModelSpec
from meshwright.planning.answer import plan
from meshwright.planning.changes import cheapest_change
from meshwright.planning.constraints import parse_constraints
from meshwright.planning.families import family_of
from meshwright.planning.memory import memory_of
from meshwright.planning.question import Candidate, Question, estimate
from meshwright.planning.runners import fewest_gpus
from meshwright.planning.scenario import Layout
from meshwright.planning.search import plain_best, search
from meshwright.planning.space import Space, allowed
from meshwright.planning.timing import Timer
from meshwright.strategy import Strategy
from tests.unit.specs import PLANNED as SMALL

SPARSE = SMALL.model_copy(
    update={"experts": preset("tiny-moe").experts.model_copy(update={"num_experts": 8, "moe_intermediate_size": 1024})}  # type: ignore[union-attr]
)


def machines(gpus: int, gib: float, nic: float = 50) -> Cluster:
    facts = {"memory_mib": gib * 1024, "memory_bandwidth": 3350, "tflops": {"bf16": 989}, "link": 450, "nic": nic}
    return of_chip(make_chip("small", {**facts, "domain": 4, "node": 4, "host_gib": 64}), gpus, node=min(4, gpus))


def everything(question: Question) -> Iterator[Candidate]:
    """Every strategy of the space with every recompute and use of host memory that there is, simulated."""
    for offload in ("none", "optimizer", "parameters"):
        yield from with_offload(question, offload)


def with_offload(question: Question, offload: str) -> Iterator[Candidate]:
    space = Space(question)
    layers = question.spec.num_hidden_layers
    words = ["none", "selective", "full", *(f"first:{count}" for count in range(1, layers))]
    for degrees in space.degrees():
        if question.allows(offload=offload):
            for zero, shard, method in space.states(degrees):
                if offload == "parameters" and (zero < 2 or degrees.dp * degrees.cp == 1):
                    continue
                if degrees.ep > 1 and shard % degrees.ep and degrees.ep % shard:
                    continue
                for schedule, split in space.orders(degrees, zero):
                    for recompute, sp in product(words, {degrees.tp > 1, False}):
                        if not question.allows(offload=offload, recompute=recompute, sp="on" if sp else "off"):
                            continue
                        layout = Layout(
                            dp=degrees.dp, tp=degrees.tp, pp=degrees.pp, cp=degrees.cp, ep=degrees.ep,
                            expert_tp=degrees.tp, zero=zero, shard=shard, sp=sp, schedule=schedule,
                            layers=split, cp_method=method, recompute=recompute, offload=offload,
                        )  # fmt: skip
                        layout.strategy().check(question.spec, question.cluster.gpus, question.sequence_length)
                        scenario = question.scenario(layout, degrees.micro_batch)
                        memory = memory_of(scenario)
                        if memory.verdict == "fits":
                            parts = Timer(scenario, question.known).parts()
                            yield Candidate(layout.strategy(), degrees.micro_batch, scenario, memory, parts)


@pytest.mark.parametrize(
    ("spec", "cluster", "batch", "words"),
    [
        (SMALL, machines(4, 6), 16, ""),
        (SMALL, machines(4, 10), 16, ""),
        (SMALL, machines(4, 2), 16, ""),
        (SMALL, machines(8, 5, 5), 16, ""),
        (SMALL, machines(8, 12, 2), 8, "micro_batch<=2"),
        (SMALL, machines(8, 5), 16, "tp<=2 cp=1"),
        (SMALL, machines(2, 12), 8, "zero<=1"),
        (SMALL, machines(4, 6), 16, "tp=1 offload=none recompute!=selective"),
        (SMALL, machines(4, 8), 32, "pp=1 offload=none recompute!=selective"),
        (SMALL, machines(2, 10), 8, "offload=none zero>=2 recompute!=selective"),
        (SMALL, machines(2, 9), 16, "micro_batch>=4"),
        (SMALL, machines(2, 7), 16, "micro_batch>=4"),
        (SPARSE, machines(4, 9), 8, "tp=1 micro_batch<=2"),
        (SMALL, machines(4, 3), 16, "tp=4"),
        (SMALL, machines(4, 5), 16, "tp>=2 sp=off recompute=none"),
        # Here host memory is faster than what fits without it.
        (SMALL, machines(2, 7), 64, ""),
        (SMALL, machines(4, 4), 64, ""),
        (SMALL, machines(2, 8), 256, ""),
        (SMALL, machines(8, 5), 256, "cp=1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_search_finds_what_trying_everything_finds(spec: ModelSpec, cluster: Cluster, batch: int, words: str) -> None:
    question = Question(spec, cluster, 2048, batch, constraints=parse_constraints([words]))
    found = search(question)
    best = min(everything(question), key=lambda one: one.score("throughput"), default=None)
    if best is None:
        assert found.best is None
        return
    assert found.best is not None
    assert found.best.score("throughput")[0] == pytest.approx(best.score("throughput")[0], rel=1e-9), best.strategy
    assert found.best.memory.verdict == "fits"


def test_the_same_question_has_the_same_answer() -> None:
    question = Question(preset("llama3.1-8b"), parse_cluster("16xh100"), 8192, 128)
    first, second = search(question), search(question)
    assert [str(one.strategy) for one in first.ranked] == [str(one.strategy) for one in second.ranked]


@pytest.mark.parametrize(
    ("model", "cluster", "length", "batch", "family"),
    [
        ("qwen2.5-0.5b", "8xh100", 2048, 512, "copies of the model"),
        ("llama2-7b", "64xh100", 4096, 1024, "sharded state (ZeRO, FSDP)"),
        ("gpt3-175b", "1024xh100", 2048, 2048, "tensor + pipeline"),
    ],
)
def test_the_recommended_family_comes_out_of_the_search(
    model: str, cluster: str, length: int, batch: int, family: str
) -> None:
    best = search(Question(preset(model), parse_cluster(cluster), length, batch)).best
    assert best is not None
    assert family_of(best.strategy) == family


def test_seventy_billion_on_512_gpus_loses_little_when_it_is_only_sharded() -> None:
    question = Question(preset("llama3.1-70b"), parse_cluster("512xh100"), 8192, 1024)
    best = plain_best(question)
    sharded = plain_best(replace(question, constraints=parse_constraints(["zero=3 tp=1 pp=1"])))
    assert best is not None
    assert sharded is not None
    assert sharded.step_s < 1.1 * best.step_s


def test_every_found_strategy_is_legal_for_the_trainer() -> None:
    for model, cluster in (("qwen3-30b-a3b", "16xh100"), ("llama3.1-70b", "64xh100"), ("qwen2.5-7b", "6xa100")):
        spec = preset(model)
        question = Question(spec, parse_cluster(cluster), 4096, 48 * question_factor(cluster))
        for one in search(question).ranked:
            one.strategy.check(spec, question.cluster.gpus, 4096)
            assert Strategy.parse(str(one.strategy), question.cluster.gpus) == one.strategy
            one.strategy.micro_steps(question.global_batch, one.micro_batch)


def test_all_that_is_shown_is_legal_and_meets_the_constraints() -> None:
    """Many questions, drawn at random."""
    draw = random.Random(7)
    words = ("", "", "recompute=first", "schedule=interleaved", "offload=parameters", "replicate>=2", "zero=3", "cp>=2")
    answered = 0
    for _ in range(60):
        model = draw.choice(("tiny-moe", "llama2-7b", "llama3.2-1b", "qwen2.5-7b", "gpt2"))
        cluster = draw.choice(("128xmi250x", "11x7xh200", "8xh100", "1xh100", "6xa100", "32xa100"))
        length, batch = draw.choice((1024, 8192, 32768)), draw.choice((1, 2, 12, 64, 77 * 32))
        word = draw.choice(words)
        try:
            made = plan(model, cluster, sequence_length=length, global_batch=batch, constraints=word)
        except UserError:
            continue
        answered += 1
        for one in (*made.candidates, made.shown):
            one.strategy.check(made.question.spec, made.question.cluster.gpus, length)
            one.strategy.micro_steps(batch, one.micro_batch)
            told = f"{model} on {cluster}, {length}, {batch}, {word}: {one.strategy}"
            assert allowed(made.question, Layout.of(one.strategy)), told
            assert made.question.allows(micro_batch=one.micro_batch), told
    assert answered > 20


def test_a_method_that_the_heads_do_not_allow_is_not_searched() -> None:
    made = plan("llama2-7b", "128xmi250x", sequence_length=32768, global_batch=2, compare=False)
    made.shown.strategy.check(made.question.spec, 128, 32768)


@pytest.mark.parametrize(
    ("cluster", "batch", "words"),
    [
        ("1xh100", 8, "zero=3"),
        ("8xh100", 1, "zero=3 tp=8"),
        ("1xh100", 8, "schedule=interleaved"),
        ("1xh100", 8, "offload=parameters"),
        ("1xh100", 8, "replicate>=2"),
    ],
)
@pytest.mark.parametrize("objective", ["throughput", "memory", "fewest-gpus"])
def test_constraints_that_leave_degrees_but_no_strategy_are_told(
    cluster: str, batch: int, words: str, objective: str
) -> None:
    with pytest.raises(UserError, match="no strategy for"):
        plan("llama3.1-8b", cluster, global_batch=batch, constraints=words, objective=objective)


def question_factor(cluster: str) -> int:
    return {"16xh100": 16, "64xh100": 64}.get(cluster, 6)


def test_the_cheapest_change_meets_the_constraints() -> None:
    spec, cluster = preset("llama3.1-8b"), parse_cluster("8xh100")
    plain = Question(spec, cluster, 4096, 64)
    bound = replace(plain, constraints=parse_constraints(["zero<=1 offload=none micro_batch=2"]))
    failing = estimate(bound, Strategy.parse("dp=8", 8), 2)
    assert not failing.fits
    free, held = cheapest_change(plain, failing), cheapest_change(bound, failing)
    assert free is not None
    assert free.candidate.strategy.zero > 1
    assert held is not None
    assert held.candidate.strategy.zero <= 1
    assert held.candidate.strategy.offload == "none"
    assert held.candidate.micro_batch == 2


@pytest.mark.parametrize("words", ["tp=1 pp=1", "offload=none", "offload=none pp=1 cp=1", "offload=none dp<=3"])
def test_no_smaller_number_of_machines_would_do(words: str) -> None:
    constraints = parse_constraints([words])
    question = Question(preset("llama3.1-70b"), parse_cluster("96xh100"), 4096, 128, constraints=constraints)
    found = fewest_gpus(question)
    assert found is not None
    for count in range(1, found.gpus):
        if count <= 8 or count % 8 == 0:
            try:
                best = search(replace(question, cluster=question.cluster.with_gpus(count))).best
            except UserError:
                continue
            assert best is None, count


def test_the_cheapest_change_makes_a_failing_choice_fit() -> None:
    question = Question(preset("llama3.1-8b"), parse_cluster("8xh100"), 8192, 64)
    failing = estimate(question, Strategy.parse("dp=8 zero=3", 8), 2)
    assert not failing.fits
    change = cheapest_change(question, failing)
    assert change is not None
    assert change.candidate.fits
    assert change.saved_gib > 0


def test_constraints_that_leave_nothing_are_told() -> None:
    with pytest.raises(UserError, match="contradict"):
        parse_constraints(["tp<=2", "tp>=4"])
    question = Question(SMALL, machines(4, 6), 2048, 16, constraints=parse_constraints(["tp=3"]))
    with pytest.raises(UserError, match="tp=3"):
        search(question)


@pytest.mark.parametrize(("gpus", "batch", "seconds"), [(64, 512, 1.0), (4096, 4096, 2.0)])
@pytest.mark.alone
def test_a_search_takes_no_longer_than_that(gpus: int, batch: int, seconds: float) -> None:
    question = Question(preset("llama3.1-70b"), parse_cluster(f"{gpus}xh100"), 8192, batch)
    taken = []
    for _ in range(3):
        started = time.process_time()
        search(question)
        taken.append(time.process_time() - started)
    assert min(taken) < seconds


def test_the_least_memory_is_found() -> None:
    question = Question(SMALL, machines(4, 10), 2048, 16, constraints=parse_constraints(["offload=none"]))
    best = search(question, "memory").best
    assert best is not None
    assert best.memory.peak == min(one.memory.peak for one in everything(question))


def test_more_memory_is_never_slower() -> None:
    times = []
    for gib in (3, 4, 6, 10, 40):
        best = search(Question(SMALL, machines(4, gib), 2048, 16)).best
        times.append(best.score("throughput")[0] if best is not None else float("inf"))
    assert times == sorted(times, reverse=True)


def test_a_model_that_fits_nowhere_has_a_nearest() -> None:
    found = search(Question(preset("llama3.1-405b"), parse_cluster("8xrtx4090"), 4096, 64))
    assert found.best is None
    assert found.nearest is not None
    assert found.nearest.memory.verdict == "does not fit"
    assert replace(found.nearest.strategy) == found.nearest.strategy
