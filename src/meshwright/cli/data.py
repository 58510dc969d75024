"""Tokenise and pack a corpus once, offline, on all cores; check it; say what is in it."""

from __future__ import annotations

import argparse
import json
import sys

from meshwright.cli.main import Action


def _describe_prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SRC",
        help="files or folders of .txt, .jsonl, .parquet; a folder saved by `datasets`; or python-stdlib",
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to make; new, empty or begun before")
    parser.add_argument(
        "--tokenizer", default="bytes", metavar="NAME|PATH", help="'bytes' (default), a tokenizer.json, or a folder"
    )
    parser.add_argument("--field", default="text", help="the field or column that holds the text (default: text)")
    parser.add_argument(
        "--documents",
        default="file",
        metavar="file|line|paragraph",
        help="what is one document in plain text (default: file)",
    )
    parser.add_argument(
        "--glob", action="append", default=[], metavar="PATTERN", help="take these files instead, such as '*.py'"
    )
    parser.add_argument("--split", help="which split of a saved DatasetDict")
    parser.add_argument("--workers", type=int, metavar="N", help="processes to use (default: all cores)")
    parser.add_argument("--shard-tokens", type=int, metavar="N", help="about how many tokens a shard holds")
    parser.add_argument("--overwrite", action="store_true", help="replace what an earlier, different command made")


def _prepare(args: argparse.Namespace) -> int:
    from meshwright.data.prepare import prepare
    from meshwright.data.progress import shown_progress

    try:
        with shown_progress() as progress:
            prepared = prepare(
                args.sources,
                args.out,
                args.tokenizer,
                field=args.field,
                documents=args.documents,
                glob=args.glob,
                split=args.split,
                shard_tokens=args.shard_tokens,
                workers=args.workers,
                overwrite=args.overwrite,
                progress=progress,
            )
    except KeyboardInterrupt:
        print("interrupted; finished shards are kept: run the same command again to go on", file=sys.stderr)
        return 130
    corpus = prepared.corpus
    how = "already prepared" if prepared.already else "prepared"
    kept = f" ({prepared.kept} kept from an earlier run)" if prepared.kept else ""
    print(
        f"{how}: {args.out}: {corpus.tokens:,} tokens in {_counted(corpus.documents, 'document')}, "
        f"{_counted(len(corpus.index.shards), 'shard')}{kept}"
    )
    return 0


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _describe_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="a folder made by `meshwright data prepare`")


def _verify(args: argparse.Namespace) -> int:
    from meshwright.data.shards import verify

    damage = verify(args.folder)
    for line in damage:
        print(f"{args.folder}: {line}", file=sys.stderr)
    if not damage:
        print(f"{args.folder}: every file is as it was written")
    return 1 if damage else 0


def _describe_info(parser: argparse.ArgumentParser) -> None:
    _describe_folder(parser)
    parser.add_argument("--json", action="store_true", help="as JSON")


def _info(args: argparse.Namespace) -> int:
    from meshwright.data.indexed import open_corpus

    facts = open_corpus(args.folder).describe()
    if args.json:
        print(json.dumps(facts, indent=1))
        return 0
    tokenizer, plan = facts["tokenizer"], facts["plan"]
    end = "none" if tokenizer["end"] is None else tokenizer["end"]
    rows = {
        "tokens": f"{facts['tokens']:,} ({facts['dtype']}, largest id {facts['largest_token']})",
        "documents": f"{facts['documents']:,} ({facts['tokens'] / facts['documents']:,.1f} tokens each)",
        "tokenizer": f"{tokenizer['name']} (vocabulary {tokenizer['vocab_size']:,}, end of document {end})",
        "sources": f"{', '.join(plan['sources'])} ({_counted(plan['files'], 'file')}, {plan['bytes']:,} bytes)",
        "on disk": f"{facts['bytes']:,} bytes in {_counted(facts['shards'], 'shard')}",
        "digest": facts["digest"],
    }
    for name, text in rows.items():
        print(f"{name:<10} {text}")
    return 0


ACTIONS = {
    "prepare": Action("tokenise and pack documents into a folder of shards", _describe_prepare, _prepare),
    "verify": Action("read every byte again and name damaged files", _describe_folder, _verify),
    "info": Action("what a packed corpus holds", _describe_info, _info),
}
