"""A user's path through Hugging Face: start from its weights, train, export, load with `transformers`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import meshwright as mw
from meshwright.data.sampler import Sampler
from meshwright.data.shards import Corpus
from tests.conftest import CommandLine


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama, saved by transformers."""
    torch.manual_seed(0)
    shape = {"vocab_size": 272, "hidden_size": 48, "intermediate_size": 96, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(**shape, **heads, initializer_range=0.2)).save_pretrained(folder)
    return folder


def test_training_starts_from_the_weights_and_exports_what_it_learned(
    meshwright: CommandLine, corpus: Path, llama: Path, tmp_path: Path
) -> None:
    settings = [f"model.from_hf={llama}", f"data.path={corpus}", "data.sequence_length=32", "train.steps=3"]
    result = meshwright("train", *settings, "train.global_batch=4", "run.dir=a", "data.validation=0.1")
    assert result.returncode == 0, result.stderr
    reference = AutoModelForCausalLM.from_pretrained(llama)
    sampler = Sampler([(Corpus(corpus), 1.0)], seed=0, sequence_length=32, validation_fraction=0.1)
    tokens = torch.from_numpy(sampler.rows(0, 4))
    with torch.no_grad():
        expected = F.cross_entropy(reference(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
    first = json.loads((tmp_path / "a/metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(float(expected), rel=1e-5)

    trained = mw.load_model(tmp_path / "a")
    mw.save_hf(trained, tmp_path / "exported", tokenizer_folder=tmp_path / "a/tokenizer")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    with torch.no_grad():
        ours, theirs, before = trained(tokens), exported(tokens).logits, reference(tokens).logits
        assert float((ours - theirs).abs().max()) < 1e-4
        assert float((theirs - before).abs().max()) > 1e-3, "nothing was learned"
        assert mw.load_model(tmp_path / "exported")(tokens).equal(ours)


def test_shape_of_given_weights_cannot_be_changed(meshwright: CommandLine, corpus: Path, llama: Path) -> None:
    result = meshwright("train", f"model.from_hf={llama}", f"data.path={corpus}", "model.spec.num_hidden_layers=1")
    assert result.returncode == 2
    assert "model.spec cannot change the shape" in result.stderr
