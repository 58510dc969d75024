"""The decoder: generation with a cache, attention against a naive mask, positions, and dropout under any split."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from meshwright.models.attention import KeyValueCache, attend
from meshwright.models.counter_random import keep_mask, token_keys
from meshwright.models.decoder import Decoder, Dropout
from meshwright.models.initialize import build
from meshwright.models.presets import preset
from meshwright.models.rope import angles, rotate
from meshwright.models.spec import ModelSpec

WINDOWS = [None, 1, 5, 16, 17, 40]
LEARNED = {"positions": "learned", "norm": "layernorm", "activation": "gelu"}


def model(**changes: object) -> Decoder:
    fields = preset("tiny").model_dump() | {"num_hidden_layers": 3, "initializer_range": 0.2} | changes
    return build(ModelSpec.model_validate(fields), seed=4, dtype=torch.float64)


def batch(samples: int = 3, tokens: int = 24) -> Tensor:
    return torch.randint(272, (samples, tokens), generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("new", [1, 4, 17])
def test_attention_is_that_of_a_naive_loop(window: int | None, new: int) -> None:
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads, attended, size = 6, 2, 17, 8
    q = torch.randn(2, heads, new, size, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 2, kv_heads, attended, size, generator=generator, dtype=torch.float64)
    made = attend(q, k, v, window)
    for head in range(heads):
        for row in range(new):
            here = attended - new + row
            first = 0 if window is None else max(0, here - window + 1)
            keys, values = (x[:, head // (heads // kv_heads), first : here + 1] for x in (k, v))
            scores = (keys @ q[:, head, row, :, None]).squeeze(-1) / math.sqrt(size)
            expected = (scores.softmax(-1)[..., None] * values).sum(1)
            torch.testing.assert_close(made[:, head, row], expected)


@pytest.mark.parametrize(
    "changes",
    [{}, {"sliding_window": 5}, {"qk_norm": True}, LEARNED, {"family": "mixtral", "experts": "tiny-moe"}],
    ids=["plain", "window", "qk norm", "learned positions", "experts"],
)
@pytest.mark.parametrize("steps", [[24], [10] + [1] * 14, [3, 7, 1, 13]], ids=["at once", "by token", "by chunk"])
def test_a_cache_changes_nothing(changes: dict[str, object], steps: list[int]) -> None:
    if "experts" in changes:
        changes = changes | {"experts": preset("tiny-moe").model_dump()["experts"]}
    decoder, tokens, cache = model(**changes).eval(), batch(), KeyValueCache()
    with torch.no_grad():
        parts = [decoder(part, cache=cache) for part in tokens.split(steps, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), decoder(tokens))
    assert cache.length == 24


def test_later_tokens_do_not_change_earlier_logits() -> None:
    decoder, tokens = model().eval(), batch()
    changed = tokens.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % 272
    with torch.no_grad():
        one, two = decoder(tokens), decoder(changed)
    assert torch.equal(one[:, :12], two[:, :12])
    assert not torch.equal(one[:, 12:], two[:, 12:])


@pytest.mark.parametrize("changes", [{}, {"sliding_window": 4}, LEARNED])
def test_documents_of_one_row_are_as_if_alone(changes: dict[str, object]) -> None:
    decoder, tokens = model(**changes), batch()
    documents = torch.tensor([[0] * 7 + [1] * 9 + [2] * 8]).expand_as(tokens)
    together = decoder(tokens, documents_BT=documents)
    for start, stop in ((0, 7), (7, 16), (16, 24)):
        positions = torch.arange(start, stop)[None]
        torch.testing.assert_close(together[:, start:stop], decoder(tokens[:, start:stop], positions))
    cache = KeyValueCache()
    steps = [
        decoder(tokens[:, start : start + 6], cache=cache, documents_BT=documents[:, : start + 6])
        for start in range(0, 24, 6)
    ]
    torch.testing.assert_close(torch.cat(steps, dim=1), together)


def test_rotary_scores_depend_on_distance_only() -> None:
    made = preset("tiny")
    q, k = torch.randn(2, 1, 1, 1, made.head_dim, dtype=torch.float64)
    scores = []
    for start in (0, 3, 400):
        cosines, sines = angles(made, torch.tensor([[start, start + 7]]), torch.float64)
        turned = [rotate(x, cosines[:, :, i : i + 1], sines[:, :, i : i + 1]) for i, x in enumerate((q, k))]
        scores.append((turned[0] * turned[1]).sum())
    # The angles are taken from frequencies in float32.
    torch.testing.assert_close(torch.stack(scores[1:]), scores[0].expand(2), rtol=0, atol=1e-9)


def test_given_positions_are_used() -> None:
    for changes in ({}, LEARNED):
        decoder, tokens = model(**changes).eval(), batch()
        places = torch.arange(24)[None]
        with torch.no_grad():
            assert torch.equal(decoder(tokens, places), decoder(tokens))
            moved = decoder(tokens, places + 5)
            shuffled = decoder(tokens, places.flip(1))
        # Rotary positions are relative, learned ones are not.
        assert torch.allclose(moved, decoder(tokens), atol=1e-9) == (changes == {})
        assert not torch.allclose(shuffled, decoder(tokens), atol=1e-3)


def test_learned_positions_are_added_to_the_embeddings() -> None:
    decoder = model(**LEARNED).eval()
    seen: list[Tensor] = []
    decoder.model.layers["0"].register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    decoder(batch())
    expected = decoder.model.embed_tokens(batch()) + decoder.model.embed_positions.weight[:24]
    assert torch.equal(seen[0], expected)


def test_dropout_does_not_depend_on_how_a_batch_is_split_over_samples() -> None:
    decoder, tokens = model(dropout=0.3).train(), batch(4)
    samples = torch.tensor([10, 11, 700, 2**40])
    whole = decoder(tokens, samples_B=samples)
    parts = [decoder(tokens[rows], samples_B=samples[rows]) for rows in ([0], [1, 2], [3])]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-12)
    assert not torch.allclose(whole, decoder(tokens, samples_B=samples + 1))
    assert not torch.allclose(whole, decoder.eval()(tokens, samples_B=samples))


def test_dropout_does_not_depend_on_how_a_sequence_is_split() -> None:
    samples, places = torch.tensor([3, 8]), torch.arange(24).expand(2, 24)
    drop, x = Dropout(0.4, site=5), torch.ones(2, 24, 64, dtype=torch.float64)
    whole = drop(x, token_keys(1, samples, places))
    for cut in ([12, 12], [1, 20, 3]):
        parts = [drop(torch.ones(2, part.shape[1], 64), token_keys(1, samples, part)) for part in places.split(cut, 1)]
        assert torch.equal(torch.cat(parts, dim=1), whole.float())
    # Every second token to one rank, as balanced context parallelism deals them.
    even = drop(x[:, ::2], token_keys(1, samples, places[:, ::2]))
    assert torch.equal(even, whole[:, ::2])


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_drops_at_its_rate_and_keeps_the_mean(rate: float) -> None:
    keys = token_keys(0, torch.arange(16), torch.arange(64).expand(16, 64))
    dropped = Dropout(rate, site=1)(torch.ones(16, 64, 256, dtype=torch.float64), keys)
    kept = (dropped != 0).double()
    error = math.sqrt(rate * (1 - rate) / kept.numel())
    assert abs(kept.mean() - (1 - rate)) < 4 * error
    assert dropped[dropped != 0].unique() == pytest.approx(1 / (1 - rate))
    for dimension in range(3):
        others = tuple(each for each in range(3) if each != dimension)
        spread = kept.mean(dim=others)
        expected = math.sqrt(rate * (1 - rate) * kept.shape[dimension] / kept.numel())
        assert spread.std() == pytest.approx(expected, rel=0.35)


def test_masks_of_other_sites_seeds_samples_and_places_are_unrelated() -> None:
    places = torch.arange(128).expand(8, 128)
    base = keep_mask(token_keys(0, torch.arange(8), places), 1, 64, 0.5).double().flatten()
    others = {
        "site": keep_mask(token_keys(0, torch.arange(8), places), 2, 64, 0.5),
        "seed": keep_mask(token_keys(1, torch.arange(8), places), 1, 64, 0.5),
        "sample": keep_mask(token_keys(0, torch.arange(8) + 1, places), 1, 64, 0.5),
        "place": keep_mask(token_keys(0, torch.arange(8), places + 1), 1, 64, 0.5),
    }
    for kind, mask in others.items():
        assert abs(torch.corrcoef(torch.stack((base, mask.double().flatten())))[0, 1]) < 0.02, kind


def test_every_place_that_drops_has_a_mask_of_its_own() -> None:
    sites = [module.site for module in model(dropout=0.1).modules() if isinstance(module, Dropout)]
    assert len(set(sites)) == len(sites) == 1 + 2 * 3


def test_no_dropout_keeps_everything() -> None:
    keys = token_keys(0, torch.arange(4), torch.arange(32).expand(4, 32))
    assert bool(keep_mask(keys, 1, 64, 0.0).all())


def test_without_sample_numbers_torchs_own_seed_decides_the_masks() -> None:
    decoder, tokens = model(dropout=0.3).train(), batch()
    torch.manual_seed(1)
    one = decoder(tokens)
    two = decoder(tokens)
    torch.manual_seed(1)
    assert torch.equal(decoder(tokens), one)
    assert not torch.allclose(one, two)


def test_the_gradient_passes_where_the_mask_kept() -> None:
    keys = token_keys(0, torch.arange(2), torch.arange(8).expand(2, 8))
    x = torch.randn(2, 8, 16, requires_grad=True)
    dropped = Dropout(0.25, site=3)(x, keys)
    dropped.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, (dropped != 0) / 0.75)
