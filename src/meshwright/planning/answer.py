"""The answer of the planner: the best strategy, its runners-up, why, and what else would do. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cluster.cluster import Cluster, parse_cluster
from meshwright.comm.compression import NONE
from meshwright.errors import ConfigError, UserError
from meshwright.estimate.kept import Kept
from meshwright.models.hf_config import read_json, read_spec, spec_from_config
from meshwright.models.presets import preset, presets
from meshwright.models.spec import ModelSpec
from meshwright.planning.changes import cheapest_change
from meshwright.planning.constraints import parse_constraints
from meshwright.planning.corrections import learned_of, subject_of
from meshwright.planning.families import family_of
from meshwright.planning.given import estimate_given
from meshwright.planning.group_words import placed_json, ways_json
from meshwright.planning.measured import Measured, operations_of
from meshwright.planning.measured_links import MeasuredLinks
from meshwright.planning.narrow import narrower
from meshwright.planning.placement_words import placement_json
from meshwright.planning.question import Candidate, Found, Question, estimate, in_full
from meshwright.planning.runners import Runner, fewest_gpus, on_fewer, runners_of
from meshwright.planning.scenario import Layout
from meshwright.planning.search import OBJECTIVES, check_objective, search
from meshwright.planning.space import allowed
from meshwright.planning.state_memory import GIB
from meshwright.strategy import AUTO, Strategy

if TYPE_CHECKING:
    from meshwright.planning.tryout import Tried

PRECISIONS = ("bf16", "fp16", "tf32", "float32", "fp8")
"""What the trainer computes in; where two are as fast, the first one is preferred."""
TOKENS_PER_STEP = 4 << 20
"""Of a step where no global batch is given."""
SHOWN = 4
"""Candidates of the best family that are told of."""


@dataclass(frozen=True)
class Plan:
    """All that `meshwright plan` says."""

    question: Question
    model: str
    best: Candidate | None
    candidates: tuple[Candidate, ...]
    runners: tuple[Runner, ...]
    fewer: tuple[Candidate, ...]
    """Good strategies on fewer chips."""
    found: Found | None
    tokens: float | None = None
    """Of the whole training."""
    tried: tuple[Tried, ...] = ()
    """Candidates that were run here, in the order of their predicted times; the best is then the measured one."""
    narrower: Candidate | None = None
    """What would fit with narrower weights or moments, where nothing does without host memory."""

    @property
    def shown(self) -> Candidate:
        """The best; where nothing fits, what comes nearest."""
        found = self.best or (self.found.nearest if self.found is not None else None)
        assert found is not None
        return found

    def days(self, candidate: Candidate) -> float | None:
        """Days of training, where the number of tokens is known."""
        if self.tokens is None:
            return None
        per_second = candidate.tokens_per_s_per_gpu * candidate.scenario.cluster.gpus
        return self.tokens / per_second / 86_400

    def cost(self, candidate: Candidate) -> float | None:
        """Money for it, where the price of a chip's hour is known."""
        days, price = self.days(candidate), candidate.scenario.cluster.price
        return None if days is None or price is None else days * 24 * price * candidate.scenario.cluster.gpus

    def as_json(self) -> dict[str, Any]:
        """The stable form: docs/plan.md says what is in it."""
        question, cluster = self.question, self.question.cluster
        from meshwright.planning.explain import explain

        return {
            "schema": 1,
            "model": self.model,
            "cluster": {
                "chip": cluster.chip.key,
                "gpus": cluster.gpus,
                "gpus_per_node": cluster.node,
                "memory_gib": round(cluster.memory / GIB, 2),
                "groups": [
                    {
                        "chip": group.chip.key,
                        "gpus": group.gpus,
                        "gpus_per_node": group.node,
                        "memory_gib": round(group.memory / GIB, 2),
                    }
                    for group in cluster.groups
                ],
            },
            "sequence_length": question.sequence_length,
            "global_batch": question.global_batch,
            "precision": question.precision,
            **asdict(question.kept),
            "constraints": [str(one) for one in question.constraints],
            "origin": origin(question),
            "best": candidate_json(self, self.best) if self.best is not None else None,
            "candidates": [candidate_json(self, one) for one in self.candidates],
            "runners_up": [
                {
                    "family": one.family,
                    "candidate": candidate_json(self, one.candidate) if one.candidate is not None else None,
                    "change_to_fit": str(one.change) if one.change is not None else None,
                    "reason": one.reason,
                }
                for one in self.runners
            ],
            "tried": [one.as_json() for one in self.tried],
            "fewer_gpus": [candidate_json(self, one) for one in self.fewer],
            "ways": ways_json(self.found),
            "why": explain(self),
            "searched": None
            if self.found is None
            else {"estimated": self.found.estimated, "bounded": self.found.bounded},
        }


