"""Rows of a table of published training runs as scenarios: what a source says in words, as numbers.

A row that lacks what an estimate needs, or says what the estimates do not know, is skipped with a reason. What a
source leaves out is assumed by rules that are the same for all of them; `Run.assumed` says which were used.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meshwright.models.spec import ModelSpec
from meshwright.planning.scenario import Layout, Scenario
from meshwright.planning.software import Constants
from published_machines import cluster_of
from published_models import spec_of
from published_software import Habits, habits_of
from published_words import Skip, number_of, whole

NEEDED = (
    *("n_layers", "hidden", "n_heads", "ffn_hidden", "vocab", "seq_len", "gpu", "n_gpus", "dp", "tp", "pp", "cp"),
    *("micro_batch", "global_batch", "precision"),
)
"""Columns that a complete configuration has."""
SCALES = (
    (8, "1-8 GPUs"),
    (64, "9-64 GPUs"),
    (512, "65-512 GPUs"),
    (2048, "513-2048 GPUs"),
    (1 << 30, "over 2048 GPUs"),
)


@dataclass(frozen=True)
class Run:
    """A published run as the estimates see it."""

    number: int
    """Line of the file, the header being line 1."""
    row: dict[str, str] = field(repr=False)
    scenario: Scenario
    family: str
    complete: bool
    """Whether the row gives the whole configuration."""
    assumed: tuple[str, ...]
    step_s: float | None
    memory_gib: float | None
    memory_kind: str
    out_of_memory: bool

    @property
    def ran(self) -> bool:
        """Whether it is known to have trained."""
        return not self.out_of_memory and (self.step_s is not None or self.memory_gib is not None)

    @property
    def scale(self) -> str:
        """The band of its size."""
        return next(name for most, name in SCALES if self.scenario.layout.world <= most)

    @property
    def strategy(self) -> str:
        """The family of strategies that it belongs to."""
        layout = self.scenario.layout
        if self.scenario.spec.experts is not None:
            return "experts"
        if layout.tp == layout.pp == layout.cp == 1:
            return {0: "replicas", 1: "sharded optimizer", 2: "sharded gradients", 3: "fully sharded"}[layout.zero]
        axes = [name for name in ("tp", "pp", "cp") if getattr(layout, name) > 1]
        return " + ".join(axes + (["fully sharded"] if layout.zero == 3 else []))

    def groups(self) -> dict[str, str]:
        """What the row is grouped by in reports."""
        return {
            "source": source_of(self.row),
            "gpu": self.scenario.cluster.chip.key,
            "scale": self.scale,
            "strategy": self.strategy,
            "software": self.family,
        }


def source_of(row: dict[str, str]) -> str:
    """A source without its release: releases of one table repeat each other's configurations."""
    name = row.get("source", "").strip() or "unnamed"
    return re.sub(r"( perf summary.*| v\d[\d.]*$| \d{4}-\d\d$| \(PR.*| Table.*| Fig.*)", "", name)


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a file with the columns of the published-runs table; unknown columns stay, missing ones are empty."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        return [{key: (value or "").strip() for key, value in row.items() if key} for row in csv.DictReader(file)]


def runs_of(path: Path, constants: Constants) -> tuple[list[Run], list[dict[str, Any]]]:
    """All rows that can be estimated, and the others with a reason."""
    runs, skipped = [], []
    for number, row in enumerate(read_rows(path), 2):
        try:
            runs.append(run_of(number, row, constants))
        except (Skip, ValueError, ArithmeticError) as error:
            reason = str(error) if isinstance(error, Skip) else f"impossible numbers: {error}"
            skipped.append({"line": number, "source": source_of(row), "complete": is_complete(row), "reason": reason})
    return runs, skipped


def is_complete(row: dict[str, str]) -> bool:
    """Whether a row has the whole configuration and something that was measured."""
    return all(row.get(name) for name in NEEDED) and has_measurement(row)


