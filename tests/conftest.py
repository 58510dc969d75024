"""Shared by all tests: one thread per process, a small corpus, a way to run the command line for real."""

from __future__ import annotations

import os
import sys

# Before torch is imported anywhere: forked ranks must not inherit a thread pool.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
# The tests are those of a machine without a GPU, wherever they run; but for those that need one, and are named.
if not any("tests/gpu" in argument for argument in sys.argv):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Hundreds of commands are run: that each compiles the same modules anew is no part of any test.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import gc
import random
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tqdm import tqdm

from meshwright.data.prepare import prepare

# `--workers`.
pytest_plugins = ["tests.workers"]

# A shell's background job ignores SIGINT, and so would every command that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The thread that watches transformers' bars would keep later tests from forking ranks.
tqdm.monitor_interval = 0

# What one test's training shows must not change what another one plans.
_cache = tempfile.TemporaryDirectory(prefix="meshwright-tests-")
os.environ["XDG_CACHE_HOME"] = _cache.name
# Commands are run in folders of their own.
if "PYTHONPATH" in os.environ:
    os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, os.environ["PYTHONPATH"].split(os.pathsep)))


def pytest_collection_finish() -> None:
    """What is imported by now stays: neither this process nor ranks forked from it look through it for garbage."""
    gc.collect()
    gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Tests that need a GPU, other trainers or Triton are run by those who name them (`make test-gpu` and the like)."""
    for folder in (Path(__file__).parent / name for name in ("gpu", "peers", "kernels")):
        named = any(folder == path or folder in path.parents for path in map(_argument, config.args))
        if collection_path == folder and not named:
            return True
    return None


def _argument(text: str) -> Path:
    return Path(text.split("::")[0]).resolve()


WORDS = [
    "the",
    "a",
    "mesh",
    "of",
    "ranks",
    "trains",
    "one",
    "model",
    "and",
    "every",
    "rank",
    "holds",
    "its",
    "own",
    "shard",
    "while",
    "gradients",
    "travel",
]


def write_text(path: Path, characters: int, seed: int = 0) -> Path:
    """A file of random words, about that long."""
    draw = random.Random(seed)
    text: list[str] = []
    length = 0
    while length < characters:
        text.append(draw.choice(WORDS) + draw.choice([" ", " ", " ", ".\n"]))
        length += len(text[-1])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(text))
    return path


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed corpus of 60,000 bytes in three documents."""
    root = tmp_path_factory.mktemp("corpus")
    for number in range(3):
        write_text(root / "text" / f"{number}.txt", 20_000, seed=number)
    prepare([root / "text"], root / "packed", "bytes", workers=1)
    return root / "packed"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one mebibyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=False)
    if mounted.returncode:
        pytest.skip("a small disk cannot be mounted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


CommandLine = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def meshwright(tmp_path: Path) -> CommandLine:
    """Runs `meshwright ...` as a user would, in an empty folder; stdout and stderr are kept apart."""

    def run(*arguments: object, timeout: float = 120, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "meshwright", *map(str, arguments)]
        environment = {**os.environ, **variables}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )

    return run


@pytest.fixture
def tiny_run(corpus: Path) -> list[str]:
    """Overrides of a run that takes about a second."""
    return [
        "model.preset=tiny",
        "model.spec.num_hidden_layers=2",
        f"data.path={corpus}",
        "data.sequence_length=32",
        "train.steps=6",
        "train.global_batch=8",
        "train.lr=1e-2",
        "train.eval_sequences=8",
    ]
