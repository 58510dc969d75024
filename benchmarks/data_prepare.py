"""How fast a corpus is packed, against a bare NumPy loop (bytes) and against `datasets.map` (a trained BPE tokenizer).

Corpora are made in a temporary folder. The candidates take turns, so that a busy machine is busy for all; the table
shows medians. What each does:

- NumPy loop: one process; each file read, widened, given an end token, written. No digests, no sync, no index.
- datasets.map: `batched=True` on a dataset that is already loaded, same tokenizer, same number of processes.
- meshwright: from the files on disk to packed, synced, indexed shards.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.data.prepare import prepare

WORDS = 20_000


def make_words(seed: int) -> list[str]:
    """A made-up vocabulary with the lengths of English words."""
    chooser = random.Random(seed)
    letters = "etaoinshrdlcumwfgypbvk"
    lengths = range(2, 12)
    return ["".join(chooser.choices(letters, k=chooser.choice(lengths))) for _ in range(WORDS)]


def make_text(words: list[str], size: int, chooser: np.random.Generator) -> str:
    """About `size` bytes of text in which words are as uneven as in a language."""
    picks = np.minimum(chooser.zipf(1.3, size // 6), WORDS) - 1
    text = " ".join(words[pick] for pick in picks)
    return text[:size]


def make_text_files(folder: Path, total: int, size: int) -> None:
    """Many .txt files; pieces of one large text, since making text is slower than anything measured here."""
    chooser = np.random.default_rng(0)
    text = make_text(make_words(0), 16 << 20, chooser).encode()
    for number in range(total // size):
        begin = int(chooser.integers(0, len(text) - size))
        sub = folder / f"{number // 1000:03d}"
        sub.mkdir(parents=True, exist_ok=True)
        (sub / f"{number:06d}.txt").write_bytes(text[begin : begin + size])


def make_json_lines(path: Path, total: int) -> None:
    """One .jsonl of documents of about 2 KB."""
    chooser = np.random.default_rng(1)
    words = make_words(0)
    with open(path, "w") as file:
        for _ in range(total // 2048):
            file.write(json.dumps({"text": make_text(words, 2048, chooser)}) + "\n")


def train_tokenizer(corpus: Path, path: Path) -> None:
    """A small byte-level BPE tokenizer, trained on the corpus."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=8192,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with open(corpus) as file:
        texts = [json.loads(line)["text"] for _, line in zip(range(2000), file, strict=False)]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


def numpy_loop(sources: Path, out: Path) -> int:
    """The least that packing bytes takes in one process."""
    tokens = 0
    end = np.array([256], dtype=np.uint16)
    with open(out, "wb") as file:
        for path in sorted(sources.rglob("*.txt")):
            ids = np.append(np.fromfile(path, dtype=np.uint8).astype(np.uint16), end)
            ids.tofile(file)
            tokens += len(ids)
    return tokens


def datasets_map(dataset: Any, tokenizer: Any, processes: int) -> int:
    """Tokenise a loaded dataset the usual way; the lengths show that the work is the same."""

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        ids = tokenizer(batch["text"], return_attention_mask=False)["input_ids"]
        return {"ids": ids}

    mapped = dataset.map(encode, batched=True, num_proc=processes, remove_columns=["text"], load_from_cache_file=False)
    rows = mapped.num_rows
    for entry in mapped.cache_files:
        os.unlink(entry["filename"])
    return int(rows)


def compare(candidates: dict[str, Callable[[], int]], repeats: int) -> dict[str, float]:
    """Median seconds of each candidate; they take turns, in another order each, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    chooser = random.Random(0)
    for turn in range(repeats + 1):
        for name, run in chooser.sample(list(candidates.items()), len(candidates)):
            os.sync()  # or the first to sync would pay for what the one before it left to be written
            start = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def show(title: str, size: int, medians: dict[str, float]) -> None:
    first = next(iter(medians.values()))
    print(f"\n{title}\n{'':<34}{'seconds':>9}{'MB/s':>9}{'ratio':>8}")
    for name, seconds in medians.items():
        print(f"{name:<34}{seconds:>9.3f}{size / seconds / 1e6:>9.1f}{seconds / first:>8.2f}")


def prepared(sources: Path, out: Path, tokenizer: str, workers: int | None) -> int:
    shutil.rmtree(out, ignore_errors=True)
    return prepare([sources], out, tokenizer, workers=workers).corpus.tokens


def bench_bytes(folder: Path, total: int, size: int, repeats: int, workers: int) -> None:
    sources = folder / "text"
    make_text_files(sources, total, size)
    candidates = {
        "NumPy loop, 1 process": lambda: numpy_loop(sources, folder / "loop.bin"),
        "meshwright, default": lambda: prepared(sources, folder / "default", "bytes", None),
        "meshwright, 1 process": lambda: prepared(sources, folder / "one", "bytes", 1),
        f"meshwright, {workers} processes": lambda: prepared(sources, folder / "many", "bytes", workers),
    }
    if len({run() for run in candidates.values()}) != 1:
        raise SystemExit("the candidates do not give the same number of tokens")
    show(f"bytes: {total / 1e6:.0f} MB in files of {size:,} bytes", total, compare(candidates, repeats))
    shutil.rmtree(sources)


def bench_bpe(folder: Path, total: int, repeats: int, processes: int) -> None:
    import datasets
    import transformers

    corpus, path = folder / "corpus.jsonl", folder / "tokenizer.json"
    make_json_lines(corpus, total)
    train_tokenizer(corpus, path)
    datasets.disable_progress_bars()
    dataset = datasets.load_dataset("json", data_files=str(corpus), cache_dir=str(folder / "cache"), split="train")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
    medians = compare(
        {
            f"datasets.map, {processes} processes": lambda: datasets_map(dataset, tokenizer, processes),
            f"meshwright, {processes} processes": lambda: prepared(corpus, folder / "bpe", str(path), processes),
        },
        repeats,
    )
    show(f"BPE of 8,192: {total / 1e6:.0f} MB of .jsonl", total, medians)


def main() -> None:
    """Make the corpora, measure, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=300, help="size of the large byte corpus")
    parser.add_argument("--small-megabytes", type=int, default=10, help="size of the small byte corpus")
    parser.add_argument("--bpe-megabytes", type=int, default=40, help="size of the BPE corpus; 0 leaves it out")
    parser.add_argument("--file-bytes", type=int, default=32_768)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--folder", help="where to work (default: the system's temporary folder)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        for megabytes in (arguments.small_megabytes, arguments.megabytes):
            bench_bytes(Path(name), megabytes * 1_000_000, arguments.file_bytes, arguments.repeats, arguments.workers)
        if arguments.bpe_megabytes:
            bench_bpe(Path(name), arguments.bpe_megabytes * 1_000_000, min(arguments.repeats, 3), arguments.workers)


if __name__ == "__main__":
    main()
