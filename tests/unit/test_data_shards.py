"""The packed corpus: read back token by token across shard borders, and damage of every kind noticed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.prepare import prepare
from meshwright.data.shards import Corpus, dtype_name, verify
from meshwright.data.tokenizer import load_tokenizer
from meshwright.errors import DataError

TEXTS = [f"document {number} " + "é" * (number % 7) for number in range(60)]
TOKENS = [token for text in TEXTS for token in [*text.encode(), 256]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "corpus.txt").write_text("\n".join(TEXTS))
    prepare([tmp_path / "corpus.txt"], tmp_path / "packed", documents="line", shard_tokens=100)
    return tmp_path / "packed"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    path = tmp_path_factory.mktemp("corpus")
    (path / "corpus.txt").write_text("\n".join(TEXTS))
    return prepare([path / "corpus.txt"], path / "packed", documents="line", shard_tokens=100).corpus


def test_the_corpus_is_the_tokens_of_its_documents_in_order(corpus: Corpus) -> None:
    assert len(corpus.index.shards) > 5
    assert corpus.tokens == len(TOKENS)
    assert corpus.documents == len(TEXTS)
    assert corpus.largest_token == 256
    assert corpus.read(0, corpus.tokens).tolist() == TOKENS
    assert corpus.read(0, corpus.tokens).dtype == np.uint16
    assert load_tokenizer(corpus.tokenizer_folder).decode(corpus.read(0, len(TEXTS[0]))) == TEXTS[0]


@given(start=st.integers(0, len(TOKENS)), count=st.integers(0, 400))
def test_any_run_of_tokens_can_be_read_across_shards(corpus: Corpus, start: int, count: int) -> None:
    count = min(count, len(TOKENS) - start)
    assert corpus.read(start, count).tolist() == TOKENS[start : start + count]
    ends = [place + 1 for place in range(start, start + count) if TOKENS[place] == 256]
    assert corpus.document_ends(start, count).tolist() == ends


def test_documents_end_where_they_end_in_a_shard_of_many_batches(tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_bytes(b"".join(b"%06d\n" % number for number in range(400_000)))
    corpus = prepare([tmp_path / "lines.txt"], tmp_path / "packed", documents="line").corpus
    assert len(corpus.index.shards) == 1
    assert np.array_equal(corpus.document_ends(0, corpus.tokens), np.arange(1, 400_001) * 7)


def test_reading_outside_is_refused(corpus: Corpus) -> None:
    for start, count in ((-1, 5), (0, len(TOKENS) + 1), (len(TOKENS), 1)):
        with pytest.raises(IndexError):
            corpus.read(start, count)


def test_a_sequence_needs_one_token_more_than_its_length(corpus: Corpus) -> None:
    assert corpus.sequences(len(TOKENS)) == 0
    assert corpus.sequences(len(TOKENS) - 1) == 1
    assert corpus.sequences(10) == (len(TOKENS) - 1) // 10


def test_ids_are_as_narrow_as_the_vocabulary_allows() -> None:
    assert [dtype_name(size) for size in (257, 65_536, 65_537)] == ["uint16", "uint16", "uint32"]


def test_a_vocabulary_beyond_16_bits_is_packed_whole(tmp_path: Path) -> None:
    import tokenizers

    vocabulary = {"?": 0, "big": 70_000, "small": 1}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("small big small")
    packed = prepare([tmp_path / "a.txt"], tmp_path / "packed", tmp_path / "tokenizer.json").corpus
    assert packed.index.dtype == "uint32"
    assert packed.read(0, 3).tolist() == [1, 70_000, 1]
    assert packed.largest_token == 70_000
    assert packed.tokenizer.end is None


def test_a_whole_corpus_has_no_damage(folder: Path) -> None:
    assert verify(folder) == []


@pytest.mark.parametrize("file", ["shard-00002.bin", "shard-00001.documents"])
def test_one_changed_bit_is_found_and_the_file_named(folder: Path, file: str) -> None:
    content = bytearray((folder / file).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / file).write_bytes(content)
    assert verify(folder) == [f"{file} has other content than was written"]


def test_every_damaged_file_is_named(folder: Path) -> None:
    (folder / "shard-00000.bin").unlink()
    size = (folder / "shard-00003.bin").stat().st_size
    with open(folder / "shard-00003.bin", "ab") as file:
        file.write(b"xx")
    (folder / "tokenizer" / "byte_tokenizer.json").unlink()
    assert verify(folder) == [
        "shard-00000.bin is missing",
        f"shard-00003.bin has {size + 2} bytes instead of {size}",
        "tokenizer is not the tokenizer that made the tokens",
    ]
    with pytest.raises(DataError, match=r"shard-00000.bin is missing; shard-00003.bin has .*--overwrite"):
        Corpus(folder)


def test_a_changed_index_is_refused(folder: Path) -> None:
    original = json.loads((folder / "index.json").read_text())

    def changed(**values: object) -> DataError:
        (folder / "index.json").write_text(json.dumps({**original, **values}))
        with pytest.raises(DataError) as error:
            Corpus(folder)
        return error.value

    assert "is version 9 of the format, this program reads version 1" in str(changed(version=9))
    assert "is of the format 'other'" in str(changed(format="other"))
    for values in (
        {"tokens": 5},
        {"dtype": "float"},
        {"shards": []},
        {"shards": [{}]},
        {"tokenizer": 3},
        {"digest": ""},
    ):
        assert "index.json is damaged" in str(changed(**values))
    (folder / "index.json").write_text("{")
    with pytest.raises(DataError, match=r"index.json is damaged"):
        Corpus(folder)


def test_a_folder_that_is_no_corpus_is_refused_with_what_to_do(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(DataError, match="does not exist, so it is no packed corpus; make one with"):
        Corpus(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"has no index.json"):
        verify(tmp_path / "empty")
    (folder / "index.json").rename(folder / "preparing.json")
    with pytest.raises(DataError, match="was not finished; run the same"):
        Corpus(folder)


def test_the_digest_tells_corpora_apart(folder: Path, tmp_path: Path) -> None:
    same = prepare([tmp_path / "corpus.txt"], tmp_path / "same", documents="line", shard_tokens=100).corpus
    assert same.digest == Corpus(folder).digest
    (tmp_path / "corpus.txt").write_text("\n".join([*TEXTS[:-1], "changed"]))
    other = prepare([tmp_path / "corpus.txt"], tmp_path / "other", documents="line", shard_tokens=100).corpus
    assert other.digest != Corpus(folder).digest
