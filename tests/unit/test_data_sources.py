"""Sources: every document of the given files once, in order, however the files are cut; bad input named by place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.data.documents import BATCH_BYTES, head, read_batches, read_unit
from meshwright.data.sources import SourceOptions, Unit, cut_units, list_files, whole_units
from meshwright.errors import DataError


def read_all(sources: list[Path | str], target: int | None = None, **options: object) -> list[str]:
    """All documents of some sources, in units of about `target` bytes."""
    chosen = SourceOptions(**options)  # type: ignore[arg-type]
    units = list(whole_units(list_files([str(source) for source in sources], chosen), chosen))
    units = list(cut_units(units, target)) if target else units
    return [text.decode() for unit in units for group in read_unit(unit, chosen) for text in group]


def names(sources: list[Path | str], **options: object) -> list[str]:
    chosen = SourceOptions(**options)  # type: ignore[arg-type]
    return [Path(file.path).name for file in list_files([str(source) for source in sources], chosen)]


LINE = st.text(alphabet=st.sampled_from(["a", "b", " ", "\t", "é", "猫", "\r"]), max_size=12)


@given(
    texts=st.lists(st.text(max_size=20), max_size=12),
    blank=st.booleans(),
    last=st.booleans(),
    target=st.integers(1, 80),
)
def test_no_json_line_is_lost_or_doubled_by_any_cut(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], blank: bool, last: bool, target: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "corpus.jsonl"
    break_ = "\r\n\n" if blank else "\n"
    content = break_.join(json.dumps({"text": text}, ensure_ascii=len(text) % 2 == 0) for text in texts)
    path.write_bytes((content + "\n" * last).encode(errors="surrogatepass"))
    assert read_all([path], target) == [text for text in texts if text]


@given(lines=st.lists(LINE, max_size=20), last=st.booleans(), target=st.integers(1, 60), paragraph=st.booleans())
def test_lines_and_paragraphs_are_the_same_for_any_cut(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], last: bool, target: int, paragraph: bool
) -> None:
    path = tmp_path_factory.mktemp("cut") / "corpus.txt"
    path.write_bytes(("\n".join(lines) + "\n" * last).encode())
    documents = "paragraph" if paragraph else "line"
    found = read_all([path], target, documents=documents)
    assert found == read_all([path], documents=documents)
    if not paragraph:
        assert found == [line.rstrip("\r") for line in lines if line.strip()]


@given(lines=st.lists(st.sampled_from(["x", "yy", "  z", "", " ", "\t"]), max_size=20))
def test_paragraphs_are_what_stands_between_blank_lines(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str]
) -> None:
    path = tmp_path_factory.mktemp("cut") / "corpus.txt"
    path.write_text("\n".join(lines) + "\n")
    wanted: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            wanted[-1].append(line)
        elif wanted[-1]:
            wanted.append([])
    assert read_all([path], documents="paragraph") == ["\n".join(part) for part in wanted if part]


def test_units_follow_each_other_without_gap_and_are_about_the_size_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_bytes(b"".join(b"%d %s\n" % (number, b"x" * (number % 90)) for number in range(5000)))
    units = list(cut_units([Unit("line", str(path), 0, path.stat().st_size, path.stat().st_size)], 10_000))
    assert units[0].start == 0
    assert units[-1].stop == path.stat().st_size
    assert all(left.stop == right.start for left, right in pairwise(units))
    assert all(10_000 <= unit.size <= 10_100 for unit in units[:-1])
    path.write_bytes(b"12345\n" * 10)
    exact = cut_units([Unit("line", str(path), 0, 60, 60)], 12)
    assert [unit.start for unit in exact] == [0, 12, 24, 36, 48], "a place right after a newline needs no search"


def test_a_line_longer_than_the_search_window_stays_whole(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_bytes(b"a" * 300_000 + b"\nshort\n" + b"b" * 200_000)
    assert [len(text) for text in read_all([path], 1000, documents="line")] == [300_000, 5, 200_000]


def test_batches_are_bounded_and_hold_every_document(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_bytes(b"".join(b"%07d\n" % number for number in range(600_000)))
    options = SourceOptions(documents="line")
    units = list(whole_units(list_files([str(path)], options), options))
    batches = list(read_batches(units, options))
    assert len(batches) == 5
    assert max(sum(map(len, batch.documents)) for batch in batches) < BATCH_BYTES + 10
    assert [text for batch in batches for text in batch.documents] == [b"%07d" % number for number in range(600_000)]
    assert sum(batch.read for batch in batches) == path.stat().st_size


def test_the_head_of_a_unit_ends_between_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_bytes(b"12345\n" * 100)
    assert head(Unit("line", str(path), 6, 600, 594), 50) == Unit("line", str(path), 6, 54, 48)
    assert head(Unit("line", str(path), 0, 30, 30), 50).stop == 30
    path.write_bytes(b"x" * 100)
    assert head(Unit("line", str(path), 0, 100, 100), 50).stop == 100


def test_files_come_in_the_order_of_sources_and_of_relative_paths(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/1.txt", "a.txt", "b.txt", "c/x.jsonl", ".hidden/h.txt", ".h.txt", "d.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert names([tmp_path]) == ["a.txt", "1.txt", "2.txt", "b.txt", "x.jsonl"]
    assert names([tmp_path / "c", tmp_path / "b"]) == ["x.jsonl", "1.txt", "2.txt"]
    assert names([tmp_path], glob=("*.md", "b/*")) == ["1.txt", "2.txt", "d.md"]
    assert names([tmp_path / "d.md"], glob=("*.md",)) == ["d.md"]


def test_the_folder_to_be_written_is_not_read(tmp_path: Path) -> None:
    for name in ("in.txt", "out/shard.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    files = list_files([str(tmp_path)], SourceOptions(), leave_out=tmp_path / "out")
    assert [Path(file.path).name for file in files] == ["in.txt"]


def test_the_standard_library_is_there_without_its_tests_and_packages() -> None:
    files = list_files(["python-stdlib"], SourceOptions())
    root = Path(sysconfig.get_path("stdlib"))
    relative = [Path(file.path).relative_to(root) for file in files]
    assert Path("json/decoder.py") in relative
    assert relative == sorted(relative, key=lambda path: path.parts)
    parts = {part for path in relative for part in path.parts}
    assert not parts & {"site-packages", "test", "tests", "idle_test", "__pycache__"}
    assert all(path.suffix == ".py" for path in relative)


def test_parquet_is_read_by_row_group(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    texts = [f"text number {number} ü" for number in range(5000)] + [""]
    table = pyarrow.table({"id": list(range(5001)), "body": pyarrow.array(texts).dictionary_encode()})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=700)
    large = table.set_column(1, "body", pyarrow.array(texts, pyarrow.large_string()))
    pyarrow.parquet.write_table(large, tmp_path / "b.parquet", row_group_size=5001)
    options = SourceOptions(field="body")
    units = list(whole_units(list_files([str(tmp_path)], options), options))
    assert [unit.kind for unit in units] == ["parquet"] * 9
    assert read_all([tmp_path], field="body") == texts[:-1] * 2


def test_a_saved_dataset_is_read_in_its_order(tmp_path: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    texts = [f"text {number} é" for number in range(3500)]
    dataset = datasets.Dataset.from_dict({"text": texts, "n": list(range(3500))})
    dataset.save_to_disk(tmp_path / "one", num_shards=2)
    dataset.select(range(3499, -1, -1)).save_to_disk(tmp_path / "turned")
    datasets.DatasetDict(train=dataset, test=dataset.select([5, 3])).save_to_disk(tmp_path / "splits")
    assert read_all([tmp_path / "one"]) == texts
    assert read_all([tmp_path / "turned"]) == texts[::-1]
    assert read_all([tmp_path / "splits"], split="test") == [texts[5], texts[3]]
    with pytest.raises(DataError, match="holds the splits train, test, but no split was named; name one with --split"):
        read_all([tmp_path / "splits"])
    with pytest.raises(DataError, match=r"no split 'tset' \(did you mean 'test'\?\)"):
        read_all([tmp_path / "splits"], split="tset")


def test_record_batches_can_be_read_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    from meshwright.data import tables

    datasets.disable_progress_bars()
    texts = [f"text {number}" for number in range(3500)]
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "one")
    monkeypatch.setattr(tables, "BATCH_BYTES", 1)
    options = SourceOptions()
    units = list(whole_units(list_files([str(tmp_path / "one")], options), options))
    assert [(unit.start, unit.stop) for unit in units] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert read_all([tmp_path / "one"]) == texts


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{broken", "is not JSON"),
        ("[1]", "holds a list; each line must be a JSON object with 'text'"),
        ('"text"', "holds a str"),
        ("7", "holds a int"),
        ('{"texts": "x", "id": 1}', r"no field 'text' \(did you mean 'texts'\?\); its fields: texts, id"),
        ("{}", "no field 'text'; its fields: none"),
        ('{"text": 5}', "field 'text' holds a int, not text"),
        ('{"text": null}', "field 'text' holds a NoneType, not text"),
        ('{"text": "\\ud800"}', "cannot be written as UTF-8"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_bad_json_line_is_named_by_file_line_and_byte(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "é"}\n\n{"text": "b"}\n' + line + '\n{"text": "c"}\n')
    for target in (None, 10):
        with pytest.raises(DataError, match=rf"bad.jsonl, line 4 \(byte 30\)[: ].*{words}"):
            read_all([path], target)


def test_text_that_is_not_utf8_is_named_by_file_and_byte(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"line\ncaf\xe9 au lait\n")
    for documents in ("file", "line", "paragraph"):
        with pytest.raises(DataError, match=r"latin.txt is not UTF-8: byte 8 is 0xe9"):
            read_all([tmp_path], 5, documents=documents)
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "caf\xe9"}\n')
    with pytest.raises(DataError, match=r"latin.jsonl is not UTF-8: byte 13"):
        read_all([tmp_path / "latin.jsonl"])


def test_a_bad_table_is_named_with_its_columns(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "t.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"texts": ["a", None], "id": [1, 2]}), path)
    with pytest.raises(DataError, match=r"no column 'text' \(did you mean 'texts'\?\); its columns: texts, id"):
        read_all([path])
    with pytest.raises(DataError, match=r"column 'id' of .* holds int64, not text; columns with text: texts"):
        read_all([path], field="id")
    with pytest.raises(DataError, match="column 'texts' has no text in row 1 of row group 0"):
        read_all([path], field="texts")
    path.write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"t.parquet cannot be read"):
        read_all([path])


def test_missing_and_unknown_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no source was given"):
        list_files([], SourceOptions())
    with pytest.raises(DataError, match=r"'python-stdlb' does not exist \(did you mean 'python-stdlib'\?\)"):
        list_files(["python-stdlb"], SourceOptions())
    with pytest.raises(DataError, match=r"holds no file that matches \*\.txt or \*\.jsonl or \*\.parquet"):
        list_files([str(tmp_path)], SourceOptions())
    with pytest.raises(DataError, match=r"holds no file that matches \*\.py"):
        list_files([str(tmp_path)], SourceOptions(glob=("*.py",)))
    (tmp_path / "notes.md").write_text("x")
    with pytest.raises(DataError, match=r"ends in '.md', .*add --glob '\*.md'"):
        list_files([str(tmp_path / "notes.md")], SourceOptions())
    with pytest.raises(
        DataError, match=r"documents = 'lines' \(did you mean 'line'\?\); allowed: file, line, paragraph"
    ):
        SourceOptions(documents="lines")
    (tmp_path / "link.txt").symlink_to("nowhere.txt")
    with pytest.raises(DataError, match=r"link.txt cannot be read"):
        list_files([str(tmp_path)], SourceOptions())


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("0123456789")
    options = SourceOptions()
    units = list(whole_units(list_files([str(path)], options), options))
    os.truncate(path, 5)
    with pytest.raises(DataError, match="became shorter"):
        list(read_unit(units[0], options))


def test_without_pyarrow_the_error_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    code = (
        "import sys\nsys.modules['pyarrow'] = None\n"
        "from meshwright.cli.main import main\n"
        "sys.exit(main(['data', 'prepare', sys.argv[1], '--out', sys.argv[2]]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "t.parquet"), str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert "pip install 'meshwright[data]'" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()
