"""Our AdamW: that of torch in float32, near it in less, and the protocol of fused optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.config import RunConfig, load_config
from meshwright.errors import ConfigError
from meshwright.estimate import kept
from meshwright.estimate.kept import Kept
from meshwright.models.initialize import build
from meshwright.models.parts import Box
from meshwright.optim import codes, reference
from meshwright.optim.adamw import FusedAdamW, Moments
from tests.unit.specs import small

OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
KINDS: list[Moments] = ["float32", "bf16", "int8"]
SHAPES = [(40, 100), (300,), (3, 7, 50)]
NARROW = [(torch.float32, "bf16"), (torch.float32, "int8"), *((torch.bfloat16, kind) for kind in KINDS)]


def weights(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(4)
    return [nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in SHAPES]


def give_gradients(parameters: list[nn.Parameter], step: int) -> None:
    for number, parameter in enumerate(parameters):
        draw = torch.Generator().manual_seed(100 * step + number)
        # The same direction on average, so that weights go somewhere.
        value = torch.randn(parameter.shape, generator=draw) + 0.5
        parameter.grad = value.to(torch.bfloat16).to(parameter.dtype)


def train(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        give_gradients(parameters, step)
        optimizer.step()


def bytes_of(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    held = [parameter.detach() for parameter in parameters]
    held += [value for parameter in parameters for value in optimizer.state[parameter].values()]
    return [tensor.reshape(-1).clone().view(torch.uint8) for tensor in held]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_float32_is_adamw_of_torch_but_for_the_last_bits() -> None:
    ours, theirs = weights(), weights()
    train(ours, FusedAdamW(ours, **OPTIONS), 50)
    train(theirs, torch.optim.AdamW(theirs, **OPTIONS), 50)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def deviations(dtype: torch.dtype, kind: Moments) -> tuple[float, float]:
    """How far weights are from those of AdamW in float64 after 60 steps: on average, and the root of mean squares."""
    ours, exact = weights(dtype), [nn.Parameter(weight.detach().double()) for weight in weights(dtype)]
    train(ours, FusedAdamW(ours, **OPTIONS, moments=kind), 60)
    train(exact, torch.optim.AdamW(exact, **OPTIONS), 60)
    errors = torch.cat([(mine.double() - other).detach().flatten() for mine, other in zip(ours, exact, strict=True)])
    return float(errors.mean()), float(errors.square().mean().sqrt())


@pytest.mark.parametrize(
    ("dtype", "kind", "mean", "spread"),
    [
        (torch.float32, "float32", 1e-6, 1e-6),
        # Weights go about 0.35 away in these steps.
        (torch.float32, "bf16", 5e-5, 1e-3),
        (torch.float32, "int8", 1e-3, 1.5e-2),
        (torch.bfloat16, "float32", 1e-3, 2.5e-2),
        (torch.bfloat16, "bf16", 1e-3, 2.5e-2),
        (torch.bfloat16, "int8", 2e-3, 3e-2),
    ],
)
def test_weights_stay_near_those_of_float64(dtype: torch.dtype, kind: Moments, mean: float, spread: float) -> None:
    found = deviations(dtype, kind)
    assert abs(found[0]) < mean
    assert found[1] < spread


def test_updates_far_below_a_step_of_bfloat16_are_not_lost() -> None:
    parameter = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = FusedAdamW([parameter], lr=1e-4, weight_decay=0.0)
    for _ in range(100):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    # A hundred updates of 1e-4, where a step below one is 2^-8: to the nearest none of them would be seen.
    assert float(parameter.detach().double().mean()) == pytest.approx(0.99, abs=5e-4)
    assert bool((parameter == 1.0).any())


@pytest.mark.parametrize(("dtype", "kind"), [(torch.float32, "float32"), *NARROW])
def test_found_inf_leaves_every_byte(dtype: torch.dtype, kind: Moments) -> None:
    parameters = weights(dtype)
    optimizer: Any = FusedAdamW(parameters, **OPTIONS, moments=kind)
    train(parameters, optimizer, 3)
    before = bytes_of(parameters, optimizer)
    for value in (1.0, 7.0):
        optimizer.found_inf = torch.tensor([value])
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, float("nan"))
        optimizer.step()
    assert same(before, bytes_of(parameters, optimizer))
    optimizer.found_inf = torch.tensor([0.0])
    train(parameters, optimizer, 1, first=3)
    other = weights(dtype)
    plain = FusedAdamW(other, **OPTIONS, moments=kind)
    train(other, plain, 4)
    assert same(bytes_of(other, plain), bytes_of(parameters, optimizer))


@pytest.mark.parametrize("kind", KINDS)
def test_grad_scale_divides_gradients(kind: Moments) -> None:
    (one, other), scale = (weights(), weights()), 8.0
    plain, scaled = (FusedAdamW(held, **OPTIONS, moments=kind) for held in (one, other))
    scaled.grad_scale = torch.tensor([scale])  # type: ignore[attr-defined]
    for step in range(4):
        for held in (one, other):
            give_gradients(held, step)
        for parameter in other:
            assert parameter.grad is not None
            parameter.grad.mul_(scale)
        plain.step()
        scaled.step()
    assert same(bytes_of(one, plain), bytes_of(other, scaled))


def test_copies_are_the_new_weights_rounded_to_the_nearest() -> None:
    parameters = weights()
    optimizer = FusedAdamW(parameters, **OPTIONS)
    optimizer.copies = {parameter: torch.zeros_like(parameter, dtype=torch.bfloat16) for parameter in parameters}
    train(parameters, optimizer, 2)
    for parameter, copy in optimizer.copies.items():
        assert torch.equal(copy, parameter.detach().to(torch.bfloat16))


@pytest.mark.parametrize(("dtype", "kind"), NARROW)
def test_state_that_was_saved_goes_on_bit_for_bit(dtype: torch.dtype, kind: Moments) -> None:
    first, second = weights(dtype), weights(dtype)
    optimizer, other = (FusedAdamW(held, **OPTIONS, moments=kind) for held in (first, second))
    train(first, optimizer, 3)
    for mine, theirs in zip(second, first, strict=True):
        mine.data.copy_(theirs)
    other.load_state_dict(optimizer.state_dict())
    train(first, optimizer, 3, first=3)
    train(second, other, 3, first=3)
    assert same(bytes_of(first, optimizer), bytes_of(second, other))


def test_state_of_other_moments_is_refused() -> None:
    parameters = weights()
    optimizer = FusedAdamW(parameters, **OPTIONS, moments="int8")
    train(parameters, optimizer, 1)
    with pytest.raises(ValueError, match="exp_avg is torch.uint8 and moments=bf16; give that which it was saved with"):
        FusedAdamW(weights(), **OPTIONS, moments="bf16").load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_updated_as_the_whole_is(kind: Moments) -> None:
    """Cut by rows and by columns; 8 bits where blocks are not cut."""
    whole = nn.Parameter(torch.randn(8, 512).to(torch.bfloat16))
    cuts = {(0, 0): (3, 512), (3, 0): (5, 512)} if kind == "int8" else {(0, 0): (8, 100), (0, 100): (8, 412)}
    boxes = {
        offset: tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True)) for offset, shape in cuts.items()
    }
    parts = {offset: nn.Parameter(whole.detach()[box].clone()) for offset, box in boxes.items()}
    alone = FusedAdamW([whole], **OPTIONS, moments=kind, seed=5)
    alone.place(whole, "weight", Box(whole, (0, 0), (8, 512)))
    ranks = []
    for offset, part in parts.items():
        ranks.append(FusedAdamW([part], **OPTIONS, moments=kind, seed=5))
        ranks[-1].place(part, "weight", Box(part, offset, (8, 512)))
    for _ in range(5):
        whole.grad = torch.randn(8, 512).to(torch.bfloat16)
        for offset, part in parts.items():
            part.grad = whole.grad[boxes[offset]].clone()
        for optimizer in (alone, *ranks):
            optimizer.step()
        for offset, part in parts.items():
            assert torch.equal(whole.detach()[boxes[offset]], part.detach())


def test_bytes_of_state() -> None:
    parameter = nn.Parameter(torch.zeros(1024, 256, dtype=torch.bfloat16))
    for kind, expected in (("float32", 8.0), ("bf16", 4.0), ("int8", 2 + 8 / 256)):
        optimizer = FusedAdamW([parameter], moments=kind)  # type: ignore[arg-type]
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        held = sum(value.nbytes for value in optimizer.state[parameter].values() if value.ndim)
        assert held / parameter.numel() == expected


def test_pieces_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for piece in (256, 1 << 18):
        monkeypatch.setattr(reference, "PIECE", piece)
        parameters = weights(torch.bfloat16)
        optimizer = FusedAdamW(parameters, **OPTIONS, moments="int8")
        train(parameters, optimizer, 3)
        found.append(bytes_of(parameters, optimizer))
    assert same(*found)


@pytest.mark.parametrize("weight", [torch.zeros(3, 4).t(), torch.zeros(3, dtype=torch.float64)])
def test_weights_that_it_cannot_update_are_refused(weight: Tensor) -> None:
    with pytest.raises(ValueError, match="must be contiguous float32 or bfloat16"):
        FusedAdamW([nn.Parameter(weight)])


def held_out_loss(dtype: torch.dtype, kind: Moments | None, seed: int) -> float:
    """After 150 steps on sequences in which a token tells the next one; torch's own AdamW without a kind."""
    model = build(small(), seed=seed, dtype=dtype)
    options: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    parameters = list(model.parameters())
    optimizer = (
        FusedAdamW(parameters, **options, moments=kind, seed=seed)
        if kind
        else torch.optim.AdamW(parameters, **options, fused=True)
    )

    after = torch.randperm(37, generator=torch.Generator().manual_seed(5))

    def loss(draw: torch.Generator, rows: int) -> Tensor:
        rows_of = [torch.randint(37, (rows,), generator=draw)]
        for _ in range(12):
            rows_of.append(after[rows_of[-1]])
        tokens = torch.stack(rows_of, dim=1)
        return functional.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())

    draw = torch.Generator().manual_seed(seed)
    for _ in range(150):
        loss(draw, 8).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return float(loss(torch.Generator().manual_seed(77), 256))


