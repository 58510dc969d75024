"""Tokenizers: what they give back is what was put in, from a name, a file or a saved folder, without the network."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.tokenizer import ByteTokenizer, load_tokenizer, saved_digest
from meshwright.errors import DataError

TEXTS = [
    "the cat sat on the mat",
    "der Hund läuft über die Straße",
    "猫が好き 🐈",
    "a\n\n  b\tc",
    "<|endoftext|> is text",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small BPE tokenizer as tokenizer.json, and as vocab.json + merges.txt below gpt2/."""
    import tokenizers

    folder = tmp_path_factory.mktemp("trained")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<other>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 20, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "gpt2").mkdir()
    tokenizer.model.save(str(folder / "gpt2"))
    return folder


@given(text=st.text())
def test_bytes_give_the_same_text_back(text: str) -> None:
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode([*tokenizer.encode(text), 256]) == text


@given(documents=st.lists(st.text(min_size=1), min_size=1))
def test_byte_documents_end_with_the_end_token_and_nothing_else_does(documents: list[str]) -> None:
    tokenizer = load_tokenizer("bytes")
    ids, lengths = tokenizer.encode_documents([document.encode() for document in documents])
    assert ids.tolist() == [token for document in documents for token in [*document.encode(), 256]]
    assert lengths.tolist() == [len(document.encode()) + 1 for document in documents]


def test_bytes_decode_what_is_no_text_without_failing() -> None:
    assert load_tokenizer("bytes").decode([72, 105, 0xC3, 256, 300, -1]) == "Hi\ufffd\ufffd\ufffd"
    assert load_tokenizer("bytes").vocab_size == 257


def test_a_saved_tokenizer_is_read_back_with_the_same_digest(trained: Path, tmp_path: Path) -> None:
    for number, name in enumerate(["bytes", str(trained), str(trained / "tokenizer.json"), str(trained / "gpt2")]):
        original = load_tokenizer(name)
        original.save(tmp_path / str(number))
        again = load_tokenizer(tmp_path / str(number))
        assert (again.digest, again.vocab_size, again.end) == (original.digest, original.vocab_size, original.end)
        assert saved_digest(tmp_path / str(number)) == original.digest
        assert [again.encode(text) for text in TEXTS] == [original.encode(text) for text in TEXTS]


def test_every_way_to_name_a_trained_tokenizer_gives_the_same_ids(trained: Path) -> None:
    names = [trained, trained / "tokenizer.json", trained / "gpt2", trained / "gpt2" / "vocab.json"]
    loaded = [load_tokenizer(name) for name in names]
    for text in TEXTS:
        ids = [tokenizer.encode(text) for tokenizer in loaded]
        assert ids[0] == ids[1] == ids[2] == ids[3]
        assert all(tokenizer.decode(ids[0]) == text for tokenizer in loaded)


def test_documents_of_a_trained_tokenizer_end_with_its_end_token(trained: Path) -> None:
    tokenizer = load_tokenizer(trained)
    assert tokenizer.end == 0
    ids, lengths = tokenizer.encode_documents([text.encode() for text in TEXTS])
    assert ids.tolist() == [token for text in TEXTS for token in [*tokenizer.encode(text), 0]]
    assert np.array_equal(lengths, [len(tokenizer.encode(text)) + 1 for text in TEXTS])


@pytest.mark.parametrize("name", [".", "gpt2"])
def test_text_cannot_forge_a_control_token(trained: Path, name: str) -> None:
    tokenizer = load_tokenizer(trained / name)
    ids = tokenizer.encode("a<|endoftext|>b")
    assert tokenizer.end not in ids
    assert tokenizer.decode([*ids, tokenizer.end or 0]) == "a<|endoftext|>b"


def test_truncation_and_padding_in_the_file_do_not_cut_or_fill_documents(trained: Path, tmp_path: Path) -> None:
    import tokenizers

    library = tokenizers.Tokenizer.from_file(str(trained / "tokenizer.json"))
    library.enable_truncation(4)
    library.enable_padding(length=50)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode(TEXTS[0]) == load_tokenizer(trained).encode(TEXTS[0])
    assert len(tokenizer.encode_documents([b"a"])[0]) == 2


@pytest.mark.parametrize("value", ["<other>", {"content": "<other>", "lstrip": False}])
def test_the_end_token_is_the_one_that_the_config_names(trained: Path, tmp_path: Path, value: object) -> None:
    (tmp_path / "tokenizer.json").write_bytes((trained / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": value}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.end == 1
    assert tokenizer.digest != load_tokenizer(trained).digest


def test_a_tokenizer_without_a_known_end_has_none(tmp_path: Path) -> None:
    import tokenizers

    model = tokenizers.models.WordLevel({"a": 0, "b": 7, "?": 1}, unk_token="?")
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.end is None
    assert tokenizer.vocab_size == 8, "ids with gaps must still fit"
    assert tokenizer.encode_documents([b"a", b"b"])[0].tolist() == [0, 7]
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").digest == saved_digest(tmp_path / "saved") == tokenizer.digest


def test_a_wrong_tokenizer_is_refused_with_what_is_allowed(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no tokenizer at 'gpt2' .*not downloaded.*give 'bytes'"):
        load_tokenizer("gpt2")
    with pytest.raises(DataError, match=r"lacks .*vocab.json and .*merges.txt; .* holds nothing"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_bytes((trained / "gpt2" / "vocab.json").read_bytes())
    with pytest.raises(DataError, match=r"lacks .*merges.txt"):
        load_tokenizer(tmp_path / "vocab.json")
    (tmp_path / "tokenizer.model").write_bytes(b"\x00")
    with pytest.raises(DataError, match="not a tokenizer file"):
        load_tokenizer(tmp_path / "tokenizer.model")
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(DataError, match="cannot be read"):
        load_tokenizer(tmp_path / "broken.json")
    (tmp_path / "tokenizer.json").write_bytes((trained / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<nowhere>"}')
    with pytest.raises(DataError, match=r"names '<nowhere>'.*no such token"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(DataError, match="not a JSON object"):
        load_tokenizer(tmp_path)


def test_without_the_tokenizers_package_the_error_says_what_to_install(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"pip install 'meshwright\[hf\]'"):
        load_tokenizer(trained)
    assert isinstance(load_tokenizer("bytes"), ByteTokenizer)


def test_the_core_needs_neither_torch_nor_the_optional_packages() -> None:
    code = (
        "import sys\n"
        "import meshwright.data.prepare, meshwright.data.worker, meshwright.data.sampler, meshwright.data.progress\n"
        "import meshwright.data.batch_schedule, meshwright.cli.data\n"
        "print([name for name in ('torch', 'pyarrow', 'tokenizers', 'rich') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