def has_measurement(row: dict[str, str]) -> bool:
    """Whether there is a time or a peak of memory."""
    return any(row.get(name) for name in ("step_time_s", "tokens_per_s_per_gpu", "peak_mem_gb"))


def run_of(number: int, row: dict[str, str], constants: Constants) -> Run:
    """A row as a scenario."""
    if not has_measurement(row):
        raise Skip("no step time, tokens/s or peak memory")
    notes = row.get("notes", "").lower()
    if "lora" in notes or "lora" in row.get("model", "").lower():
        raise Skip("trains adapters, not the model")
    assumed: list[str] = []
    spec = spec_of(row, assumed)
    habits = habits_of(row, assumed)
    gpus = whole(row, "n_gpus")
    precision = _precision(row, assumed)
    layout = _layout(row, spec, gpus, habits, notes, assumed)
    if layout.shard * layout.replicate != layout.dp:
        raise Skip(f"shards of {layout.shard} do not divide dp={layout.dp}")
    cluster = cluster_of(row, gpus)
    if {"fp8": "fp8", "mxfp8": "fp8", "nvfp4": "fp4"}.get(precision, precision) not in cluster.chip.tflops:
        raise Skip(f"{cluster.chip.name} has no {precision}")
    length = whole(row, "seq_len", assumed, _told_length(notes))
    micro = whole(row, "micro_batch", assumed, 1 if row.get("peak_mem_gb") and not row.get("step_time_s") else None)
    batch = whole(row, "global_batch", assumed, layout.dp * micro if not row.get("tokens_per_s_per_gpu") else None)
    software = replace(constants.software[habits.family], **habits.stored(row.get("precision", "").lower(), notes))
    if "unpacked" in notes:
        raise Skip("sequences of unequal length")
    if "activation offload" in notes or "cpu offload" in notes:
        raise Skip("offloads what the estimates keep")
    scenario = Scenario(
        spec=spec,
        layout=layout,
        cluster=cluster,
        software=software,
        sequence_length=length,
        micro_batch=micro,
        global_batch=max(batch, layout.dp * micro),
        precision=precision,
        loss_chunks=_loss_chunks(row, notes),
        flash_attention=habits.flash and "unfused" not in row.get("attention", "").lower(),
    )
    step_s = number_of(row.get("step_time_s", ""))
    tokens = number_of(row.get("tokens_per_s_per_gpu", ""))
    if step_s is None and tokens:
        step_s = batch * length / (tokens * gpus)
    peak = row.get("peak_mem_gb", "")
    out = "oom" in peak.lower()
    memory, kind = habits.memory_of(peak, notes)
    return Run(
        number,
        row,
        scenario,
        habits.family,
        is_complete(row),
        tuple(assumed),
        step_s,
        None if out else memory,
        kind,
        out,
    )


def _told_length(notes: str) -> int | None:
    """Tokens of a sequence where only a default is named."""
    told = re.search(r"seq_len[^;]*default (\d+)", notes)
    return int(told.group(1)) if told else None


def _precision(row: dict[str, str], assumed: list[str]) -> str:
    text = row.get("precision", "").lower()
    for word, precision in (
        ("nvfp4", "nvfp4"),
        ("mxfp8", "mxfp8"),
        ("fp8-mx", "mxfp8"),
        ("fp8", "fp8"),
        ("float8", "fp8"),
    ):
        if word in text:
            return precision
    for precision in ("bf16", "fp16"):
        if precision in text:
            return precision
    if text in ("fp32", "float32", "tf32"):
        return "float32"
    if not text:
        assumed.append("precision=bf16")
        return "bf16"
    raise Skip(f"unknown precision '{row['precision']}'")