@pytest.mark.slow
def test_training_follows_float32_within_the_spread_of_its_seeds() -> None:
    plain = [held_out_loss(torch.float32, None, seed) for seed in range(4)]
    middle, spread = sum(plain) / 4, max(plain) - min(plain)
    assert middle < 3.0
    for dtype, kind in NARROW:
        ours = [held_out_loss(dtype, kind, seed) for seed in range(4)]
        assert abs(sum(ours) / 4 - middle) < spread, (dtype, kind, ours, plain)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["precision.stored=bf16", "train.optimizer=sgd"], "precision.stored=bf16 needs train.optimizer=adamw"),
        (["precision.moments=int8", "train.optimizer=adafactor"], "precision.moments=int8 needs train.optimizer=adamw"),
        (["precision.moments=bf16", "train.precision=float64"], "leave precision.moments=bf16 out"),
        (["precision.stored=float32", "train.precision=float64"], "leave precision.stored=float32 out"),
        (["precision.stored=bf16", "train.precision=fp16"], "use train.precision=bf16"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_in_words(settings: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, settings)
    assert said in str(caught.value)


def test_moments_may_change_when_a_run_is_resumed_and_stored_may_not() -> None:
    identity = RunConfig().identity()["precision"]
    assert "stored" in identity
    assert "moments" not in identity


def test_estimates_count_the_blocks_of_the_optimizer() -> None:
    assert kept.BLOCK == codes.BLOCK
    parts = [100, 256, 257, 5000]
    for moments in KINDS:
        optimizer = FusedAdamW([nn.Parameter(torch.zeros(count)) for count in parts], moments=moments)
        for part in optimizer.param_groups[0]["params"]:
            part.grad = torch.zeros_like(part)
        optimizer.step()
        held = sum(value.nbytes for state in optimizer.state.values() for value in state.values() if value.ndim)
        assert held == Kept("float32", moments).moments_of(parts)
