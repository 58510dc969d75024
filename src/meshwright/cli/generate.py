"""Continue a prompt from a run, a checkpoint or a Hugging Face folder."""

from __future__ import annotations

import argparse
import sys

from meshwright.errors import UserError
from meshwright.torch_support import imported_for_good, require_torch


def describe(parser: argparse.ArgumentParser) -> None:
    """Arguments of `meshwright generate`."""
    parser.add_argument("run", metavar="RUN", help="run folder, checkpoint folder or Hugging Face folder")
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue")
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help="how many tokens to add (default 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    parser.add_argument("--top-k", type=int, default=40, help="draw from this many likeliest tokens (default 40)")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws another text (default 0)")
    parser.add_argument("--device", default="cpu", choices=("auto", "cpu", "cuda"), help="cpu (default), cuda or auto")


def run(args: argparse.Namespace) -> int:
    """Print the prompt and its continuation as it is made."""
    for wrong, rule in (
        (args.tokens < 1, "--tokens must be at least 1"),
        (not 0 <= args.temperature < float("inf"), "--temperature must be 0 or above"),
        (args.top_k < 1, "--top-k must be at least 1"),
        (not 0 <= args.seed < 2**63, "--seed must be a whole number from 0 to 2^63 - 1"),
    ):
        if wrong:
            raise UserError(rule)
    require_torch()
    with imported_for_good():
        from meshwright.checkpoint.load_model import load_model, load_tokenizer_of
        from meshwright.models.generate import continue_text
        from meshwright.parallel.world import pick_device

    model = load_model(args.run, device=pick_device(args.device, 0))
    tokenizer = load_tokenizer_of(args.run)
    options = {"temperature": args.temperature, "top_k": args.top_k, "seed": args.seed}
    sys.stdout.write(args.prompt)
    for piece in continue_text(model, tokenizer, args.prompt, args.tokens, **options):
        sys.stdout.write(piece)
        sys.stdout.flush()
    print()
    return 0
