"""Everything about a run that can be known before a process is started, checked: model, data, batches, strategy.

No torch here, so that a mistake is reported at once and before any work is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from meshwright.config import DataSection, RunConfig
from meshwright.data.batch_schedule import BatchSchedule
from meshwright.data.prepare import prepare
from meshwright.data.progress import shown_progress
from meshwright.data.sampler import Sampler
from meshwright.data.shards import Corpus
from meshwright.data.tokenizer import Tokenizer, load_tokenizer
from meshwright.errors import ConfigError, DataError
from meshwright.models.hf_config import read_spec
from meshwright.models.presets import preset
from meshwright.models.spec import ModelSpec
from meshwright.strategy import Strategy
from meshwright.train.run_folder import RunFolder


@dataclass(frozen=True)
class Job:
    """A run that can start: what follows from its configuration."""

    strategy: Strategy
    spec: ModelSpec
    batches: BatchSchedule
    sampler: Sampler
    tokenizer: Tokenizer
    folder: RunFolder


def make_job(config: RunConfig, world: int) -> Job:
    """Check a configuration against its files and that many processes."""
    strategy = Strategy.parse(config.parallel.strategy, world)
    spec = model_spec(config)
    if config.data.sequence_length > spec.max_position_embeddings:
        raise ConfigError(
            f"data.sequence_length={config.data.sequence_length} is more than the model's "
            f"{spec.max_position_embeddings} positions; lower it or set model.spec.max_position_embeddings"
        )
    batches = batch_schedule(config)
    for size in batches.sizes():
        strategy.micro_steps(size, config.train.micro_batch)
    folder = RunFolder(config.run.dir)
    folder.check(config)
    prepare_sources(config.data)
    corpora = open_corpora(config.data)
    tokenizer = matching_tokenizer(config, [corpus for corpus, _ in corpora])
    sampler = Sampler(
        corpora,
        seed=config.run.seed,
        sequence_length=config.data.sequence_length,
        validation_fraction=config.data.validation,
        vocab_size=spec.vocab_size,
    )
    return Job(strategy, spec, batches, sampler, tokenizer, folder)


def model_spec(config: RunConfig) -> ModelSpec:
    """The shape that the [model] section describes."""
    section = config.model
    if section.from_hf:
        return read_spec(section.from_hf)
    base = preset(section.preset).model_dump() if section.preset else {}
    if not base and not section.spec:
        raise ConfigError("no model: set model.preset (`meshwright models` lists them), model.from_hf or model.spec")
    if isinstance(section.spec.get("experts"), dict) and base.get("experts"):
        section = section.model_copy(
            update={"spec": {**section.spec, "experts": {**base["experts"], **section.spec["experts"]}}}
        )
    # What follows from other fields is derived anew unless it was set by hand.
    if {"hidden_size", "num_attention_heads"} & section.spec.keys():
        base.pop("head_dim", None)
    try:
        spec = ModelSpec.model_validate({**base, **section.spec})
    except ValidationError as errors:
        lines = [f"model.spec.{'.'.join(map(str, e['loc']))}: {e['msg']}".replace(".:", ":") for e in errors.errors()]
        raise ConfigError("\n  ".join(lines) + f"\n  model.spec has {', '.join(ModelSpec.model_fields)}") from None
    if spec.latent_attention is not None:
        raise ConfigError(
            f"model.preset={section.preset!r} has multi-head latent attention, which the decoder does not build; "
            "its facts serve planning only"
        )
    return spec


def batch_schedule(config: RunConfig) -> BatchSchedule:
    """The global batch of every step."""
    setting = config.train.batch_schedule
    return BatchSchedule.parse(config.train.global_batch if setting is None else setting)


def prepare_sources(data: DataSection) -> None:
    """Pack data.sources into data.path unless that was done before."""
    if data.sources and data.path and not (Path(data.path) / "index.json").exists():
        with shown_progress() as progress:
            prepare(data.sources, data.path, data.tokenizer or "bytes", progress=progress)


def open_corpora(data: DataSection) -> list[tuple[Corpus, float]]:
    """The packed corpora with their weights."""
    if data.mix:
        return [(Corpus(share.path), share.weight) for share in data.mix]
    if not data.path:
        raise DataError("no data: set data.path to a folder made by `meshwright data prepare`")
    return [(Corpus(data.path), 1.0)]


def matching_tokenizer(config: RunConfig, corpora: list[Corpus]) -> Tokenizer:
    """The tokenizer that all corpora were packed with, if it is the one that the settings ask for."""
    first = corpora[0]
    tokenizer = load_tokenizer(first.tokenizer_folder)
    wanted: list[tuple[str, str]] = [(str(corpus.path), corpus.tokenizer.digest) for corpus in corpora[1:]]
    if config.data.tokenizer:
        wanted.append((f"data.tokenizer={config.data.tokenizer}", load_tokenizer(config.data.tokenizer).digest))
    if config.model.from_hf and (Path(config.model.from_hf) / "tokenizer.json").exists():
        wanted.append((f"model.from_hf={config.model.from_hf}", load_tokenizer(config.model.from_hf).digest))
    for place, digest in wanted:
        if digest != first.tokenizer.digest:
            raise DataError(
                f"{first.path} was packed with the tokenizer {first.tokenizer.name!r}, which is not that of {place}; "
                "prepare the corpus anew with the right --tokenizer"
            )
    return tokenizer
