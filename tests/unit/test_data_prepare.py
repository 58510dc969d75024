"""Preparing: the same shards on any number of processes, whole or not there, gone on with after every kind of end."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from meshwright.data import prepare as prepare_module
from meshwright.data.prepare import prepare
from meshwright.data.shards import Corpus, verify
from meshwright.errors import DataError

ENTRY = [sys.executable, "-m", "meshwright.cli.main", "data", "prepare"]


@pytest.fixture
def corpus_file(tmp_path: Path) -> Path:
    """Four megabytes of lines, which become about a hundred shards of 40,000 tokens."""
    path = tmp_path / "corpus.jsonl"
    with open(path, "w") as file:
        for number in range(20_000):
            file.write(json.dumps({"text": f"{number} " + "word " * (number % 70), "n": number}) + "\n")
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import tokenizers

    path = tmp_path_factory.mktemp("trained") / "tokenizer.json"
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(["word word 123 456"] * 10, trainer)
    library.save(str(path))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("shard-*"))}


def wait_until(condition: object, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"nothing happened in {seconds} seconds"
        time.sleep(0.001)


@contextlib.contextmanager
def begun(source: Path, out: Path, *options: str, shards: int = 3) -> Iterator[subprocess.Popen[bytes]]:
    """A `prepare` process that has finished some shards and is at work on others."""
    command = [*ENTRY, str(source), "--out", str(out), "--shard-tokens", "40000", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, process_group=0)
    try:
        wait_until(lambda: len(list(out.glob("shard-*.json"))) >= shards or process.poll() is not None)
        assert process.poll() is None, "it was done before it could be disturbed"
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def workers_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def all_gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


@pytest.mark.parametrize("tokenizer", ["bytes", "trained"])
def test_the_shards_are_the_same_on_any_number_of_processes(
    corpus_file: Path, tmp_path: Path, tokenizer: str, trained: Path
) -> None:
    name = str(trained) if tokenizer == "trained" else "bytes"
    lines = corpus_file.read_text().splitlines(keepends=True)[:5000]
    corpus_file.write_text("".join(lines))
    made = [
        prepare([corpus_file], tmp_path / f"out{workers}", name, workers=workers, shard_tokens=20_000)
        for workers in (1, 2, 3)
    ]
    assert len(made[0].corpus.index.shards) > 5
    assert contents(tmp_path / "out1") == contents(tmp_path / "out2") == contents(tmp_path / "out3")
    assert len({(tmp_path / f"out{workers}" / "index.json").read_bytes() for workers in (1, 2, 3)}) == 1
    assert made[0].corpus.documents == 5000
    assert [path.name for path in (tmp_path / "out2").iterdir() if path.suffix == ".json"] == ["index.json"]


def test_shards_hold_about_as_many_tokens_as_asked_for(corpus_file: Path, tmp_path: Path, trained: Path) -> None:
    for number, tokenizer in enumerate(["bytes", str(trained)]):
        corpus = prepare([corpus_file], tmp_path / str(number), tokenizer, shard_tokens=100_000).corpus
        sizes = [shard.tokens for shard in corpus.index.shards[:-1]]
        assert all(60_000 < size < 160_000 for size in sizes)


def test_progress_reaches_the_end_and_counts_the_tokens(corpus_file: Path, tmp_path: Path) -> None:
    for workers in (1, 2):
        heard: list[tuple[int, int, int]] = []
        corpus = prepare(
            [corpus_file],
            tmp_path / str(workers),
            shard_tokens=500_000,
            workers=workers,
            progress=lambda *values: heard.append(values),  # noqa: B023 - used within the turn
        ).corpus
        assert heard[-1] == (corpus_file.stat().st_size, corpus_file.stat().st_size, corpus.tokens)
        assert heard == sorted(heard)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_after_kill_9_the_finished_shards_are_kept_and_the_rest_is_made(
    corpus_file: Path, tmp_path: Path, workers: str
) -> None:
    out = tmp_path / "out"
    with begun(corpus_file, out, "--workers", workers) as process:
        children = workers_of(process)
        assert len(children) == (2 if workers == "2" else 0)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with pytest.raises(DataError, match="was not finished"):
            Corpus(out)
        wait_until(lambda: all_gone(children))
    finished = {path.stem for path in out.glob("shard-*.json")}
    before = {path: path.stat() for path in out.glob("shard-*.bin") if path.stem in finished}
    result = prepare([corpus_file], out, shard_tokens=40_000, workers=2)
    assert result.kept == len(finished) == len(before) >= 3
    assert result.made == len(result.corpus.index.shards) - result.kept > 0
    assert all(path.stat().st_ino == was.st_ino for path, was in before.items())
    whole = prepare([corpus_file], tmp_path / "whole", shard_tokens=40_000, workers=1)
    assert contents(out) == contents(tmp_path / "whole")
    assert result.corpus.digest == whole.corpus.digest
    assert verify(out) == []
    assert not list(out.glob("*.tmp"))


def test_a_shard_whose_note_or_files_are_torn_is_made_again(corpus_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with begun(corpus_file, out, "--workers", "1", shards=6):
        pass
    (out / "shard-00000.json").write_text("")
    os.truncate(out / "shard-00001.bin", 100)
    (out / "shard-00002.documents").unlink()
    (out / "shard-99999.bin.tmp").write_bytes(b"half")
    finished = len(list(out.glob("shard-*.json")))
    result = prepare([corpus_file], out, shard_tokens=40_000)
    assert result.kept == finished - 3
    assert verify(out) == []
    assert not list(out.glob("*.tmp"))
    assert result.corpus.documents == 20_000


def test_ctrl_c_ends_the_workers_and_keeps_what_is_finished(corpus_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with begun(corpus_file, out, "--workers", "2") as process:
        children = workers_of(process)
        assert len(children) == 2
        assert process.pid not in [os.getpgid(child.pid) for child in children], "Ctrl-C must reach the caller alone"
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(10) == 130
        assert process.stderr is not None
        message = process.stderr.read().decode()
        assert "run the same command again" in message
        assert "Traceback" not in message
        assert all_gone(children)
    assert not list(out.glob("*.tmp"))
    assert not (out / "index.json").exists()
    assert prepare([corpus_file], out, shard_tokens=40_000).kept >= 3


def test_a_worker_that_dies_is_an_error_and_not_a_hang(corpus_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with begun(corpus_file, out, "--workers", "2") as process:
        children = workers_of(process)
        children[0].kill()
        assert process.wait(10) == 2
        assert process.stderr is not None
        message = process.stderr.read().decode()
        assert "a worker process was killed by SIGKILL" in message
        assert "fewer --workers" in message
        assert all_gone(children)
    assert not list(out.glob("*.tmp"))
    assert prepare([corpus_file], out, shard_tokens=40_000).kept >= 3


def test_a_second_process_does_not_work_in_the_same_folder(
    corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.data.remains.LOCK_SECONDS", 0.2)
    with begun(corpus_file, tmp_path / "out", "--workers", "2") as process:
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(DataError, match="another process is preparing"):
            prepare([corpus_file], tmp_path / "out", shard_tokens=40_000)


def test_a_finished_folder_answers_at_once_and_is_not_touched(corpus_file: Path, tmp_path: Path) -> None:
    first = prepare([corpus_file], tmp_path / "out")
    assert (first.already, first.kept) == (False, 0)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    again = prepare([os.path.relpath(corpus_file)], tmp_path / "out", workers=2)
    assert again.already
    assert again.corpus.digest == first.corpus.digest
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before


@pytest.mark.parametrize("finished", [True, False])
def test_another_plan_is_refused_unless_it_may_overwrite(
    corpus_file: Path, tmp_path: Path, trained: Path, finished: bool
) -> None:
    out = tmp_path / "out"
    if finished:
        prepare([corpus_file], out, shard_tokens=40_000)
    else:
        with begun(corpus_file, out, "--workers", "1"):
            pass
    before = contents(out)
    with pytest.raises(DataError, match=r"another plan: shard_tokens was 40000 and is 50000\..*--overwrite"):
        prepare([corpus_file], out, shard_tokens=50_000)
    with pytest.raises(DataError, match=r"the tokenizer was bytes and is .*tokenizer.json"):
        prepare([corpus_file], out, trained, shard_tokens=40_000)
    (tmp_path / "more.txt").write_text("more")
    with pytest.raises(
        DataError, match=r"the sources were [\d,]+ bytes in 1 file\(s\) .* and are now [\d,]+ bytes in 2 file\(s\)"
    ):
        prepare([corpus_file, tmp_path / "more.txt"], out, shard_tokens=40_000)
    with pytest.raises(DataError, match="documents was 'file' and is 'line'"):
        prepare([corpus_file], out, shard_tokens=40_000, documents="line")
    assert contents(out) == before
    status = corpus_file.stat()
    os.utime(corpus_file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(DataError, match="the same number and sizes, but other names or times"):
        prepare([corpus_file], out, shard_tokens=40_000)
    result = prepare([corpus_file], out, trained, shard_tokens=300_000, overwrite=True)
    assert result.kept == 0
    assert verify(out) == []
    assert Corpus(out).tokenizer.vocab_size == 267
    assert len(list(out.glob("shard-*.bin"))) == len(result.corpus.index.shards)
    assert sorted(path.name for path in (out / "tokenizer").iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


def test_a_folder_of_something_else_is_never_touched(corpus_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "thesis"
    out.mkdir()
    (out / "chapter.tex").write_text("years of work")
    (out / "index.json").write_text('{"format": "web site", "plan": {}}')
    for overwrite in (False, True):
        with pytest.raises(DataError, match=r"was not made by .* \(it holds chapter.tex, index.json\); nothing was"):
            prepare([corpus_file], out, overwrite=overwrite)
    assert sorted(path.name for path in out.iterdir()) == ["chapter.tex", "index.json"]
    with pytest.raises(DataError, match=r"chapter.tex is a file"):
        prepare([corpus_file], out / "chapter.tex")
    with pytest.raises(DataError, match="cannot be written: Not a directory"):
        prepare([corpus_file], out / "chapter.tex" / "below")


def test_overwriting_leaves_files_that_are_not_ours(corpus_file: Path, tmp_path: Path) -> None:
    prepare([corpus_file], tmp_path / "out", shard_tokens=1_000_000)
    (tmp_path / "out" / "notes.md").write_text("mine")
    prepare([corpus_file], tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "notes.md").read_text() == "mine"


def test_an_overwrite_that_is_killed_never_mixes_old_and_new(corpus_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare([corpus_file], out, shard_tokens=41_000)
    old = len(list(out.glob("shard-*.bin")))
    command = [*ENTRY, str(corpus_file), "--out", str(out), "--shard-tokens", "40000", "--overwrite", "--workers", "1"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: (out / "preparing.json").exists())
        wait_until(lambda: len(list(out.glob("shard-*.json"))) >= 2)
        process.kill()
    assert old > 20
    with pytest.raises(DataError, match="was not finished"):
        Corpus(out)
    with pytest.raises(DataError, match="shard_tokens was 40000 and is 41000"):
        prepare([corpus_file], out, shard_tokens=41_000)
    prepare([corpus_file], out, shard_tokens=40_000)
    prepare([corpus_file], tmp_path / "whole", shard_tokens=40_000)
    assert contents(out) == contents(tmp_path / "whole")


def test_shards_of_another_plan_are_not_taken_for_finished_ones(corpus_file: Path, tmp_path: Path) -> None:
    # As when the power goes after an overwrite has noted its plan and before it has removed the old shards.
    for name, options in (("old", []), ("new", ["--documents", "line"])):
        with begun(corpus_file, tmp_path / name, "--workers", "1", *options):
            pass
    os.replace(tmp_path / "new" / "preparing.json", tmp_path / "old" / "preparing.json")
    assert prepare([corpus_file], tmp_path / "old", shard_tokens=40_000, documents="line").kept == 0


def test_bad_input_leaves_nothing_behind(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n' * 20_000 + "{broken\n")
    for workers in (1, 2):
        with pytest.raises(DataError, match=r"bad.jsonl, line 20001 \(byte 340000\) is not JSON"):
            prepare([bad], tmp_path / "out", workers=workers, shard_tokens=10_000_000)
        assert not (tmp_path / "out").exists()


def test_a_bad_line_met_by_a_worker_keeps_what_is_finished(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n' * 20_000 + "{broken\n")
    with pytest.raises(DataError, match=r"bad.jsonl, line 20001 \(byte 340000\) is not JSON"):
        prepare([bad], tmp_path / "out", workers=2, shard_tokens=10_000)
    assert list((tmp_path / "out").glob("shard-*.bin"))
    assert not list((tmp_path / "out").glob("*.tmp"))


def test_sources_without_text_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.jsonl").write_text('{"text": ""}\n\n')
    for sources in (["empty.txt"], ["blank.jsonl"], ["empty.txt", "blank.jsonl"]):
        with pytest.raises(DataError, match="hold no text"):
            prepare([tmp_path / name for name in sources], tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_a_shard_without_text_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "first"}\n' + '{"text": ""}\n' * 500 + '{"text": "last"}\n')
    corpus = prepare([tmp_path / "a.jsonl"], tmp_path / "out", shard_tokens=1).corpus
    assert [shard.file for shard in corpus.index.shards] == ["shard-00000.bin", "shard-00010.bin"]
    assert corpus.documents == 2
    assert bytes(token % 256 for token in corpus.read(0, corpus.tokens)) == b"first\x00last\x00"
    assert verify(tmp_path / "out") == []
    assert not list((tmp_path / "out").glob("*.tmp"))


def test_impossible_numbers_are_refused(corpus_file: Path, tmp_path: Path) -> None:
    for options in ({"workers": 0}, {"shard_tokens": 0}):
        with pytest.raises(DataError, match="must be at least 1"):
            prepare([corpus_file], tmp_path / "out", **options)  # type: ignore[arg-type]


def test_too_little_space_is_noticed_before_the_start(
    corpus_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr(prepare_module.shutil, "disk_usage", lambda path: Usage)
    with pytest.raises(DataError, match=r"about \d,\d{3},\d{3} bytes are needed for .*, 1,000 are free there"):
        prepare([corpus_file], tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    before = prepare([corpus_file], tmp_path / "old", documents="line").corpus
    monkeypatch.setattr(prepare_module.shutil, "disk_usage", lambda path: Usage)
    bigger = corpus_file.with_name("bigger.jsonl")
    bigger.write_text(corpus_file.read_text() * 2)
    with pytest.raises(DataError, match="nothing was changed"):
        prepare([bigger], tmp_path / "old", overwrite=True)
    assert Corpus(tmp_path / "old").digest == before.digest
    prepare([corpus_file], tmp_path / "old", overwrite=True)  # fits in what the old shards leave


@pytest.fixture
def surprising(tmp_path: Path) -> Path:
    """A folder whose beginnings promise little text and whose ends hold eight megabytes."""
    folder = tmp_path / "surprising"
    folder.mkdir()
    for number in range(8):
        with open(folder / f"{number}.jsonl", "w") as file:
            file.writelines(json.dumps({"text": "x", "padding": "y" * 2000}) + "\n" for _ in range(50))
            file.writelines(json.dumps({"text": "z" * 2000}) + "\n" for _ in range(500))
    return folder


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two mebibytes."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)], capture_output=True, text=True
    )
    if mount.returncode:
        pytest.skip(f"mounting a small file system needs root: {mount.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_keeps_finished_shards_and_nothing_that_looks_whole(
    surprising: Path, small_disk: Path, tmp_path: Path, workers: int
) -> None:
    out = small_disk / "out"
    with pytest.raises(DataError, match=r"No space left on device: about [\d,]+ bytes .*, [\d,]+ are free there"):
        prepare([surprising], out, shard_tokens=200, workers=workers)
    kept = len(list(out.glob("shard-*.json")))
    assert kept >= 1
    assert not list(out.glob("*.tmp"))
    with pytest.raises(DataError, match="was not finished"):
        Corpus(out)
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    result = prepare([surprising], out, shard_tokens=200, workers=workers)
    assert result.kept == kept
    assert verify(out) == []
    assert result.corpus.digest == prepare([surprising], tmp_path / "whole", shard_tokens=200).corpus.digest


def test_a_limit_on_the_size_of_files_is_told_like_a_full_disk(surprising: Path, tmp_path: Path) -> None:
    result = subprocess.run(
        [*ENTRY, str(surprising), "--out", str(tmp_path / "out"), "--workers", "2", "--shard-tokens", "20000"],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000)),
    )
    assert result.returncode == 2
    assert "File too large: about" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list((tmp_path / "out").glob("*.tmp"))


def test_the_python_standard_library_can_be_packed(tmp_path: Path) -> None:
    corpus = prepare(["python-stdlib"], tmp_path / "out").corpus
    assert corpus.documents > 300
    assert corpus.tokens > 1_000_000


def test_plain_text_documents_can_be_files_lines_or_paragraphs(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one\ntwo\n\nthree\n")
    counts = {
        kind: prepare([tmp_path], tmp_path / kind, glob=["*.py"], documents=kind).corpus.documents
        for kind in ("file", "line", "paragraph")
    }
    assert counts == {"file": 1, "line": 3, "paragraph": 2}