def origin(question: Question) -> str:
    """Whether the numbers are measured, calibrated or estimated."""
    cluster = question.cluster
    operations = operations_of(question.scenario(Layout(), 1), question.known)
    lines = str(operations.links) if isinstance(operations.links, MeasuredLinks) else ""
    if isinstance(operations, Measured):
        if cluster.chip.key == "cpu":
            return f"times {cluster.measured}; memory estimated"
        links = "links too" if cluster.speeds is not None and cluster.speeds.collectives else "links estimated"
        return f"times of computing {cluster.measured}; {lines or links}, memory estimated"
    ignored = f"; {cluster.measured}" if cluster.measured and cluster.speeds is None else ""
    return _estimated(question) + (f"; {lines}" if lines else "") + ignored


def _estimated(question: Question) -> str:
    unknown = [group.chip.name for group in question.cluster.kinds if not question.known.measured(group.chip.key)]
    if not unknown:
        these = "these chips" if question.cluster.groups else "this chip"
        return f"estimated, with constants fitted to published runs on {these}"
    which = "this chip" if not question.cluster.groups else ", ".join(dict.fromkeys(unknown))
    return f"estimated from the vendor's figures; nothing was measured on {which}"


def candidate_json(plan: Plan, candidate: Candidate) -> dict[str, Any]:
    """One candidate."""
    memory, parts = candidate.memory, candidate.parts
    finite = candidate.step_s < float("inf")
    fullest = memory.stages[memory.fullest]
    days, cost = (plan.days(candidate), plan.cost(candidate)) if finite else (None, None)
    return {
        "strategy": str(candidate.strategy),
        "micro_batch": candidate.micro_batch,
        "gpus": candidate.scenario.cluster.gpus,
        "placement": placed_json(candidate),
        "links": placement_json(candidate) if finite else None,
        "verdict": memory.verdict,
        "memory": {
            "peak_gib": round(memory.peak / GIB, 3),
            "allocated_gib": round(fullest.allocated / GIB, 3),
            "margin_gib": round((memory.capacity - memory.peak) / GIB, 3),
            "fullest_stage": memory.fullest,
            "terms": terms_gib(fullest),
            "by_stage": [
                {
                    "peak_gib": round(terms.total / GIB, 3),
                    "capacity_gib": round(memory.room(rank) / GIB, 3),
                    "margin_gib": round((memory.room(rank) - terms.total) / GIB, 3),
                    "verdict": memory.verdict_of(rank),
                    "terms": terms_gib(terms),
                }
                for rank, terms in enumerate(memory.stages)
            ],
            "host_gib": round(memory.host / GIB, 3),
            "peaks": peaks_gib(candidate),
        },
        "step_time_s": round(candidate.step_s, 6) if finite else None,
        "step_time": {name: round(value, 6) for name, value in vars(parts).items()} if finite else None,
        "tokens_per_s_per_gpu": round(candidate.tokens_per_s_per_gpu, 3) if finite else None,
        "mfu": round(candidate.mfu, 5) if finite else None,
        "days": None if days is None else round(days, 3),
        "cost": None if cost is None else round(cost, 2),
        "origin": candidate.origin,
    }


def terms_gib(terms: Any) -> dict[str, float]:
    """The terms of one rank."""
    return {name: round(value / GIB, 4) for name, value in vars(terms).items()}


def peaks_gib(candidate: Candidate) -> dict[str, float]:
    """The peaks of the fullest rank at four times, with what the driver and the communicators hold."""
    terms = candidate.memory.stages[candidate.memory.fullest]
    always = terms.context + terms.communicators
    states = terms.parameters + terms.gradients + terms.optimizer
    return {
        "initialisation": round((terms.parameters + terms.context) / GIB, 3),
        "forward_backward": round(terms.total / GIB, 3),
        # A fused update works in place; what was fragmented stays reserved.
        "optimizer_step": round((states + terms.fragmentation + always) / GIB, 3),
        # Shards are copied to host memory one by one.
        "checkpoint": round((states + always) / GIB, 3),
    }


