"""Rows of a table of published training runs as scenarios: what a source says in words, as numbers.

A row that lacks what an estimate needs, or says what the estimates do not know, is skipped with a reason. What a
source leaves out is assumed by rules that are the same for all of them; `Run.assumed` says which were used.
"""

from __future__ import annotations

import csv
import re
import tomllib
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from meshwright.cluster.chips import Chip, chips
from meshwright.cluster.cluster import Cluster
from meshwright.models.count import count_parameters
from meshwright.models.spec import ModelSpec
from meshwright.planning.scenario import Layout, Scenario
from meshwright.planning.software import Constants

HERE = Path(__file__).parent
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
FAMILIES = (
    ("automodel", "fsdp"),
    ("metaseq", "fsdp"),
    ("fairscale", "fsdp"),
    ("sagemaker", "fsdp"),
    ("nanotron", "megatron"),
    ("megatron-deepspeed", "deepspeed"),
    ("deepspeed zero", "deepspeed"),
    ("deepspeed", "deepspeed"),
    ("megatron", "megatron"),
    ("nemo", "megatron"),
    ("primus", "megatron"),
    ("megascale", "megatron"),
    ("internevo", "deepspeed"),
    ("colossal", "deepspeed"),
    ("llm-foundry", "fsdp"),
    ("composer", "fsdp"),
    ("torchtitan", "fsdp"),
    ("torchtune", "fsdp"),
    ("accelerate", "fsdp"),
    ("fsdp", "fsdp"),
    ("paxml", "jax"),
    ("maxtext", "jax"),
    ("jax", "jax"),
    ("alpa", "jax"),
)
"""Words in a framework's name, and the family whose constants it gets; the first that occurs."""


GPT_VOCABULARY = 51200
"""Of Megatron's GPT models: GPT-2's tokens, padded."""


MOST_RANKS = 1_000_000
MOST = {"global_batch": 10_000_000, "seq_len": 100_000_000}
"""Above these, numbers are no training run's."""


class Skip(Exception):
    """A row that cannot be estimated, and why."""


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
    spec = _spec(row, assumed)
    framework = row.get("framework", "").lower()
    family = next((family for word, family in FAMILIES if word in framework), None)
    if family is None:
        # What it does tells whose habits it has: whole matrices and sharded state, or split ones.
        split = any(_number(row.get(axis, "")) not in (None, 1.0) for axis in ("tp", "pp"))
        family = "megatron" if split else "fsdp"
        assumed.append(f"as fast as {family}")
    gpus = _whole(row, "n_gpus")
    precision = _precision(row, assumed)
    layout = _layout(row, spec, gpus, family, notes, assumed)
    if layout.shard * layout.replicate != layout.dp:
        raise Skip(f"shards of {layout.shard} do not divide dp={layout.dp}")
    cluster = _cluster(row, gpus)
    if {"fp8": "fp8", "mxfp8": "fp8", "nvfp4": "fp4"}.get(precision, precision) not in cluster.chip.tflops:
        raise Skip(f"{cluster.chip.name} has no {precision}")
    length = _whole(row, "seq_len", assumed, 2048 if "default 2048" in notes else None)
    micro = _whole(row, "micro_batch", assumed, 1 if row.get("peak_mem_gb") and not row.get("step_time_s") else None)
    batch = _whole(row, "global_batch", assumed, layout.dp * micro if not row.get("tokens_per_s_per_gpu") else None)
    software = constants.software[family]
    changes = _stored(row, family, notes)
    if "unpacked" in notes:
        raise Skip("sequences of unequal length")
    if "activation offload" in notes or "cpu offload" in notes:
        raise Skip("offloads what the estimates keep")
    if changes:
        software = replace(software, **changes)
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
        flash_attention="unfused" not in row.get("attention", "").lower() and "alpa" not in framework,
    )
    step_s = _number(row.get("step_time_s", ""))
    tokens = _number(row.get("tokens_per_s_per_gpu", ""))
    if step_s is None and tokens:
        step_s = batch * length / (tokens * gpus)
    peak = row.get("peak_mem_gb", "")
    out = "oom" in peak.lower()
    memory, kind = _memory(peak, row, notes)
    return Run(
        number, row, scenario, family, is_complete(row), tuple(assumed), step_s, None if out else memory, kind, out
    )


def _number(text: str) -> float | None:
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value if 0 < value < 1e15 else None


def _whole(row: dict[str, str], name: str, assumed: list[str] | None = None, otherwise: int | None = None) -> int:
    value = _number(row.get(name, ""))
    if value is None and otherwise is not None:
        if assumed is not None:
            assumed.append(f"{name}={otherwise}")
        return otherwise
    if value is None or value != int(value):
        raise Skip(f"{name} is {'not given' if not row.get(name) else repr(row[name])}")
    if value > MOST.get(name, MOST_RANKS):
        raise Skip(f"{name}={value:.0f} is impossible")
    return int(value)


