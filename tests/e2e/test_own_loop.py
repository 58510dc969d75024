"""docs/own_loop.md is true: the script for one device, with the diff applied, prints the same on two ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/own_loop.md"
PLAIN = next(code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "DataLoader(" in code)
(DIFF,) = re.findall(r"```diff\n(.*?)```", PAGE.read_text(), re.DOTALL)


def patched() -> str:
    """The script after the diff; its hunks have no line numbers."""
    text = PLAIN
    for hunk in DIFF.split("@@\n")[1:]:
        lines = hunk.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] != other) for other in "+-")
        assert text.count(old) == 1, f"the script does not have\n{old}"
        text = text.replace(old, new)
    return text


def printed(script: str, folder: Path, launcher: tuple[str, ...] = ()) -> list[str]:
    """What the script prints, with a launcher's module in front of it or none."""
    (folder / "train.py").write_text(script)
    words = [sys.executable, *launcher, "train.py"]
    result = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.splitlines()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the script for one device prints."""
    lines = printed(PLAIN, tmp_path_factory.mktemp("plain"))
    assert len(lines) == 14
    return lines


def test_five_lines_are_new() -> None:
    assert sum(line.startswith("+") for line in DIFF.splitlines()) == 5


@pytest.mark.parametrize("strategy", ["dp=2", "zero=3"])
def test_script_prints_on_two_ranks_what_it_prints_on_one_device(
    strategy: str, expected: list[str], tmp_path: Path
) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--local-ranks-filter", "0")
    script = patched().replace('"zero=3"', f'"{strategy}"')
    assert printed(script, tmp_path, launcher=launcher) == expected


def test_script_prints_the_same_in_one_process(expected: list[str], tmp_path: Path) -> None:
    assert printed(patched(), tmp_path) == expected
