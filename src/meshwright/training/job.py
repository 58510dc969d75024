"""Everything about a run that can be known before a process is started, checked: model, data, batches, strategy.

No torch here, so that a mistake is reported at once and before any work is lost.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from meshwright.axis_order import Order, parse_order
from meshwright.config import DataSection, ObserveSection, RunConfig
from meshwright.data.batch_schedule import BatchSchedule
from meshwright.data.indexed import open_corpus
from meshwright.data.prepare import prepare
from meshwright.data.progress import shown_progress
from meshwright.data.sampler import Sampler
from meshwright.data.shards import Corpus
from meshwright.data.tokenizer import Tokenizer, UnknownTokenizer, load_tokenizer
from meshwright.errors import ConfigError, DataError, UserError, nearest
from meshwright.models.hf_config import read_spec
from meshwright.models.presets import preset
from meshwright.models.spec import Experts, ModelSpec
from meshwright.secrets import read_token
from meshwright.strategy import Strategy
from meshwright.training.run_folder import RunFolder
from meshwright.training.travel import travel_of


@dataclass(frozen=True)
class Job:
    """A run that can start: what follows from its configuration."""

    strategy: Strategy
    spec: ModelSpec
    batches: BatchSchedule
    sampler: Sampler
    tokenizer: Tokenizer
    folder: RunFolder
    order: Order
    """Of the strategy's axes over the ranks."""


def make_job(config: RunConfig, world: int) -> Job:
    """Check a configuration against its files and that many processes."""
    strategy = Strategy.parse(config.parallel.strategy, world)
    spec = model_spec(config)
    strategy.check(spec, world, config.data.sequence_length, config.train.optimizer)
    travel_of(config, strategy)
    order = parse_order(config.parallel.placement, strategy)
    if config.data.sequence_length > spec.max_position_embeddings:
        raise ConfigError(
            f"data.sequence_length={config.data.sequence_length} is more than the model's "
            f"{spec.max_position_embeddings} positions; lower it or set model.spec.max_position_embeddings"
        )
    _check_exporters(config.observe)
    batches = batch_schedule(config)
    for size in batches.sizes():
        strategy.micro_steps(size, config.train.micro_batch)
    folder = RunFolder(config.run.dir, config.secrets())
    folder.check(config)
    prepare_sources(config)
    corpora = open_corpora(config.data)
    tokenizer = matching_tokenizer(config, [corpus for corpus, _ in corpora])
    if config.data.mask_documents and tokenizer.end is None:
        raise ConfigError(
            "data.mask_documents needs a token that ends a document, and this corpus's tokenizer has none; "
            "set data.tokenizer where the corpus came without one, prepare it with another one, or leave it out"
        )
    sampler = Sampler(
        corpora,
        seed=config.run.seed,
        sequence_length=config.data.sequence_length,
        validation_fraction=config.data.validation,
        vocab_size=spec.vocab_size,
    )
    return Job(strategy, spec, batches, sampler, tokenizer, folder, order)


def _check_exporters(observe: ObserveSection) -> None:
    """Raise where a package of an exporter is missing, or the token that it asks others for."""
    if observe.wandb and find_spec("wandb") is None:
        raise ConfigError("observe.wandb needs the wandb package; pip install 'meshwright[wandb]'")
    if observe.mlflow and not re.match("https?://", os.environ.get("MLFLOW_TRACKING_URI", "")):
        raise ConfigError(
            "observe.mlflow sends to a tracking server: set MLFLOW_TRACKING_URI to its address, such as "
            "http://127.0.0.1:5000, where `mlflow server` listens"
        )
    if observe.prometheus is not None:
        if find_spec("prometheus_client") is None:
            raise ConfigError(
                "observe.prometheus needs the prometheus-client package; pip install 'meshwright[prometheus]'"
            )
        if observe.prometheus_token_file is not None:
            read_token(observe.prometheus_token_file, "observe.prometheus_token_file")


def model_spec(config: RunConfig) -> ModelSpec:
    """The shape that the [model] section describes."""
    section = config.model
    if section.from_hf:
        return read_spec(section.from_hf)
    base = preset(section.preset).model_dump() if section.preset else {}
    if not base and not section.spec:
        raise ConfigError("no model: set model.preset (`meshwright models` lists them), model.from_hf or model.spec")
    # A head size that followed from width and heads follows from them again, unless it is set by hand.
    if base and base["head_dim"] * base["num_attention_heads"] == base["hidden_size"]:
        del base["head_dim"]
    try:
        spec = ModelSpec.model_validate(_laid_over(base, section.spec))
    except ValidationError as errors:
        raise ConfigError("\n  ".join(_shape_complaint(dict(error)) for error in errors.errors())) from None
    spec.check_buildable()
    return spec


