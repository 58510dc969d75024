"""Mistakes get one clear message, exit code 2, no traceback, and cost nothing that was there before."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from meshwright.errors import ExitCode
from tests.conftest import CommandLine, write_text

Refused = Callable[..., str]


@pytest.fixture
def refused(meshwright: CommandLine, tmp_path: Path) -> Refused:
    """Runs a command that must be refused and gives its message."""

    def times() -> dict[Path, int]:
        # Who held the folder, and that ranks refused, is noted.
        notes = (".lock", "events.jsonl")
        files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name not in notes]
        return {path: path.stat().st_mtime_ns for path in files}

    def run(*arguments: object, code: int = 2) -> str:
        before = times()
        result = meshwright(*arguments)
        assert result.returncode == code, result.stdout + result.stderr
        assert "Traceback" not in result.stderr
        assert result.stderr.startswith(("meshwright ", "meshwright: waiting"))
        after = times()
        assert before == {path: time for path, time in after.items() if path in before}, "a refusal changed files"
        return result.stderr

    return run


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("train.stepz=3", "did you mean 'steps'?"),
        ("train.steps=three", "should be a valid integer"),
        ("train.lr=inf", "finite number"),
        ("run.seed=99999999999999999999", "less than"),
        ("parallel.strategy=tpp=2", "unknown key 'tpp' (did you mean 'tp'?)"),
        ("parallel.strategy=dp=2 dp=4", "given twice"),
        ("model.preset=tinny", "did you mean 'tiny'?"),
        ("model.preset=deepseek-v3", "latent attention"),
        ("model.spec.num_hidden_layer=3", "did you mean 'num_hidden_layers'?"),
        ("model.spec.num_key_value_heads=3", "num_key_value_heads=3 does not divide"),
        ("data.path=nowhere", "nowhere"),
        ("data.sequence_length=1024", "more than the model's 512 positions"),
        ("train.micro_batch=3", "meets micro_batch=3"),
        ("parallel.strategy=auto tp>2", "meets tp>2"),
        ("parallel.strategy=auto tp=1 tp=2", "contradict each other"),
        ("parallel.cluster=2xabacus", "abacus"),
        ("train.batch_schedule=8..9 over 0", "8..9 over 0"),
        ("model.spec.vocab_size=100", "token id"),
        ("parallel.strategy=dp=3", "needs 3 processes and there are 2"),
        ("parallel.strategy=tp=3", "tp=3 does not divide 2 processes; tp can be 1, 2"),
        ("parallel.strategy=pp=2 schedule=interleaved:9", "18 stages and the model 2 layers; pp can be at most 1"),
        ("model.from_hf=nowhere", "exclude each other"),
        ("data.tokenizer=nowhere.json", "nowhere.json"),
        ("run.device=cuda", "no GPU"),
        ("run.dir=/proc/nothing", "cannot be written"),
        ("checkpoint.dir=/proc/nothing", "checkpoint.dir=/proc/nothing cannot be written"),
        ("train.batch_schedule=abc", "train.batch_schedule='abc'"),
    ],
)
def test_wrong_setting(refused: Refused, tiny_run: list[str], change: str, expected: str) -> None:
    assert expected in refused("train", *tiny_run, "--nproc", 2, change)


def test_batch_that_the_copies_cannot_share(refused: Refused, tiny_run: list[str]) -> None:
    copies = ["--nproc", 2, "parallel.strategy=dp=2"]
    assert "not divisible by 2" in refused("train", *tiny_run, *copies, "train.global_batch=7")
    assert "not divisible by 6" in refused("train", *tiny_run, *copies, "train.micro_batch=3")


def test_no_model_and_no_data_say_what_to_set(refused: Refused, tiny_run: list[str]) -> None:
    assert "set model.preset" in refused("train")
    assert "set data.path" in refused("train", "model.preset=tiny")


def test_corpus_shorter_than_one_sequence(
    refused: Refused, meshwright: CommandLine, tiny_run: list[str], tmp_path: Path
) -> None:
    (tmp_path / "short.txt").write_text("too short")
    assert meshwright("data", "prepare", "short.txt", "--out", "short", "--tokenizer", "bytes").returncode == 0
    assert "10 tokens" in refused("train", *tiny_run, "data.path=short")


def test_empty_and_missing_corpus(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "empty" in refused("data", "prepare", "empty", "--out", "packed", "--tokenizer", "bytes")
    assert "missing" in refused("data", "prepare", "missing", "--out", "packed", "--tokenizer", "bytes")
    assert not (tmp_path / "packed/index.json").exists()


def test_token_that_the_index_hides_is_still_found(
    refused: Refused, tiny_run: list[str], corpus: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in corpus.rglob("*"):
        if path.is_file():
            (copy / path.relative_to(corpus)).parent.mkdir(exist_ok=True)
            (copy / path.relative_to(corpus)).write_bytes(path.read_bytes())
    (shard,) = copy.glob("*.bin")
    np.full(shard.stat().st_size // 2, 40_000, dtype="<u2").tofile(shard)
    message = refused("train", *tiny_run, f"data.path={copy}")
    assert "40000" in message or "40,000" in message


def test_tokenizer_that_did_not_pack_the_corpus(refused: Refused, tiny_run: list[str], tmp_path: Path) -> None:
    import tokenizers

    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    bpe.train([str(write_text(tmp_path / "a.txt", 2000))], tokenizers.trainers.BpeTrainer(vocab_size=200))
    bpe.save(str(tmp_path / "tokenizer.json"))
    assert "packed with the tokenizer" in refused("train", *tiny_run, "data.tokenizer=tokenizer.json")


@pytest.mark.slow
def test_run_folder_of_another_configuration(
    refused: Refused, meshwright: CommandLine, tiny_run: list[str], tmp_path: Path
) -> None:
    assert meshwright("train", *tiny_run, "run.dir=a").returncode == 0
    message = refused("train", *tiny_run, "run.dir=a", "train.lr=0.5", "run.seed=3")
    assert "train.lr was 0.01, now 0.5" in message
    assert "run.seed was 0, now 3" in message
    assert "--fresh" in message


def test_run_folder_that_is_not_one(refused: Refused, tiny_run: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    assert "not a run's" in refused("train", *tiny_run, "run.dir=mine")
    assert "not a run's" in refused("train", *tiny_run, "run.dir=mine", "--fresh")


@pytest.mark.slow
def test_two_trainings_in_one_folder(
    refused: Refused, meshwright: CommandLine, tiny_run: list[str], tmp_path: Path
) -> None:
    assert meshwright("train", *tiny_run, "run.dir=a").returncode == 0
    with (tmp_path / "a/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for option in ("train.steps=9", "--fresh"):
            message = refused("train", *tiny_run, "run.dir=a", option, code=ExitCode.LOCKED)
            assert "another process is training in a" in message


@pytest.mark.slow
def test_damaged_checkpoint_is_named_and_not_used(
    refused: Refused, meshwright: CommandLine, tiny_run: list[str], tmp_path: Path
) -> None:
    assert meshwright("train", *tiny_run, "run.dir=a").returncode == 0
    weights = tmp_path / "a/checkpoints/step-000006/model-00000.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1000] ^= 1
    weights.write_bytes(data)
    message = refused("train", *tiny_run, "run.dir=a", "train.steps=9", code=ExitCode.DAMAGED)
    assert "step-000006/model-00000.safetensors is damaged" in message
    assert "damaged" in refused("generate", "a", "x", code=ExitCode.DAMAGED)


@pytest.mark.slow
def test_checkpoint_whose_manifest_was_changed_is_refused(
    refused: Refused, meshwright: CommandLine, tiny_run: list[str], tmp_path: Path
) -> None:
    assert meshwright("train", *tiny_run, "run.dir=a").returncode == 0
    manifest = tmp_path / "a/checkpoints/step-000006/manifest.json"
    content = json.loads(manifest.read_text())
    content["model"]["num_hidden_layers"] = 3
    manifest.write_text(json.dumps(content))
    message = refused("train", *tiny_run, "run.dir=a", "train.steps=9", code=ExitCode.DAMAGED)
    assert "it is not what was written" in message


@pytest.mark.parametrize("options", [["--tokens", 0], ["--temperature", -1], ["--top-k", 0], ["--device", "cuda"]])
def test_generate_with_impossible_options(refused: Refused, options: list[object]) -> None:
    assert str(options[0])[2:] in refused("generate", "tiny", "x", *options).replace("no GPU", "device")


def test_unknown_verb_and_two_files(refused: Refused, meshwright: CommandLine) -> None:
    result = meshwright("trian")
    assert result.returncode == 2
    assert "did you mean 'train'?" in result.stderr
    assert "one configuration file at a time" in refused("train", "a.toml", "b.toml")
    assert "--nproc takes" in refused("train", "--preset", "demo", "--nproc", "0")
