"""What loops of one's own do beside the straight way: several optimizers, samplers, tables of a tokenizer, dtypes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers import BatchEncoding

import meshwright as mw
from meshwright.cli.main import main
from meshwright.elastic.failure import RankError
from meshwright.errors import ConfigError, UserError
from meshwright.models.parts import whole
from meshwright.parallel.precision import Precision
from meshwright.parallel.world import World
from meshwright.verify.pool import RankPool
from tests.parity.own_loops import Convolutions, images, loss_of
from tests.parity.test_hugging_face_models import build


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def loss_of_two(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).float(), y)


def parts(count: int = 8) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(count, 6, generator=draw), torch.randint(3, (count,), generator=draw)


def with_two_optimizers(world: World, strategy: str, together: bool, clip: float) -> list[Tensor]:
    torch.manual_seed(0)
    model = mw.parallelize(Two(), strategy, precision=Precision(param=torch.float16))
    split: Any = model.module
    groups = [list(split.first.parameters()), list(split.second.parameters())]
    if together:
        optimizers = [model.optimizer(torch.optim.SGD, groups=[g for one in groups for g in one], lr=0.1)]
    else:
        optimizers = [model.optimizer(torch.optim.SGD, groups=group, lr=0.1) for group in groups]
    x, y = (one.chunk(model.strategy.dp)[model.data_rank] for one in parts())
    for _ in range(2):
        model.backward(loss_of_two, x, y)
        model.step(optimizers, clip=clip)
    assert model.loop.steps == 2
    return [whole(value.detach()).clone() for value in model.parameters()]


@pytest.mark.parametrize("strategy", ["dp=2", "dp=2 zero=3"])
def test_optimizers_of_parts_step_together_as_one_would(strategy: str, pool: RankPool) -> None:
    for clip in (0.0, 0.01):
        expected = pool.run(with_two_optimizers, 2, strategy, True, clip)
        found = pool.run(with_two_optimizers, 2, strategy, False, clip)
        for ours, theirs in zip(found, expected, strict=True):
            assert all(torch.equal(one, two) for one, two in zip(ours, theirs, strict=True))


def test_a_second_step_of_the_same_gradients_is_refused() -> None:
    model = mw.parallelize(Two(), "dp=1")
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    model.backward(loss_of_two, *parts())
    model.step(optimizer)
    with pytest.raises(UserError, match=r"several optimizers go together: step\(\[a, b\]\)"):
        model.step(optimizer)
    # By hand as well, where a pass comes before each.
    loss_of_two(model, *parts()).backward()
    model.step(optimizer)


def test_a_step_before_anything_went_backward_is_refused() -> None:
    parallel = mw.parallelize(nn.Linear(2, 2), "dp=1")
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(UserError, match="nothing went backward before it"):
        parallel.step(optimizer)
    assert parallel.loop.steps == 0


@pytest.mark.parametrize("clip", [-1.0, float("nan")])
def test_gradients_are_not_turned_around_by_clipping(clip: float) -> None:
    parallel = mw.parallelize(nn.Linear(2, 2), "dp=1")
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
    parallel.backward(lambda model, x: model(x).mean(), torch.ones(2, 2))
    with pytest.raises(ConfigError, match="cannot be clipped to a norm of"):
        parallel.step(optimizer, clip=clip)
    with pytest.raises(ConfigError, match="cannot be clipped to a norm of"):
        mw.clip_grad_norm_(parallel.parameters(), clip)


@pytest.mark.parametrize(
    ("model", "strategy", "told"),
    [
        (nn.Linear, "dp=1", "the model is a type, and an nn.Module is wanted"),
        (nn.Linear(2, 2), 3, "the strategy is 3, and words are wanted"),
        (nn.Linear(2, 2), {"dp": 2}, "the strategy is {'dp': 2}, and words are wanted"),
    ],
)
def test_what_is_no_model_and_no_strategy_is_told(model: Any, strategy: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        mw.parallelize(model, strategy)


def test_a_batch_size_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"batch_size=2.5 is no whole number"):
        mw.parallelize(nn.Linear(2, 2), "dp=1").batch_sampler(10, 2.5)  # type: ignore[arg-type]


def test_a_checkpoint_of_several_optimizers_is_refused(tmp_path: Path) -> None:
    model = mw.parallelize(Two(), "dp=1")
    with pytest.raises(UserError, match="one optimizer, not of a list; make one with groups"):
        model.save(tmp_path, [model.optimizer(torch.optim.SGD, lr=0.1)])  # type: ignore[arg-type]


def test_two_samplers_in_turn_move_by_their_own_batches() -> None:
    model = mw.parallelize(Convolutions().double(), "dp=1")
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    samplers = [model.batch_sampler(images(22), size) for size in (4, 6)]
    loaders = [iter(DataLoader(images(22), batch_sampler=sampler)) for sampler in samplers]
    batches = [next(loader) for loader in loaders]
    with pytest.raises(UserError, match="2 samplers are in use"):
        model.backward(loss_of, *batches[0])
    for turn in range(2):
        for sampler, loader in zip(samplers, loaders, strict=True):
            model.backward(loss_of, *(batches.pop(0) if batches else next(loader)), sampler=sampler)
            model.step(optimizer)
        assert [one.position for one in samplers] == [4 * (turn + 1), 6 * (turn + 1)]


def test_a_sampler_of_an_evaluation_is_not_in_the_way() -> None:
    model = mw.parallelize(Convolutions().double(), "dp=1")
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    training, evaluation = model.batch_sampler(images(22), 4), model.batch_sampler(images(8), 4)
    for step, batch in enumerate(DataLoader(images(22), batch_sampler=training)):
        model.backward(loss_of, *batch)
        model.step(optimizer)
        assert len(list(DataLoader(images(8), batch_sampler=evaluation))) == 2
        assert (training.position, evaluation.position) == (min(4 * step + 4, 22), 0)


class Called(nn.Module):
    """A model that loops call in their own ways."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 5)

    def forward(self, *given: Any, pictures: Any = None) -> Tensor:
        x = given[-1] if given else pictures
        if isinstance(x, dict):
            x = x["pictures"][0]
        if x.ndim == 3:
            x = x[0] + x[1]
        return self.layer(x.flatten(1)[:, :12])


WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "nested": lambda model, x: model({"pictures": [x]}),
    "by name": lambda model, x: model(pictures=x),
    "a tensor of something else first": lambda model, x: model(torch.ones(4), x),
    "rows of time first, and whose": lambda model, x: model(x, torch.stack([x.flatten(1)] * 2)),
    "twice as many rows": lambda model, x: model(torch.cat([x, x]))[: len(x)],
    "another pass between": lambda model, x: (model(x), model.eval_of(x[:1]))[0],
}


def train_called(world: World, way: str, strategy: str) -> list[float]:
    """Losses and norms; the last batch of an epoch has five samples, which two ranks share as three and two."""
    torch.manual_seed(0)
    parallel = mw.parallelize(Called().double(), strategy)
    parallel.module.eval_of = torch.no_grad()(parallel)
    optimizer = parallel.optimizer(torch.optim.SGD, lr=0.1)
    sampler = parallel.batch_sampler(images(21), 8)
    found = []
    for pictures, labels in DataLoader(images(21), batch_sampler=sampler):
        loss = parallel.backward(F.cross_entropy(WAYS[way](parallel, pictures), labels))
        found += [float(loss), float(parallel.step(optimizer))]
    return found


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_weighs_by_its_samples_however_the_model_was_called(way: str, pool: RankPool) -> None:
    (expected,) = pool.run(train_called, 1, way, "dp=1")
    for found in pool.run(train_called, 2, way, "dp=2"):
        assert found == pytest.approx(expected, rel=1e-12)


def call_without_a_sampler(world: World, way: str) -> str:
    parallel = mw.parallelize(Called().double(), "dp=2")
    pictures, labels = images(4).tensors
    with pytest.raises(UserError) as refused:
        parallel.backward(F.cross_entropy(WAYS[way](parallel, pictures[:3]), labels[:3]))
    return str(refused.value)


def test_a_loss_of_nobody_knows_how_many_samples_is_refused(pool: RankPool) -> None:
    told = pool.run(call_without_a_sampler, 2, "a tensor of something else first")
    assert all("called with tensors of 3, 4 rows: of how many" in one and "micro_steps" in one for one in told)


def test_a_loss_of_other_rows_than_the_batch_has_samples_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = mw.parallelize(Called().double(), "dp=1")
    pictures, labels = next(iter(DataLoader(images(8), batch_sampler=parallel.batch_sampler(images(8), 6))))
    loss = F.cross_entropy(parallel(pictures[:4]), labels[:4])
    monkeypatch.setattr(parallel, "strategy", mw.Strategy.parse("dp=2", 2))
    with pytest.raises(UserError, match="tensors of 4 rows, and the batch in hand has 6 samples on this rank"):
        parallel.backward(loss)


class Lars(torch.optim.SGD):
    """As such optimizers are: a norm of the whole parameter decides."""


class Known(torch.optim.SGD):
    by_element = True


def shard(world: World, make: Any) -> None:
    mw.parallelize(Two(), "zero=1").optimizer(make, lr=0.1)