def _shape_complaint(error: dict[str, Any]) -> str:
    """What is wrong with a setting of model.spec, and what is allowed."""
    key = ".".join(["model.spec", *map(str, error["loc"])])
    if error["type"] == "extra_forbidden":
        known = list((Experts if "experts" in error["loc"][:-1] else ModelSpec).model_fields)
        return f"unknown setting '{key}'{nearest(str(error['loc'][-1]), known)}; it has {', '.join(known)}"
    if error["type"] == "missing":
        return f"{key} is missing; give it, or start from a model.preset"
    found = f" = {error['input']!r}" if error["loc"] else ""
    return f"{key}{found}: {error['msg'].removeprefix('Value error, ')}"


def _laid_over(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Settings over a preset's: tables merge, `none` clears, values replace."""
    merged = dict(base)
    for name, value in changes.items():
        below = merged.get(name)
        if isinstance(value, dict) and isinstance(below, dict):
            merged[name] = _laid_over(below, value)
        else:
            merged[name] = None if value == "none" else value
    return merged


def batch_schedule(config: RunConfig) -> BatchSchedule:
    """The global batch of every step."""
    setting = config.train.batch_schedule
    if setting is None:
        return BatchSchedule.parse(config.train.global_batch)
    try:
        return BatchSchedule.parse(setting)
    except UserError as error:
        raise ConfigError(f"train.batch_schedule={setting!r}: {error}") from None


def unprepared(data: DataSection) -> Path | None:
    """The index of a corpus that data.sources describes and that is not packed yet."""
    index = Path(data.path or "") / "index.json"
    return index if data.sources and not index.exists() else None


def prepare_sources(config: RunConfig) -> None:
    """Pack data.sources into data.path unless that was done before; with the model's own tokenizer where it has one."""
    if unprepared(config.data) is None:
        return
    assert config.data.path is not None
    tokenizer = config.data.tokenizer or _tokenizer_of(config.model.from_hf) or "bytes"
    with shown_progress() as progress:
        prepare(config.data.sources, config.data.path, tokenizer, progress=progress)


def _tokenizer_of(folder: str | None) -> str | None:
    """The folder, if there is a tokenizer in it."""
    if folder and any((Path(folder) / name).exists() for name in ("tokenizer.json", "vocab.json")):
        return folder
    return None


def open_corpora(data: DataSection) -> list[tuple[Corpus, float]]:
    """The packed corpora with their weights."""
    if data.mix:
        return [(open_corpus(share.path), share.weight) for share in data.mix]
    if not data.path:
        raise DataError("no data: set data.path to a folder made by `meshwright data prepare`")
    return [(open_corpus(data.path), 1.0)]


def matching_tokenizer(config: RunConfig, corpora: list[Corpus]) -> Tokenizer:
    """The tokenizer that all corpora were packed with, if it is the one that the settings ask for.

    Token files that came without one take the one that is asked for.
    """
    corpora = [corpus for corpus in corpora if corpus.has_tokenizer]
    if not corpora:
        named = config.data.tokenizer or _tokenizer_of(config.model.from_hf)
        if named is None and config.observe.sample is not None:
            raise ConfigError("observe.sample is text, and data.path holds tokens alone; set data.tokenizer")
        return UnknownTokenizer() if named is None else load_tokenizer(named)
    first = corpora[0]
    tokenizer = load_tokenizer(first.tokenizer_folder)
    wanted: list[tuple[str, str]] = [(str(corpus.path), corpus.tokenizer.digest) for corpus in corpora[1:]]
    if config.data.tokenizer:
        wanted.append((f"data.tokenizer={config.data.tokenizer}", load_tokenizer(config.data.tokenizer).digest))
    if folder := _tokenizer_of(config.model.from_hf):
        wanted.append((f"model.from_hf={folder}", load_tokenizer(folder).digest))
    for place, digest in wanted:
        if digest != first.tokenizer.digest:
            raise DataError(
                f"{first.path} was packed with the tokenizer {first.tokenizer.name!r}, which is not that of {place}; "
                "prepare the corpus anew with the right --tokenizer"
            )
    return tokenizer