def read_model(model: str | ModelSpec) -> tuple[str, ModelSpec]:
    """A model's name and shape: a preset, a Hugging Face folder or config.json, a spec."""
    if isinstance(model, ModelSpec):
        return "spec", model
    if not model.strip():
        raise UserError("--model is empty; give a preset (`meshwright models` lists them), a folder or a config.json")
    path = Path(model)
    if path.is_dir():
        return model, read_spec(path)
    if path.suffix == ".json":
        return model, spec_from_config(read_json(path), str(path))
    if "/" in model and model.lower() not in presets():
        raise UserError(f"--model={model}: there is no such folder or config.json, and no such preset")
    return model, preset(model)


MOST_TOKENS = 1 << 27
"""Of a sequence."""


def plan(
    model: str | ModelSpec,
    cluster: str | Cluster,
    *,
    sequence_length: int | None = None,
    global_batch: int | None = None,
    precision: str = "bf16",
    stored: str | None = None,
    moments: str | None = None,
    objective: str = "throughput",
    constraints: str | Iterable[str] = (),
    strategy: str | None = None,
    micro_batch: int | None = None,
    tokens: float | None = None,
    compare: bool = True,
    batches: Iterable[int] = (),
    all_chips: bool = False,
    compile: bool = True,
) -> Plan:
    """Which strategy trains a model best on a cluster, whether it fits, how fast, and why.

    With `strategy` that one is estimated instead of searched for. `compare` adds the runners-up of other families and
    fewer chips. `stored` and `moments` are how weights and AdamW's moments are kept (precision.stored,
    precision.moments). `batches` are other global batches that the ranks must be able to share too. With `all_chips`,
    machines of a slow kind are not left out. `compile` says whether layers are compiled on GPUs (train.compile).
    """
    name, spec = read_model(model)
    machines = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    length = min(spec.max_position_embeddings, 4096) if sequence_length is None else sequence_length
    if any(size is not None and size < 1 for size in (length, global_batch, micro_batch)):
        raise UserError("sequence length, global batch and micro-batch must be whole numbers from 1")
    if length > MOST_TOKENS:
        raise UserError(f"sequences of {length:,} tokens are longer than any training run's; use up to {MOST_TOKENS:,}")
    batch = global_batch or default_batch(length, machines.gpus)
    texts = [constraints] if isinstance(constraints, str) else list(constraints)
    if strategy is not None and strategy.split()[:1] in ([], [AUTO]):
        # As in a run file: what follows are constraints.
        texts, strategy = [*texts, *strategy.split()[1:]], None
    if strategy is None and micro_batch is not None:
        texts.append(f"micro_batch={micro_batch}")
    check_objective(objective)
    first = Question(
        spec,
        machines,
        length,
        batch,
        kept=Kept.of(stored, moments),
        constraints=parse_constraints(texts),
        batches=tuple(batches),
        all_chips=all_chips,
        compile=compile,
        learned=learned_of(machines),
    )
    asked = [replace(first, precision=one) for one in precisions_of(precision, machines)]
    if strategy is not None:
        if objective != OBJECTIVES[0]:
            raise UserError(f"--objective={objective} is for a search, and --strategy is one; drop one of them")
        given = [_of_one(one, name, strategy, micro_batch, tokens) for one in asked]
        return min(given, key=lambda one: one.best.step_s if one.best is not None else float("inf"))
    return _searched(asked, name, objective, tokens, compare)


def _searched(asked: list[Question], name: str, objective: str, tokens: float | None, compare: bool) -> Plan:
    """The plan of the best that a search finds, with one of several precisions."""
    question = asked[0]
    if objective == "fewest-gpus":
        question = replace(question, cluster=fewest_gpus(question) or question.cluster)
    by = objective if objective in ("memory", "cost") else "throughput"
    answers = [_answer(replace(one, cluster=question.cluster), objective, by) for one in asked]
    # Where several precisions are as good, the first of them.
    question, found, ranked = min(
        answers, key=lambda one: one[2][0].score(by)[:1] if one[2] and one[2][0].fits else (float("inf"),)
    )
    best = ranked[0] if ranked and ranked[0].fits else None
    # Of several kinds of machines, the ways to use them are what is compared.
    compare = compare and not question.cluster.groups
    runners = runners_of(question, best) if compare and best is not None else ()
    fewer = on_fewer(question, best) if compare and best is not None else ()
    if best is None:
        closest = in_full(question, found.nearest) if found.nearest is not None else None
        found = replace(found, nearest=ranked[0] if ranked else closest)
    others = [*ranked, *_members(runners), *(in_full(question, one) for one in found.ways.values() if one is not None)]
    distinct = {(str(one.strategy), one.micro_batch, str(one.scenario.cluster)): one for one in others}
    candidates = tuple(sorted(distinct.values(), key=lambda one: (not one.fits, one.score(by))))
    less = narrower(question, best)
    return Plan(question, name, best, candidates, runners, fewer, found, tokens, narrower=less)