def test_only_optimizers_that_are_known_to_change_every_element_by_itself_are_sharded(pool: RankPool) -> None:
    with pytest.raises(RankError, match="Lars is not known to change every element by itself"):
        pool.run(shard, 2, Lars)
    pool.run(shard, 2, Known)
    pool.run(shard, 2, torch.optim.Adadelta)


def with_a_mesh_of_torchs(world: World) -> None:
    mesh: Any = init_device_mesh("cpu", (2,))
    with pytest.raises(ConfigError, match=r"mesh is a DeviceMesh, .* meshwright.make_mesh\(strategy"):
        mw.parallelize(Two(), "dp=2", mesh)
    made = mw.make_mesh(mw.Strategy.parse("dp=2", 2), "cpu")
    assert mw.parallelize(Two(), "dp=2", made).mesh is made


def test_a_mesh_is_one_of_a_strategy(pool: RankPool) -> None:
    pool.run(with_a_mesh_of_torchs, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_are_given_to_a_model_in_the_dtype_that_it_computes_in(dtype: torch.dtype) -> None:
    model = mw.parallelize(Two(), "dp=1", precision=Precision(param=dtype))
    x, _ = parts()
    assert model(x).dtype == dtype
    assert model.forward([{"x": x}], lambda output, _: output.dtype) == [dtype]


def test_tables_of_a_tokenizer_are_batches() -> None:
    model = mw.parallelize(build("granite"), "dp=1")
    ids = torch.randint(66, (4, 9), generator=torch.Generator().manual_seed(0))
    table = BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    seen: list[int] = []

    def loss(net: Any, batch: dict[str, Tensor]) -> Tensor:
        seen.append(len(batch["input_ids"]))
        return mw.cross_entropy(net(**batch, use_cache=False).logits[:, :-1], batch["input_ids"][:, 1:])

    model.backward(loss, table, micro_steps=2)
    assert seen == [2, 2]


def test_texts_are_cut_with_their_samples() -> None:
    model = mw.parallelize(Two(), "dp=1")
    seen: list[tuple[list[float], Any, str]] = []

    def loss(net: Any, batch: dict[str, Any], note: str) -> Tensor:
        seen.append((batch["y"].tolist(), batch["names"], note))
        return loss_of_two(net, batch["x"], batch["y"])

    (x, _), y = parts(4), torch.arange(4) % 3
    for names in (["a", "b", "c", "d"], ("a", "b", "c", "d")):
        seen.clear()
        model.backward(loss, {"x": x, "y": y, "names": names}, "all", micro_steps=3)
        assert seen == [([0, 1], names[:2], "all"), ([2], names[2:3], "all"), ([0], names[3:], "all")]
    with pytest.raises(UserError, match=r"a batch of \[4, 6\], \[4\], 3 texts: .* one text for each"):
        model.backward(loss, {"x": x, "y": y, "names": ["a", "b", "c"]}, "all")


def test_what_is_asked_of_the_model_is_the_model_s_unless_it_would_be_a_part() -> None:
    model: Any = mw.parallelize(build("granite"), "dp=1")
    assert model.config.model_type == "granite"
    assert model.training
    model.zero_grad()
    for name, told in (("state_dict", "use save"), ("cuda", "before parallelize")):
        with pytest.raises(AttributeError, match=told):
            getattr(model, name)
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        model.absent  # noqa: B018


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("def build(:\n", "cannot be imported: SyntaxError"),
        ("import torch\nraise ValueError('no')\n", "cannot be imported: ValueError: no"),
        ("def build():\n    raise ValueError('too small')\n", "fails: ValueError: too small"),
        ("def build():\n    return len(3)\n", "fails: TypeError: object of type 'int' has no len()"),
        ("def build(width):\n    return None\n", "cannot be called without arguments (width); give each a default"),
    ],
)
def test_verify_tells_mistakes_of_a_module_in_a_sentence(
    source: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"mistaken_{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    assert main(["verify", "--model", f"{name}:build", "--parallel", "dp=2"]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert "Traceback" not in error


def test_verify_lets_functions_drop_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", f"{__name__}:dropping", "--parallel", "zero=3", "--steps", "2"]
    assert main(["verify", *arguments]) == 0, capsys.readouterr().out


def dropping() -> Any:
    return build("granite", attention_dropout=0.5)


def test_a_family_that_names_its_head_alone_is_cut_into_stages(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", f"{__name__}:head_alone", "--parallel", "pp=2", "--steps", "2"]
    assert main(["verify", *arguments]) == 0, capsys.readouterr()


def head_alone() -> Any:
    model = build("hunyuan_v1_dense")
    assert list(model._pp_plan) == ["lm_head"]
    return model