def _layout(row: dict[str, str], spec: ModelSpec, gpus: int, habits: Habits, notes: str, assumed: list[str]) -> Layout:
    tp, pp, cp = (whole(row, name) for name in ("tp", "pp", "cp"))
    ep = whole(row, "ep", otherwise=1)
    if gpus % (tp * pp * cp):
        raise Skip(f"tp x pp x cp = {tp * pp * cp} does not divide {gpus} GPUs")
    dp = gpus // (tp * pp * cp)
    zero_text = row.get("zero_stage", "")
    stage = re.match(r"[0-3]", zero_text)
    if stage is None and zero_text:
        raise Skip(f"unknown zero_stage '{zero_text}'")
    if stage is None and habits.family == "megatron":
        assumed.append("distributed optimizer")
    zero = int(stage.group()) if stage else (1 if habits.family == "megatron" else 0)
    shard = dp if zero else 1
    group = re.search(r"shard group (\d+)|shard within (\d+)-gpu|fsdp (\d+)\b", f"{zero_text} {notes}".lower())
    if group and zero:
        wanted = int(next(one for one in group.groups() if one))
        if wanted < 1:
            raise Skip(f"a shard group of {wanted} ranks")
        # Megatron and InternEvo count the ranks of a machine, tensor-parallel ones among them.
        wanted = max(1, wanted // tp) if "within" in group.group() else wanted
        shard = wanted if dp % wanted == 0 else dp
    expert_tp = 1
    if spec.experts is not None:
        if dp * cp * tp % ep:
            raise Skip(f"ep={ep} does not divide the {dp * cp * tp} ranks of a stage")
        coarse = spec.experts.moe_intermediate_size >= spec.hidden_size
        if tp > 1 and coarse and dp * cp % ep == 0:
            expert_tp = tp
        if spec.experts.num_experts % ep:
            raise Skip(f"ep={ep} does not divide {spec.experts.num_experts} experts")
    elif ep > 1:
        raise Skip(f"ep={ep} of a model without experts")
    schedule = _schedule(row, spec, pp)
    return Layout(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        expert_tp=expert_tp,
        zero=zero,
        shard=shard,
        sp=tp > 1 and (row.get("sp") == "1" or (not row.get("sp") and habits.sequence_parallel)),
        schedule=schedule,
        recompute=_recompute(row, assumed),
        offload="optimizer" if "offload" in zero_text.lower() else "none",
    )


def _schedule(row: dict[str, str], spec: ModelSpec, pp: int) -> str:
    if pp == 1:
        return "1f1b"
    if pp > spec.num_hidden_layers:
        raise Skip(f"pp={pp} stages of {spec.num_hidden_layers} layers")
    framework = row.get("framework", "").lower()
    if "zb-2p" in framework or "v-half" in framework or "v-min" in framework:
        raise Skip("a pipeline schedule that is not known here")
    if "zb-1p" in framework or "zero-bubble" in framework:
        return "zero-bubble"
    if "zbv" in framework:
        return "zbv"
    chunks = int(number_of(row.get("vpp", "")) or 1)
    if not row.get("vpp"):
        told = re.search(r"\bvpp?\b[^;()]*\((\d+) at", row.get("notes", "").lower())
        chunks = int(told.group(1)) if told else 1
    return f"interleaved:{chunks}" if 1 < chunks <= spec.num_hidden_layers // pp else "1f1b"


UNSTATED = "unstated"


def _recompute(row: dict[str, str], assumed: list[str]) -> str:
    text = row.get("activation_ckpt", "").lower()
    if not text:
        assumed.append("recompute as little as fits")
        return UNSTATED
    if text.startswith("full"):
        return "full"
    if text in ("none", "no", "off", "false"):
        return "none"
    return "selective"


def _loss_chunks(row: dict[str, str], notes: str) -> int:
    """Fused and chunked losses, which sources name in their notes."""
    after_chunked = ("chunked", "activation ckpt", "optimizer-in-backward", "activation offload", "8-bit adamw")
    fused = ("liger" in notes and "without liger" not in notes) or "fused ce" in notes or "tiled" in notes
    if fused or ("cumulative technique" in notes and any(word in notes for word in after_chunked)):
        return 16
    return 16 if "liger" in row.get("framework", "").lower() else 1
