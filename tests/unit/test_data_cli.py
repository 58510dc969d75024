"""`meshwright data`: what a person sees, and the exit codes that a script sees."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.data.shards import Corpus


@pytest.fixture
def packed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "in" / "b.jsonl").write_text('{"body": "three"}\n')
    arguments = ["data", "prepare", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--field", "body"]
    assert main([*arguments, "--documents", "line"]) == 0
    output = capsys.readouterr()
    assert output.out == f"prepared: {tmp_path / 'out'}: 14 tokens in 3 documents, 1 shard\n"
    assert "of 26 bytes, 14 tokens" in output.err
    return tmp_path / "out"


def test_preparing_again_says_that_it_was_done(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["data", "prepare", str(packed.parent / "in"), "--out", str(packed), "--field", "body"]
    assert main([*arguments, "--documents", "line"]) == 0
    assert capsys.readouterr().out.startswith("already prepared: ")
    assert main(arguments) == 2
    assert "documents was 'line' and is 'file'" in capsys.readouterr().err
    assert main([*arguments, "--overwrite"]) == 0
    assert Corpus(packed).documents == 2


def test_verify_names_the_damaged_file_and_exits_with_1(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "verify", str(packed)]) == 0
    assert capsys.readouterr().out == f"{packed}: every file is as it was written\n"
    (packed / "shard-00000.bin").write_bytes(bytes(28))
    assert main(["data", "verify", str(packed)]) == 1
    assert capsys.readouterr().err == f"{packed}: shard-00000.bin has other content than was written\n"


def test_verify_of_no_corpus_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "verify", str(tmp_path)]) == 2
    assert "is no packed corpus" in capsys.readouterr().err


def test_info_shows_counts_tokenizer_sizes_and_sources(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "info", str(packed)]) == 0
    text = capsys.readouterr().out
    for words in (
        "14 (uint16, largest id 256)",
        "3 (4.7 tokens each)",
        "bytes (vocabulary 257, end of document 256)",
        f"{packed.parent / 'in'} (2 files, 26 bytes)",
        "52 bytes in 1 shard",
        Corpus(packed).digest,
    ):
        assert words in text
    assert main(["data", "info", str(packed), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["tokens"] == 14
    assert facts["tokenizer"]["vocab_size"] == 257
    assert facts["plan"]["sources"] == [str(packed.parent / "in")]


def test_a_wrong_argument_is_one_message_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "prepare", str(tmp_path / "no"), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("meshwright data prepare: source ")
    assert main(["data", "prepare", "python-stdlib", "--out", str(tmp_path / "out"), "--tokenizer", "gpt2"]) == 2
    assert "names are not downloaded" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_terminal_gets_a_bar_and_keeps_only_the_result(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text\n" * 200_000)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "meshwright.cli.main", "data", "prepare", str(tmp_path / "a.txt")]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "out")], stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"}
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            more = os.read(ours, 4096)
        except OSError:  # the terminal's other end is closed
            break
        shown += more
    os.close(ours)
    assert process.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    assert "preparing ━━━" in text
    assert text.splitlines()[-1].endswith("2,000,001 tokens in 1 document, 1 shard")
