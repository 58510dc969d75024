"""A plan in the words of other trainers: `meshwright plan --emit FORM`. What they cannot do is refused. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

from meshwright.errors import UserError
from meshwright.estimate.kept import Kept
from meshwright.models.spec import ModelSpec
from meshwright.planning.carried import Carried
from meshwright.planning.explain import beyond_positions
from meshwright.planning.made import Plan
from meshwright.planning.question import Question
from meshwright.planning.scenario import Layout
from meshwright.strategy import OFFLOAD, Strategy

MOST_LISTED = 8
"""Machines for each of which its command is told."""
MAIN_PORT = 29500


@dataclass(frozen=True)
class Form:
    """How a plan is written."""

    file: str
    """The name of the file where none is given."""
    write: Callable[[Plan, Carried], str]
    then: str
    """What to do with it."""
    complete: str = ""
    """The same where it has data already."""
    several: str = ""
    """The command for each of several machines, where it is not the same for all."""
    has_training: bool = True
    """Whether it has a place for the optimizer and its learning rates."""
    content: Callable[[Chosen], object] | None = None
    """What it holds of a choice; raises a UserError where it cannot."""
    words: tuple[str, ...] = ()
    """Constraints that all strategies meet which it can hold."""
    holds: str = "all"
    """Which strategies those are, in the words of a strategy."""

    def advice(self, file: object, carried: Carried, machines: int = 1) -> str:
        """What to do with that file on so many machines."""
        if self.several and machines > 1:
            ranks = [str(rank) for rank in range(machines)] if machines <= MOST_LISTED else ["R"]
            lines = [f"  machine {rank}: {self.several.format(file=file, rank=rank)}" for rank in ranks]
            which = "" if machines <= MOST_LISTED else f" (R is the machine's number, from 0 to {machines - 1})"
            return f"on each machine, with an address of machine 0 for HOST{which}:\n" + "\n".join(lines)
        then = self.complete if self.complete and carried.has_data else self.then
        return then.format(file=file)


@dataclass(frozen=True)
class Chosen:
    """What other trainers need to know of a plan."""

    form: str
    spec: ModelSpec
    strategy: Strategy
    micro_batch: int
    global_batch: int
    sequence_length: int
    precision: str
    kept: Kept
    steps: int
    tokens: float | None
    """Of the whole training, where the plan has a number of them."""
    gpus: int
    machines: int
    carried: Carried

    @classmethod
    def of(cls, plan: Plan, form: str, carried: Carried) -> Chosen:
        """The best of a plan; refuses what no other trainer has."""
        best, question = plan.best, plan.question
        if best is None:
            raise UserError(f"nothing fits, so --emit {form} has nothing to write")
        beyond = beyond_positions(question)
        if beyond is not None:
            raise UserError(f"--emit {form}: {beyond}")
        _refuse_several(question, form)
        asked = replace(question, cluster=best.scenario.cluster)
        return cls.among(asked, best.strategy, best.micro_batch, form, carried, plan.tokens)

    @classmethod
    def among(
        cls, question: Question, strategy: Strategy, micro_batch: int, form: str, carried: Carried, tokens: float | None
    ) -> Chosen:
        """One of the strategies that a question may have as its answer."""
        cluster = question.cluster
        chosen = cls(
            form,
            question.spec,
            strategy,
            micro_batch,
            question.global_batch,
            question.sequence_length,
            question.precision,
            question.kept,
            carried.steps(question, tokens),
            tokens,
            cluster.gpus,
            max(1, cluster.gpus // cluster.node),
            carried,
        )
        chosen.refuse_unless(strategy.shares == "even", f"shares={strategy.shares}", "all ranks get the same there")
        chosen.refuse_unless(strategy.compress == "none", f"compress={strategy.compress}", "gradients travel whole")
        return chosen

    @property
    def passes(self) -> int:
        """Forward passes of each rank in a step."""
        return self.strategy.micro_steps(self.global_batch, self.micro_batch)

    def refuse_unless(self, holds: bool, what: str, reason: str) -> None:
        """Raise a UserError where the other trainer cannot do it."""
        if not holds:
            raise UserError(
                f"--emit {self.form}: {what} cannot be written: {reason}; without --strategy the search keeps to what "
                f"can be ({forms()[self.form].holds})"
            )

    def refuse_setting_unless(self, holds: bool, what: str, reason: str) -> None:
        """The same for what no strategy changes: the model, a setting of the file that was planned for."""
        if not holds:
            where = f", as {self.carried.source} has it," if self.carried.source else ""
            then = "; change it there" if self.carried.source else ""
            raise UserError(f"--emit {self.form}: {what}{where} cannot be written: {reason}{then}")


@dataclass(frozen=True)
class Limits:
    """What a form can hold, as a limit of the search for a plan."""

    form: str
    carried: Carried
    tokens: float | None = None
    known: dict[tuple[object, ...], bool] = field(default_factory=dict, compare=False, repr=False)

    @property
    def words(self) -> tuple[str, ...]:
        """What of it can be said as constraints."""
        return forms()[self.form].words

    def __str__(self) -> str:
        return f"--emit {self.form} keeps the search to what its file can hold: {forms()[self.form].holds}"

    def check(self, question: Question) -> None:
        """Raise a UserError where the file can hold no strategy, for what is asked beside it."""
        content = forms()[self.form].content
        if content is None:
            return
        _refuse_several(question, self.form)
        # All forms have shards of parameters, and nothing else.
        alone = Strategy.parse("zero=3" if question.cluster.gpus > 1 else "zero=0", min(2, question.cluster.gpus))
        asked = replace(question, global_batch=alone.dp)
        content(Chosen.among(asked, alone, 1, self.form, self.carried, self.tokens))

    def takes(self, question: Question, layout: Layout) -> bool:
        """Whether the file can hold that strategy."""
        content = forms()[self.form].content
        if content is None:
            return True
        key = (layout, question.spec, question.precision, question.kept, question.global_batch, question.cluster.gpus)
        if key not in self.known:
            try:
                content(Chosen.among(question, layout.strategy(), 1, self.form, self.carried, self.tokens))
                self.known[key] = True
            except UserError:
                self.known[key] = False
        return self.known[key]


def _refuse_several(question: Question, form: str) -> None:
    """Raise a UserError where machines are of several kinds."""
    if question.cluster.groups:
        raise UserError(f"--emit {form} has no setting for machines of several kinds; plan for those of one kind")


NO_ACTIVATIONS = tuple(f"offload!={one}" for one in OFFLOAD if "activations" in one)
WHOLE_STATE = (*NO_ACTIVATIONS, "offload!=optimizer")


@cache
def forms() -> dict[str, Form]:
    """All forms by name."""
    from meshwright.interop.accelerate_emit import accelerate_config, accelerate_file
    from meshwright.interop.deepspeed_emit import deepspeed_config, deepspeed_file
    from meshwright.interop.megatron_emit import megatron_file, megatron_flags
    from meshwright.interop.torchtitan_emit import torchtitan_config, torchtitan_file
    from meshwright.planning.emit import run_file

    return {
        "run": Form(
            "run.toml", run_file, "set data.path in it, then: meshwright train {file}", "meshwright train {file}"
        ),
        "deepspeed": Form(
            "ds_config.json",
            deepspeed_file,
            "give it to deepspeed.initialize(config=...); model, data and checkpoints are your script's",
            content=deepspeed_config,
            words=("tp=1", "pp=1", "cp=1", "ep=1", "recompute=none", *NO_ACTIVATIONS),
            holds=(
                "tp=1 pp=1 cp=1 ep=1 recompute=none, offload=none or optimizer, or parameters with zero=3; replicate=1 "
                "where zero is not 0"
            ),
        ),
        "megatron": Form(
            "megatron.args",
            megatron_file,
            "add data and tokenizer to it, for pretrain_gpt.py",
            "give it to pretrain_gpt.py",
            content=megatron_flags,
            words=("layers=even", "schedule!=zero-bubble", "schedule!=zbv", *NO_ACTIVATIONS, "offload!=parameters"),
            holds=(
                "zero=0 or 1, or zero=2 or 3 with pp=1 replicate=1; layers=even, schedule=1f1b or interleaved with as "
                "many layers in each stage, recompute=none, selective or full, or first:N with pp=1; offload=none, or "
                "optimizer with zero=1"
            ),
        ),
        "accelerate": Form(
            "accelerate.yaml",
            accelerate_file,
            "accelerate launch --config_file {file} train.py",
            several=(
                "accelerate launch --config_file {file} --machine_rank {rank} --main_process_ip HOST "
                f"--main_process_port {MAIN_PORT} train.py"
            ),
            has_training=False,
            content=accelerate_config,
            words=(
                *("pp=1", "ep=1", "zero!=1", "sp=off", "cp_method=ring", "recompute!=selective", "recompute!=first"),
                *WHOLE_STATE,
            ),
            holds=(
                "pp=1 ep=1 cp_method=ring sp=off, zero=0, 2 or 3, and with tp, cp or recompute=full 2 or 3; "
                "recompute=none or full, offload=none or parameters"
            ),
        ),
        "torchtitan": Form(
            "torchtitan.toml",
            torchtitan_file,
            "set its dataset, then: --job.config_file {file}",
            content=torchtitan_config,
            words=(
                *("zero!=1", "layers=even", "schedule!=zero-bubble", "cp_method=ring", "recompute!=first"),
                *WHOLE_STATE,
            ),
            holds=(
                "zero=0, 2 or 3, layers=even, schedule=1f1b, interleaved or zbv, cp_method=ring, sp=on with tp; "
                "recompute=none, selective or full, offload=none or parameters"
            ),
        ),
    }