@cache
def _shapes() -> dict[str, dict[str, Any]]:
    return tomllib.loads((HERE / "data/model_shapes.toml").read_text(encoding="utf-8"))


def _known(model: str) -> dict[str, Any]:
    names = [name for name in _shapes() if model.lower().startswith(name)]
    return dict(_shapes()[max(names, key=len)]) if names else {}


def _spec(row: dict[str, str], assumed: list[str]) -> ModelSpec:
    """The model's shape; gated or not, tied or not, as the number of parameters says."""
    known = _known(row.get("model", ""))

    def size(column: str, name: str) -> int:
        value = _number(row.get(column, ""))
        if value is None and name in known:
            assumed.append(f"{column}={known[name]}")
            return int(known[name])
        if value is None:
            raise Skip(f"{column} is not given")
        return int(value)

    width = size("hidden", "hidden_size")
    if not row.get("n_heads") and "num_attention_heads" not in known and width % 128 == 0:
        known["num_attention_heads"] = width // 128
    if not row.get("vocab") and "vocab_size" not in known and row.get("model", "").lower().startswith("gpt"):
        known["vocab_size"] = GPT_VOCABULARY
    if not row.get("n_layers") and "num_hidden_layers" not in known:
        known |= _layers(row, width, known)
    heads = size("n_heads", "num_attention_heads")
    experts = None
    count = _number(row.get("moe_experts", ""))
    inner = _number(row.get("ffn_hidden", ""))
    if count is not None:
        per_token = _number(row.get("moe_topk", ""))
        if per_token is None:
            raise Skip("moe_topk is not given")
        facts = dict(known.get("experts", {}))
        if inner is not None:
            facts.setdefault("moe_intermediate_size", int(inner))
        if "moe_intermediate_size" not in facts:
            raise Skip("ffn_hidden is not given")
        experts = {"num_experts": int(count), "num_experts_per_tok": int(per_token), **facts}
        inner = known.get("intermediate_size", facts["moe_intermediate_size"])
    else:
        inner = size("ffn_hidden", "intermediate_size")
    latent = known.get("latent_attention")
    if width % heads and "head_dim" not in known and latent is None:
        raise Skip(f"hidden={width} is not divisible by n_heads={heads}")
    groups = _number(row.get("n_kv_heads", "")) or heads
    base: dict[str, Any] = {
        "vocab_size": size("vocab", "vocab_size"),
        "hidden_size": width,
        "intermediate_size": int(inner or 0),
        "num_hidden_layers": size("n_layers", "num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": int(groups) if latent is None else heads,
        "head_dim": known.get("head_dim", width // heads),
        "max_position_embeddings": 1 << 20,
        "positions": "rope",
        "qk_norm": known.get("qk_norm", False),
        "experts": experts,
        "latent_attention": latent,
    }
    kinds = [known["activation"]] if "activation" in known else ["swiglu", "gelu"]
    ties = [known["tie_word_embeddings"]] if "tie_word_embeddings" in known else [False, True]
    try:
        specs = [
            ModelSpec.model_validate({**base, "activation": kind, "tie_word_embeddings": tied})
            for kind in kinds
            for tied in ties
        ]
    except ValidationError as error:
        raise Skip(f"impossible shape: {error.errors()[0]['msg']}") from None
    total = _number(row.get("params_b", ""))
    if total is None or len(specs) == 1:
        return specs[0]
    return min(specs, key=lambda spec: abs(count_parameters(spec).total / 1e9 - total))


def _layers(row: dict[str, str], width: int, known: dict[str, Any]) -> dict[str, int]:
    """How many layers a dense model of that size and width has."""
    total, inner = _number(row.get("params_b", "")), _number(row.get("ffn_hidden", ""))
    if total is None or inner is None or row.get("moe_experts"):
        return {}
    matrices = 3 if known.get("activation") == "swiglu" else 2
    table = width * (_number(row.get("vocab", "")) or 0)
    return {"num_hidden_layers": round((total * 1e9 - table) / (4 * width**2 + matrices * width * inner))}


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


def _layout(row: dict[str, str], spec: ModelSpec, gpus: int, family: str, notes: str, assumed: list[str]) -> Layout:
    tp, pp, cp = (_whole(row, name) for name in ("tp", "pp", "cp"))
    ep = _whole(row, "ep", otherwise=1)
    if gpus % (tp * pp * cp):
        raise Skip(f"tp x pp x cp = {tp * pp * cp} does not divide {gpus} GPUs")
    dp = gpus // (tp * pp * cp)
    zero_text = row.get("zero_stage", "")
    stage = re.match(r"[0-3]", zero_text)
    if stage is None and zero_text:
        raise Skip(f"unknown zero_stage '{zero_text}'")
    if stage is None and family == "megatron":
        assumed.append("distributed optimizer")
    zero = int(stage.group()) if stage else (1 if family == "megatron" else 0)
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
    modern = family == "megatron" and "285068c8" not in row.get("framework", "")
    return Layout(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        expert_tp=expert_tp,
        zero=zero,
        shard=shard,
        sp=tp > 1 and (row.get("sp") == "1" or modern),
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
    chunks = int(_number(row.get("vpp", "")) or 1)
    if not row.get("vpp"):
        told = re.search(r"vp listed na at this tag \((\d+)", row.get("notes", "").lower())
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


def _cluster(row: dict[str, str], gpus: int) -> Cluster:
    chip = _chip(row)
    node = _whole(row, "gpus_per_node", otherwise=chip.node)
    nic = _nic(row.get("interconnect", ""), node) or chip.nic
    domain = chip.domain if chip.domain > chip.node else node
    return Cluster(chip, gpus, min(node, gpus), min(domain, gpus), chip.link, nic)


def _chip(row: dict[str, str]) -> Chip:
    text = row.get("gpu", "").lower()
    memory = _number(row.get("gpu_mem_gb", ""))
    if not text:
        raise Skip("gpu is not given")
    if "h100" in text and ("hbm2e" in text or memory == 96):
        return chips()["h100-500w"]
    if "h100" in text and "pcie" in text:
        return chips()["h100-pcie"]
    if "a100" in text:
        return chips()["a100-40" if memory == 40 or "40gb" in text else "a100"]
    plain = re.sub(r"[^a-z0-9]", "", text)
    for key in sorted(chips(), key=len, reverse=True):
        if plain.startswith(key.replace("-", "")) or key.replace("-", "") in plain:
            return chips()[key]
    raise Skip(f"unknown chip '{text}'")


def _nic(text: str, node: int) -> float | None:
    """GB/s of the network for each GPU, as a source says it."""
    several = re.search(r"(\d+)x(\d+) ?gb", text.lower())
    if several:
        return int(several.group(1)) * int(several.group(2)) / 8 / node
    each = re.search(r"(\d+) ?gb(?:/s)?[a-z -]*per gpu", text.lower())
    if each:
        return int(each.group(1)) / 8
    together = re.search(r"(\d+) ?gb(?:/s)?[a-z -]*per node", text.lower())
    if together:
        return int(together.group(1)) / 8 / node
    if "omni-path" in text.lower():
        # Jean Zay's A100 machines have four links of 100 Gb.
        return 4 * 100 / 8 / node
    return None


def _stored(row: dict[str, str], family: str, notes: str) -> dict[str, Any]:
    """What a run keeps that differs from its family's habit."""
    text, framework = row.get("precision", "").lower(), row.get("framework", "").lower()
    if "8-bit" in notes or "8bit" in notes:
        return {"parameter_bytes": 2, "gradient_bytes": 2, "optimizer_bytes": 2}
    if "optimizer-in-backward" in notes:
        return {"parameter_bytes": 2, "gradient_bytes": 0, "optimizer_bytes": 4}
    if "bridge" in framework or "nemo" in framework:
        # Their recipes add gradients up in bf16.
        return {"gradient_bytes": 2}
    if "llm-foundry" in framework:
        # Its loss is fused and leaves one narrow copy and one wide one.
        changes = {"logit_bytes": 6}
        return changes | ({"parameter_bytes": 2, "gradient_bytes": 2, "optimizer_bytes": 4} if "pure" in text else {})
    if "pure" in text or ("torchtune" in row.get("framework", "").lower()):
        # Parameters, gradients and moments in 16 bits.
        return {"parameter_bytes": 2, "gradient_bytes": 2, "optimizer_bytes": 4}
    if "fp32 grad" in text or (
        family == "deepspeed" and text.startswith("bf16") and "bloom" in row.get("model", "").lower()
    ):
        return {"gradient_bytes": 6, "optimizer_bytes": 12}
    return {}


def _loss_chunks(row: dict[str, str], notes: str) -> int:
    """Fused and chunked losses, which sources name in their notes."""
    after_chunked = ("chunked", "activation ckpt", "optimizer-in-backward", "activation offload", "8-bit adamw")
    fused = ("liger" in notes and "without liger" not in notes) or "fused ce" in notes or "tiled" in notes
    if fused or ("cumulative technique" in notes and any(word in notes for word in after_chunked)):
        return 16
    return 16 if "zero-3 + cpu" in row.get("framework", "").lower() else 1


def _memory(peak: str, row: dict[str, str], notes: str) -> tuple[float | None, str]:
    """Peak memory in GiB, and what was measured: allocated, reserved, or all that the device has given out."""
    value = _number(peak)
    if value is None:
        return None, ""
    framework, source = row.get("framework", "").lower(), row.get("source", "").lower()
    if "nvidia-smi" in notes or "bloom" in source or "internevo" in source:
        return value, "device"
    if "reserved" in notes and "allocated" not in notes:
        return value, "reserved"
    if "titan" in framework or "deepspeed" in framework or "ml-engineering" in source:
        return value, "reserved"
    if "allocated" in notes:
        return (value if "gib" in notes else value * 1e9 / 2**30), "allocated"
    return value, "allocated"
