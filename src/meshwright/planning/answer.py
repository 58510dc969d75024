"""The answer of the planner: the best strategy, its runners-up, and what else would do. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from meshwright.cluster.cluster import Cluster, parse_cluster
from meshwright.comm.compression import NONE
from meshwright.errors import ConfigError, UserError
from meshwright.estimate.kept import Kept
from meshwright.models.hf_config import read_json, read_spec, spec_from_config
from meshwright.models.presets import preset, presets
from meshwright.models.spec import ModelSpec
from meshwright.planning.changes import cheapest_change
from meshwright.planning.constraints import Constraint, parse_constraints
from meshwright.planning.corrections import learned_of, subject_of
from meshwright.planning.families import family_of
from meshwright.planning.given import estimate_given
from meshwright.planning.made import Plan
from meshwright.planning.narrow import narrower
from meshwright.planning.question import Candidate, Found, Only, Question, estimate, in_full
from meshwright.planning.runners import Runner, fewest_gpus, on_fewer, runners_of
from meshwright.planning.scenario import Layout
from meshwright.planning.search import OBJECTIVES, check_objective, search
from meshwright.planning.space import allowed
from meshwright.planning.state_memory import GIB
from meshwright.strategy import AUTO, Strategy

PRECISIONS = ("bf16", "fp16", "tf32", "float32", "fp8")
"""What the trainer computes in; where two are as fast, the first one is preferred."""
TOKENS_PER_STEP = 4 << 20
"""Of a step where no global batch is given."""
SHOWN = 4
"""Candidates of the best family that are told of."""


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
    only: Only | None = None,
) -> Plan:
    """Which strategy trains a model best on a cluster, whether it fits, how fast, and why.

    With `strategy` that one is estimated instead of searched for. `compare` adds the runners-up of other families and
    fewer chips. `stored` and `moments` are how weights and AdamW's moments are kept (precision.stored,
    precision.moments). `batches` are other global batches that the ranks must be able to share too. With `all_chips`,
    machines of a slow kind are not left out. `compile` says whether layers are compiled on GPUs (train.compile).
    `only` limits the search further.
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
    only = only if strategy is None else None
    first = Question(
        spec,
        machines,
        length,
        batch,
        kept=Kept.of(stored, moments),
        constraints=_constraints(texts, only),
        batches=tuple(batches),
        all_chips=all_chips,
        compile=compile,
        only=only,
        learned=learned_of(machines),
    )
    asked = [replace(first, precision=one) for one in precisions_of(precision, machines)]
    if strategy is not None:
        if objective != OBJECTIVES[0]:
            raise UserError(f"--objective={objective} is for a search, and --strategy is one; drop one of them")
        given = [_of_one(one, name, strategy, micro_batch, tokens) for one in asked]
        return min(given, key=lambda one: one.best.step_s if one.best is not None else float("inf"))
    asked = _taken(asked)
    try:
        return _searched(asked, name, objective, tokens, compare)
    except UserError as error:
        raise UserError(f"{error} ({only})" if only is not None and only.words else str(error)) from None


def _constraints(texts: list[str], only: Only | None) -> tuple[Constraint, ...]:
    """Those that were typed, and those that follow from what else limits the search."""
    typed = parse_constraints(texts)
    if only is None:
        return typed
    try:
        return parse_constraints([*texts, *only.words])
    except UserError as error:
        raise UserError(f"{error} ({only})") from None


def _taken(asked: list[Question]) -> list[Question]:
    """Of one question in several precisions, those with which something can be taken; raises where that is none."""
    found, refusals = [], []
    for question in asked:
        try:
            if question.only is not None:
                question.only.check(question)
            found.append(question)
        except UserError as error:
            refusals.append(error)
    if not found:
        raise refusals[0]
    return found


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
