"""Fresh weights are a function of (seed, name, position); tied weights stay one tensor."""

from __future__ import annotations

import math

import pytest
import torch

from meshwright.models.counter_random import key_of, normal, random_bits
from meshwright.models.decoder import Decoder
from meshwright.models.initialize import build, fill_normal
from meshwright.models.presets import preset
from meshwright.models.spec import ModelSpec


def spec(**changes: object) -> ModelSpec:
    return ModelSpec.model_validate(preset("tiny").model_dump() | {"num_hidden_layers": 2} | changes)


def weights(made: ModelSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in build(made, seed).named_parameters()}


def test_a_deeper_model_starts_from_the_same_weights_in_the_layers_it_shares() -> None:
    shallow, deep = weights(spec()), weights(spec(num_hidden_layers=8))
    for name, value in shallow.items():
        into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        # Projections into the residual shrink with the square root of the depth, and differ in nothing else.
        scaled = deep[name] * math.sqrt(8 / 2) if into_residual else deep[name]
        torch.testing.assert_close(value, scaled, rtol=1e-6 if into_residual else 0, atol=0, msg=name)


def test_a_larger_vocabulary_keeps_the_rows_that_were_there() -> None:
    small, large = weights(spec()), weights(spec(vocab_size=300))
    assert torch.equal(small["model.embed_tokens.weight"], large["model.embed_tokens.weight"][:272])
    assert torch.equal(small["lm_head.weight"], large["lm_head.weight"][:272])


def test_every_value_can_be_computed_alone() -> None:
    # More than one piece of work, so that the seam between two is passed.
    whole = torch.empty(3, 700_000)
    fill_normal(whole, seed=7, name="some.weight", deviation=0.5)
    for index in (0, 1, (1 << 20) - 1, 1 << 20, 2_099_999):
        alone = normal(key_of(7, "some.weight"), torch.tensor([index])) * 0.5
        assert whole.view(-1)[index] == alone.float()


@pytest.mark.parametrize("other", [("seed 1", "a.weight"), ("seed 0", "b.weight")])
def test_another_seed_or_name_gives_unrelated_weights(other: tuple[str, str]) -> None:
    index = torch.arange(100_000)
    one, two = normal(key_of("seed 0", "a.weight"), index), normal(key_of(*other), index)
    assert abs(torch.corrcoef(torch.stack((one, two)))[0, 1]) < 0.02


def test_weights_are_normal_with_the_stated_deviation() -> None:
    spec = preset("demo")
    made = weights(spec)
    into_residual = 0.02 / math.sqrt(2 * spec.num_hidden_layers)
    deviations = {
        "q_proj": 0.02,
        "embed_tokens": 0.02,
        "o_proj": into_residual,
        "down_proj": into_residual,
    }
    for part, deviation in deviations.items():
        value = torch.cat([tensor.flatten() for name, tensor in made.items() if f"{part}.weight" in name]).double()
        assert value.std() == pytest.approx(deviation, rel=0.01), part
        assert abs(value.mean()) < 0.01 * deviation
        for width, share in ((1, 0.3173), (2, 0.0455), (3, 0.0027)):
            assert (value.abs() > width * deviation).double().mean() == pytest.approx(share, rel=0.15), part


def test_neighbouring_values_are_unrelated() -> None:
    values = normal(key_of(0, "a"), torch.arange(200_001))
    for lag in (1, 64, 4096):
        assert abs(torch.corrcoef(torch.stack((values[:-lag], values[lag:])))[0, 1]) < 0.02


@pytest.mark.parametrize("lowest", [0, 30, 59])
def test_random_bits_are_even_wherever_they_are_taken(lowest: int) -> None:
    bits = random_bits(key_of("u"), torch.arange(160_000)) >> lowest
    counts = torch.bincount(bits & 31, minlength=32).double()
    assert (counts - 5000).abs().max() < 5 * math.sqrt(5000)


def test_norms_start_at_one_and_biases_at_zero() -> None:
    made = weights(spec(norm="layernorm", qk_norm=True, bias=("q", "k", "v", "o", "gate", "up", "down", "head")))
    assert all(bool((value == 1).all()) for name, value in made.items() if name.endswith("norm.weight"))
    assert all(bool((value == 0).all()) for name, value in made.items() if name.endswith(".bias"))


def test_narrow_dtypes_hold_the_rounded_wide_values() -> None:
    wide, narrow = build(spec(), seed=2, dtype=torch.float64), build(spec(), seed=2, dtype=torch.bfloat16)
    for (name, value), other in zip(wide.named_parameters(), narrow.parameters(), strict=True):
        assert torch.equal(value.bfloat16(), other), name


def test_tied_embeddings_are_one_parameter_after_materialising() -> None:
    model = build(spec(tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())


def test_a_stage_starts_from_the_weights_of_the_whole() -> None:
    from meshwright.models.initialize import initialize

    whole = build(spec(num_hidden_layers=4), seed=5)
    stage = Decoder(spec(num_hidden_layers=4))
    for layer in ("0", "1", "3"):
        del stage.model.layers[layer]
    initialize(stage, stage.spec, seed=5)
    for name, value in stage.named_parameters():
        assert torch.equal(value, whole.get_parameter(name)), name


def test_specs_that_name_the_same_biases_are_equal() -> None:
    assert spec(bias=("v", "q", "k", "q")) == spec(bias=("q", "k", "v"))
