"""Hugging Face folders as files: what is refused on reading, and that writing is whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from meshwright.errors import CheckpointError
from meshwright.models.decoder import Decoder
from meshwright.models.hf import load_hf, read_spec, save_hf
from meshwright.models.initialize import build
from meshwright.models.mixture import mixtures
from meshwright.models.presets import preset
from meshwright.models.spec import ModelSpec

INDEX = "model.safetensors.index.json"


def small(name: str = "tiny") -> Decoder:
    return build(preset(name).model_copy(update={"num_hidden_layers": 2}), seed=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with several shards."""
    save_hf(small(), tmp_path / "model", max_shard_bytes=100_000)
    return tmp_path / "model"


def test_a_folder_holds_what_readers_expect(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "generation_config.json", INDEX} < names
    index = json.loads((folder / INDEX).read_text())
    held = {name: path.name for path in folder.glob("*.safetensors") for name in load_file(path)}
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in small().parameters())
    (folder.parent / "plain").mkdir()
    assert folder.stat().st_mode == (folder.parent / "plain").stat().st_mode
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == config["torch_dtype"] == "float32"
    # Without these, readers take the ids of the published models for granted.
    assert config["bos_token_id"] is config["eos_token_id"] is None


def test_no_shard_is_over_the_limit(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        assert len(tensors) == 1 or sum(tensor.numel() * 4 for tensor in tensors.values()) <= 100_000


def test_a_small_model_is_one_file_without_an_index(tmp_path: Path) -> None:
    save_hf(small(), tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert not (tmp_path / "model" / INDEX).exists()


def test_a_folder_with_something_in_it_is_not_written_over(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(CheckpointError, match="exists and is not an empty folder"):
        save_hf(small(), folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    save_hf(small(), tmp_path / "model")
    assert read_spec(tmp_path / "model") == small().spec


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("meshwright.models.hf_files.save_file", fail)
    with pytest.raises(OSError, match="no space left"):
        save_hf(small(), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_pickle_files_are_refused_with_the_way_out(folder: Path) -> None:
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    with pytest.raises(CheckpointError, match=r"pickle \(pytorch_model\.bin\).*never opened.*save_pretrained"):
        load_hf(folder)


def test_a_folder_without_weights_or_without_config_says_so(folder: Path, tmp_path: Path) -> None:
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink()
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
        load_hf(folder)
    with pytest.raises(CheckpointError, match=r"nowhere/config\.json is not there"):
        load_hf(tmp_path / "nowhere")
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not readable as JSON"):
        read_spec(folder)


def test_an_index_that_points_out_of_the_folder_is_refused(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"outside of its folder: \.\./elsewhere"):
        load_hf(folder)


def test_a_shard_that_is_missing_cut_off_or_not_what_the_index_says_is_refused(folder: Path) -> None:
    shards = sorted(folder.glob("*.safetensors"))
    whole = shards[0].read_bytes()
    shards[0].write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=f"{shards[0].name} is not a whole safetensors file"):
        load_hf(folder)
    shards[0].unlink()
    with pytest.raises(CheckpointError, match=f"{shards[0].name} is named in .* but is not there"):
        load_hf(folder)
    shards[0].write_bytes(shards[1].read_bytes())
    with pytest.raises(CheckpointError, match="names tensors that are not there"):
        load_hf(folder)


def test_what_a_config_loses_is_said_when_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.warns(UserWarning, match=r"attn_pdrop=0\.1 is left out"):
        read_spec(tmp_path)


def test_a_balancing_bias_is_not_dropped_in_silence(tmp_path: Path) -> None:
    spec = preset("tiny-moe").model_dump() | {"num_hidden_layers": 2}
    spec["experts"] |= {"router_bias_update_rate": 0.001}
    model = build(ModelSpec.model_validate(spec))
    save_hf(model, tmp_path / "fresh")
    next(mixtures(model)).expert_bias[3] = 0.001
    with pytest.raises(CheckpointError, match=r"mixtral files have no place for it.*router_aux_loss_coef"):
        save_hf(model, tmp_path / "trained")


def test_a_stage_of_a_model_is_not_written_as_the_whole(tmp_path: Path) -> None:
    model = small()
    del model.model.layers["1"]
    with pytest.raises(CheckpointError, match="only a whole model"):
        save_hf(model, tmp_path / "model")


def test_tokenizer_files_are_copied_and_their_ids_written(tmp_path: Path) -> None:
    source = tmp_path / "tokenizer"
    source.mkdir()
    added = [{"id": 256, "content": "<begin>", "special": True}, {"id": 257, "content": "<end>", "special": True}]
    (source / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": added}))
    (source / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<begin>", "eos_token": {"content": "<end>"}})
    )
    (source / "notes.txt").write_text("not a tokenizer file")
    save_hf(small(), tmp_path / "model", tokenizer_folder=source)
    assert (tmp_path / "model" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert not (tmp_path / "model" / "notes.txt").exists()
    for name in ("config.json", "generation_config.json"):
        written = json.loads((tmp_path / "model" / name).read_text())
        assert (written["bos_token_id"], written["eos_token_id"], written["pad_token_id"]) == (256, 257, None)


def test_the_ids_of_the_model_a_tokenizer_came_with_are_kept(tmp_path: Path) -> None:
    source = tmp_path / "tokenizer"
    source.mkdir()
    (source / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"<end>": 5}}, "added_tokens": []}))
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6], "temperature": 0.6}))
    save_hf(small(), tmp_path / "model", tokenizer_folder=source)
    written = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert written["eos_token_id"] == [5, 6]
    assert "temperature" not in written


def test_a_tokenizer_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="has no tokenizer files"):
        save_hf(small(), tmp_path / "model", tokenizer_folder=tmp_path / "empty")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_loading_needs_no_second_copy_of_the_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.models.hf_files import TensorFiles

    alive: list[int] = []
    read = TensorFiles.read

    def watched(self: TensorFiles, name: str, part: tuple[slice | int, ...] = ()) -> torch.Tensor:
        value = read(self, name, part)
        alive.append(value.numel())
        return value

    monkeypatch.setattr(TensorFiles, "read", watched)
    model = load_hf(folder)
    assert max(alive) == max(parameter.numel() for parameter in model.parameters())
    assert len(alive) == len(list(model.parameters()))