def _answer(question: Question, objective: str, by: str) -> tuple[Question, Found, list[Candidate]]:
    """What is best with one precision: what was found, and the first of it with what runs have shown."""
    known = _known(question)
    found = search(_beyond(question, known), objective)
    return question, found, _shown(question, [*known, *found.ranked[:SHOWN]], by)


def _known(question: Question) -> list[Candidate]:
    """Strategies that were run with this very question, as far as its constraints allow them."""
    subject = subject_of(question) if question.learned.observations else ""
    found = []
    for one in question.learned.observations:
        if one.subject == subject:
            try:
                strategy = Strategy.parse(one.strategy, question.cluster.gpus)
            except ConfigError:
                continue  # Of a release that wrote strategies otherwise.
            # What changes the numbers of a run is never chosen for a user, however fast it was.
            same = strategy.compress == NONE
            if same and allowed(question, Layout.of(strategy)) and question.allows(micro_batch=one.micro_batch):
                found.append(estimate(question, strategy, one.micro_batch))
    return found


def _beyond(question: Question, known: Iterable[Candidate]) -> Question:
    """What is left to search: others than those, on chips as small as runs have shown them to be."""
    cluster = question.cluster
    if cluster.groups:
        return question
    short = cluster.memory * (1 - 1 / question.learned.memory_ratio(cluster)) / GIB
    return replace(
        question,
        cluster=replace(cluster, reserve_gib=cluster.reserve_gib + short),
        left_out=frozenset((str(one.strategy), one.micro_batch) for one in known),
    )


def _shown(question: Question, candidates: Iterable[Candidate], by: str) -> list[Candidate]:
    """The best, with what runs on such machines have shown: that can change which of them is first."""
    whole = not question.cluster.groups
    shown = (
        in_full(question, estimate(question, one.strategy, one.micro_batch) if whole else one) for one in candidates
    )
    return sorted(shown, key=lambda one: (not one.fits, one.score(by)))[:SHOWN]


def default_batch(length: int, gpus: int) -> int:
    """About 4M tokens, in samples: a power of two for each chip, so that micro-batches of all sizes divide it."""
    each = max(1, TOKENS_PER_STEP // length // gpus)
    return gpus * (1 << (each.bit_length() - 1))


def _members(runners: Iterable[Runner]) -> list[Candidate]:
    return [one.candidate for one in runners if one.candidate is not None]


def precisions_of(text: str, cluster: Cluster) -> list[str]:
    """The precisions to look at: one, several with commas, or `auto` for all that every chip has but fp8 and tf32.

    The first would always be the fastest, and rounds so much more coarsely that it must be asked for; the second never
    is, since every chip that has it is faster in bf16.
    """
    known = [one for one in PRECISIONS if one in cluster.chip.tflops]
    if text == "auto":
        return [one for one in known if one not in ("fp8", "tf32")]
    for one in text.split(","):
        if one not in PRECISIONS:
            raise UserError(f"--precision={text}: the trainer computes in {', '.join(PRECISIONS)}; or write auto")
        for group in cluster.kinds:
            if one not in group.chip.tflops:
                raise UserError(f"--precision={text}: {group.chip.name} lacks it; use {' or '.join(known)}")
    return text.split(",")


def _of_one(question: Question, name: str, text: str, micro_batch: int | None, tokens: float | None) -> Plan:
    """The plan of a strategy that was given."""
    candidate = in_full(question, estimate_given(question, text, micro_batch))
    change = None if candidate.fits else cheapest_change(question, candidate)
    runner = (
        Runner(family_of(candidate.strategy), candidate, change, f"needs {candidate.memory.peak / GIB:.1f} GiB"),
    ) if not candidate.fits else ()  # fmt: skip
    found = Found(candidate if candidate.fits else None, [candidate], candidate, 1, 0)
    return Plan(question, name, candidate if candidate.fits else None, (candidate,), runner, (), found, tokens)
