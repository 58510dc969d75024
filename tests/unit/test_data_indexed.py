"""Token files in Megatron's format: what they hold is read, and what does not fit together is refused."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from meshwright.config import RunConfig
from meshwright.data.indexed import IndexedCorpus, open_corpus
from meshwright.data.sampler import Sampler
from meshwright.data.tokenizer import UnknownTokenizer
from meshwright.errors import ConfigError, DataError
from meshwright.training.job import matching_tokenizer, open_corpora
from tests.indexed_files import write_indexed

DOCUMENTS = [[[5, 6, 7], [8]], [[9, 10]], [[]], [[11, 12, 13, 14]]]
TOKENS = list(range(5, 15))


@pytest.mark.parametrize("width", ["u2", "i4"])
@pytest.mark.parametrize("named", ["", ".idx", ".bin"])
def test_tokens_and_documents_are_those_that_were_written(tmp_path: Path, width: str, named: str) -> None:
    prefix = write_indexed(tmp_path / "a.b_text_document", DOCUMENTS, width)
    corpus = open_corpus(f"{prefix}{named}")
    assert isinstance(corpus, IndexedCorpus)
    assert corpus.read(0, 10).tolist() == TOKENS
    assert corpus.read(3, 4).tolist() == TOKENS[3:7]
    assert corpus.dtype.itemsize == {"u2": 2, "i4": 4}[width]
    assert (corpus.tokens, corpus.documents, corpus.largest_token) == (10, 3, 14)
    assert corpus.document_ends(0, 10).tolist() == [4, 6, 10]
    assert corpus.document_ends(4, 4).tolist() == [6]
    assert corpus.describe()["tokens"] == 10
    with pytest.raises(IndexError):
        corpus.read(8, 3)


def test_ids_that_uint16_does_not_hold_are_read_from_32_bits(tmp_path: Path) -> None:
    corpus = IndexedCorpus(write_indexed(tmp_path / "x", [[[70_000, 1, 128_255]]], "i4"))
    assert corpus.read(0, 3).tolist() == [70_000, 1, 128_255]


def test_sampler_gives_rows_of_it_and_refuses_ids_beyond_the_vocabulary(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "x", [[list(range(33))], [list(range(32))]])
    rows = Sampler([(open_corpus(prefix), 1.0)], seed=0, sequence_length=8, vocab_size=40).rows(0, 8)
    flat = [*range(33), *range(32)]
    assert all(row.tolist() in [flat[n * 8 : n * 8 + 9] for n in range(8)] for row in rows)
    with pytest.raises(DataError, match="vocabulary has 20 entries"):
        Sampler([(open_corpus(prefix), 1.0)], seed=0, sequence_length=8, vocab_size=20)


def test_negative_id_is_beyond_every_vocabulary(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "x", [[[1, 2, -3, 4, 5]]], "i4")
    with pytest.raises(DataError, match="vocabulary"):
        Sampler([(open_corpus(prefix), 1.0)], seed=0, sequence_length=2, vocab_size=1 << 30)


def test_other_tokens_have_another_digest(tmp_path: Path) -> None:
    first = IndexedCorpus(write_indexed(tmp_path / "a", DOCUMENTS))
    same = IndexedCorpus(write_indexed(tmp_path / "b", DOCUMENTS))
    other = IndexedCorpus(write_indexed(tmp_path / "c", [[[5, 6, 7], [8]], [[9, 10]], [[]], [[11, 12, 13, 15]]]))
    cut = IndexedCorpus(write_indexed(tmp_path / "d", [[[5, 6, 7, 8]], [[9, 10]], [[]], [[11, 12, 13, 14]]]))
    assert first.digest == same.digest
    assert len({first.digest, other.digest, cut.digest}) == 3


@pytest.mark.parametrize("place", [0, 60_000, 119_999])
def test_digest_sees_tokens_at_both_ends_and_between(tmp_path: Path, place: int) -> None:
    tokens = [7] * 120_000
    before = IndexedCorpus(write_indexed(tmp_path / "a", [[tokens]])).digest
    tokens[place] = 8
    assert IndexedCorpus(write_indexed(tmp_path / "a", [[tokens]])).digest != before


def test_tokens_without_a_tokenizer_train_and_show_no_text(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "x", DOCUMENTS)
    plain = {"data": {"path": str(prefix)}}
    config = RunConfig.model_validate(plain)
    corpora = [corpus for corpus, _ in open_corpora(config.data)]
    assert isinstance(matching_tokenizer(config, corpora), UnknownTokenizer)
    with pytest.raises(ConfigError, match=r"set data\.tokenizer"):
        matching_tokenizer(RunConfig.model_validate({**plain, "observe": {"sample": "x"}}), corpora)
    named = RunConfig.model_validate({"data": {"path": str(prefix), "tokenizer": "bytes"}})
    assert matching_tokenizer(named, corpora).name == "bytes"


def header(version: int = 1, code: int = 8, sequences: int = 6, marks: int = 5) -> bytes:
    return b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", version, code, sequences, marks)


def changed(content: bytes, place: int, value: bytes) -> bytes:
    return content[:place] + value + content[place + len(value) :]


LENGTHS, STARTS, MARKS = 34, 34 + 4 * 5, 34 + 12 * 5


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda content: b"PK\x03\x04" + content[4:], "does not begin with MMIDIDX"),
        (lambda content: content[:20], "less than its header"),
        (lambda content: content[:-1], "is damaged"),
        (lambda content: content + b"\0", "is damaged"),
        (lambda content: content + b"\0" * 5, "modes of its sequences"),
        (lambda content: changed(content, 9, struct.pack("<Q", 2)), "version 2"),
        (lambda content: changed(content, 17, b"\x05"), "tokens are int64"),
        (lambda content: changed(content, 17, b"\x63"), "unknown code 99"),
        (lambda content: changed(content, 18, struct.pack("<Q", 1 << 62)), "is damaged"),
        (lambda content: changed(content, 26, struct.pack("<Q", (1 << 64) - 1)), "is damaged"),
        (lambda content: changed(content, LENGTHS, struct.pack("<i", -3)), "below zero"),
        (lambda content: changed(content, LENGTHS, struct.pack("<i", 4)), "follow one another in the file"),
        (lambda content: changed(content, STARTS + 8, struct.pack("<q", 1 << 40)), "follow one another in the file"),
        (lambda content: changed(content, MARKS, struct.pack("<q", 1)), "documents do not follow"),
        (lambda content: changed(content, MARKS + 8, struct.pack("<q", -1)), "documents do not follow"),
        (lambda content: changed(content, len(content) - 8, struct.pack("<q", 99)), "documents do not follow"),
    ],
)
def test_damaged_index_is_refused_by_what_is_wrong(tmp_path: Path, damage: object, word: str) -> None:
    prefix = write_indexed(tmp_path / "x", DOCUMENTS)
    path = tmp_path / "x.idx"
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(DataError, match=word):
        open_corpus(prefix)


def test_tokens_that_are_cut_off_or_missing_are_told(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "x", DOCUMENTS)
    (tmp_path / "x.bin").write_bytes(b"\0" * 18)
    with pytest.raises(DataError, match=r"20 bytes of tokens, and x.bin has 18"):
        open_corpus(prefix)
    (tmp_path / "x.bin").unlink()
    with pytest.raises(DataError, match=r"x.bin is missing"):
        open_corpus(prefix)


def test_every_byte_of_an_index_may_be_wrong_without_a_crash(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "x", DOCUMENTS)
    path = tmp_path / "x.idx"
    whole = path.read_bytes()
    for place in range(len(whole)):
        for value in (0, 255, whole[place] ^ 1):
            path.write_bytes(changed(whole, place, bytes([value])))
            try:
                corpus = open_corpus(prefix)
            except DataError:
                continue
            # What is still consistent is read within the file.
            assert np.array_equal(corpus.read(0, corpus.tokens), np.arange(5, 15))
            assert corpus.document_ends(0, corpus.tokens)[-1] == 10


def test_folders_are_opened_as_before(corpus: Path) -> None:
    assert type(open_corpus(corpus)).__name__ == "Corpus"
    with pytest.raises(DataError, match="does not exist"):
        open_corpus("nowhere/prefix")
