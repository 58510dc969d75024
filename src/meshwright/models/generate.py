"""Continue a text or a sequence of tokens, one token at a time, from a decoder's own predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import UserError
from meshwright.models.attention import KeyValueCache
from meshwright.models.decoder import Decoder
from meshwright.models.parts import whole

Predict = Callable[[torch.Tensor, KeyValueCache], torch.Tensor]


@torch.no_grad()
def generate(
    model: Decoder,
    prompt: Sequence[int],
    count: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = 40,
    seed: int = 0,
    end: int | None = None,
    predict: Predict | None = None,
) -> Iterator[int]:
    """The next `count` tokens after the prompt, or fewer when `end` is drawn; temperature 0 takes the likeliest.

    A model that is split over a pipeline cannot be called; there `predict` gives the logits after the last token.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    window = model.spec.max_position_embeddings
    tokens, cache = list(prompt), KeyValueCache()
    model.eval()
    fresh = tokens[-window:]
    for _ in range(count):
        if cache.length + len(fresh) > window:
            # Out of positions: go on from the latest half of the text.
            fresh, cache = tokens[-(window // 2) :], KeyValueCache()
        tokens_BT = torch.tensor([fresh], device=device)
        logits_BV = predict(tokens_BT, cache) if predict else whole(model(tokens_BT, cache=cache))[:, -1]
        logits_V = logits_BV[0].float()
        token = _draw(logits_V, temperature, top_k, generator)
        if token == end:
            return
        yield token
        tokens.append(token)
        fresh = [token]


def _draw(logits_V: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    if top_k is not None and top_k < len(logits_V):
        logits_V = logits_V.masked_fill(logits_V < logits_V.topk(top_k).values[-1], float("-inf"))
    return int(torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator))


def continue_text(model: Decoder, tokenizer: Tokenizer, prompt: str, count: int, **options: Any) -> Iterator[str]:
    """The continuation of a prompt in pieces of whole characters, as they are made."""
    start = tokenizer.encode(prompt) or ([tokenizer.end] if tokenizer.end is not None else [])
    if not start:
        raise UserError("the prompt has no tokens to continue; give at least one character")
    if max(start) >= model.spec.vocab_size:
        raise UserError(
            f"the tokenizer gives the id {max(start)}, and the model's vocabulary has {model.spec.vocab_size} entries: "
            "the tokenizer is not this model's"
        )
    tokens = list(start)
    # Decoded with what is before it: some tokenizers drop the space in front of a text's first word.
    shown = len(tokenizer.decode(tokens))
    for token in generate(model, start, count, end=tokenizer.end, **options):
        tokens.append(token)
        text = tokenizer.decode(tokens)
        # A character may take several tokens: what ends in the mark of an unfinished one waits.
        if not text.endswith("\N{REPLACEMENT CHARACTER}") or len(tokens) == len(start) + count:
            yield text[shown:]
            shown = len(text)
