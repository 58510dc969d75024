"""Which strategy a run takes: what its settings name, the planner's choice, or what the ranks that are left allow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.config import RunConfig
from meshwright.config_load import resolve_config
from meshwright.errors import ConfigError, UserError
from meshwright.strategy import Strategy
from meshwright.training.planned import NothingFits, plan_ranks, plan_run, predict, question_of
from meshwright.training.run_folder import RunFolder


def configured(tmp_path: Path, *settings: str) -> RunConfig:
    common = ["model.preset=tiny", "data.path=x", "data.sequence_length=32", "train.global_batch=8", "run.device=cpu"]
    return resolve_config(None, [*common, f"run.dir={tmp_path}/run", *settings]).config


def test_a_strategy_that_is_named_is_taken(tmp_path: Path) -> None:
    config = configured(tmp_path, "parallel.strategy=zero=3 tp=2")
    found = plan_run(config, 4)
    assert (found.config, found.said, found.answer) == (config, (), None)


@pytest.mark.parametrize(
    ("text", "key", "value"), [("auto zero=3", "zero", 3), ("auto pp=2", "pp", 2), ("auto tp=2 zero=1", "tp", 2)]
)
def test_auto_asks_the_planner_within_constraints(tmp_path: Path, text: str, key: str, value: int) -> None:
    found = plan_run(configured(tmp_path, f"parallel.strategy={text}"), 4)
    strategy = Strategy.parse(found.strategy, 4)
    assert getattr(strategy, key) == value
    assert found.answer is not None
    assert found.answer["best"]["strategy"] == str(strategy)
    assert len(found.said) == 3
    assert str(strategy) in found.said[0]


def test_a_given_micro_batch_stays(tmp_path: Path) -> None:
    assert plan_run(configured(tmp_path, "train.micro_batch=2"), 2).micro_batch == 2


def test_what_is_expected_is_of_the_micro_batches_that_a_run_takes(tmp_path: Path) -> None:
    config = configured(tmp_path, "train.global_batch=16")
    for text, size in (("dp=1 pp=2", 2), ("dp=2", 8)):
        strategy = Strategy.parse(text, 2)
        micro_steps = strategy.micro_steps(16, None)
        (expected,) = predict(config, strategy, 2).candidates[:1]
        assert expected.micro_batch == 16 // strategy.all_shares // micro_steps == size


def test_every_batch_of_a_schedule_is_shared(tmp_path: Path) -> None:
    config = configured(tmp_path, "train.batch_schedule=[[0, 6], [10, 32]]")
    found = plan_run(config, 2)
    strategy = Strategy.parse(found.strategy, 2)
    for size in (6, 32):
        assert size % (strategy.dp * (found.micro_batch or 1)) == 0


@pytest.mark.parametrize(("words", "key"), [("auto pp=1", "shares"), ("auto pp=2", "layers")])
def test_ranks_on_several_kinds_of_chips_all_work(tmp_path: Path, words: str, key: str) -> None:
    chips = ["parallel.cluster=1xh100+1xa100-40", "run.device=auto", "train.precision=bf16"]
    model = ["model.preset=llama3.2-1b", "data.sequence_length=2048", "train.batch_schedule=[[0, 24], [10, 48]]"]
    found = plan_run(configured(tmp_path, *chips, *model, f"parallel.strategy={words}"), 2)
    strategy = Strategy.parse(found.strategy, 2)
    assert getattr(strategy, key) != "even"
    for size in (24, 48):
        strategy.micro_steps(size, found.micro_batch)


def test_adafactor_is_planned_with_what_it_can(tmp_path: Path) -> None:
    strategy = Strategy.parse(plan_run(configured(tmp_path, "train.optimizer=adafactor"), 2).strategy, 2)
    assert (strategy.zero, strategy.tp) == (0, 1)


def test_ranks_that_cannot_share_the_batch_stay_idle(tmp_path: Path) -> None:
    found = plan_ranks(configured(tmp_path, "parallel.strategy=auto pp=1 tp=1"), 3, 3)
    assert found.world == 2
    assert "1 of 3 ranks stay idle" in found.said[-1]


def test_nothing_fits_is_told_with_what_comes_nearest(tmp_path: Path) -> None:
    config = configured(
        tmp_path, "model.preset=llama3.1-70b", "parallel.cluster=2xl40s", "data.sequence_length=4096", "run.device=auto"
    )
    with pytest.raises(NothingFits, match=r"the nearest is '.*' with train.micro_batch=1, which needs .* GiB"):
        plan_run(config, 2)
    with pytest.raises(NothingFits):
        plan_ranks(config, 2, 2)


def test_constraints_that_leave_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="meets"):
        plan_run(configured(tmp_path, "parallel.strategy=auto tp=16"), 2)
    with pytest.raises(UserError, match="unknown key"):
        plan_run(configured(tmp_path, "parallel.strategy=auto banana=2"), 2)


def test_machines_that_nobody_knows_get_plain_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'Strange 9000, 81559'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    found = plan_run(configured(tmp_path, "run.device=auto"), 2)
    assert found.strategy == "dp=2"
    assert "Strange 9000" in found.said[0]
    with pytest.raises(UserError, match="Strange 9000"):
        plan_run(configured(tmp_path, "run.device=auto", "parallel.strategy=auto zero=3"), 2)


def write_plan(config: RunConfig, world: int, strategy: str) -> None:
    folder = RunFolder(config.run.dir)
    folder.path.mkdir(exist_ok=True)
    held = {"question": question_of(config, world), "strategy": strategy, "micro_batch": 1, "answer": None}
    folder.plan.write_text(json.dumps(held))


def test_a_run_that_goes_on_keeps_its_strategy(tmp_path: Path) -> None:
    config = configured(tmp_path)
    write_plan(config, 4, "dp=2 tp=2")
    kept = plan_run(config, 4)
    assert (kept.strategy, kept.micro_batch) == ("dp=2 tp=2", 1)
    assert plan_run(config, 2).strategy != "dp=2 tp=2"
    assert plan_run(configured(tmp_path, "data.sequence_length=16"), 4).answer is not None
    assert plan_run(configured(tmp_path, "run.fresh=true"), 4).answer is not None


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"question": 3}', "drop", "illegal"])
def test_a_plan_that_cannot_be_used_is_made_anew(tmp_path: Path, damage: str) -> None:
    config = configured(tmp_path)
    write_plan(config, 4, "dp=3" if damage == "illegal" else "dp=2 tp=2")
    plan = RunFolder(config.run.dir).plan
    if damage == "drop":
        held = json.loads(plan.read_text())
        del held["micro_batch"]
        plan.write_text(json.dumps(held))
    elif damage != "illegal":
        plan.write_text(damage)
    assert plan_run(config, 4).answer is not None


def test_fewer_ranks_keep_what_was_asked_as_long_as_it_fits(tmp_path: Path) -> None:
    config = configured(tmp_path, "parallel.strategy=zero=3")
    assert plan_ranks(config, 4, 4).strategy == "dp=4 zero=3"
    found = plan_ranks(config, 3, 3)
    assert (found.strategy, found.world) == ("dp=2 zero=3", 2)
    assert "1 of 3 ranks stay idle" in found.said[0]


def test_the_planner_is_asked_where_the_nearest_would_not_fit(tmp_path: Path) -> None:
    settings = ["model.preset=llama3.1-8b", "parallel.cluster=8xh100", "data.sequence_length=8192", "run.device=auto",
                "train.global_batch=64", "train.precision=bf16", "train.micro_batch=1"]  # fmt: skip
    config = configured(tmp_path, *settings, "parallel.strategy=zero=1 tp=4 pp=2")
    found = plan_ranks(config, 2, 2)
    assert found.said[0].startswith("dp=1 zero=1 pp=2 would need")
    assert found.strategy != "dp=1 zero=1 pp=2"
    assert found.answer is not None
    assert found.answer["best"]["verdict"] == "fits"


def test_what_no_rank_can_share_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        plan_ranks(configured(tmp_path, "parallel.strategy=zero=3", "train.micro_batch=16"), 2, 2)


def test_constraints_that_one_rank_cannot_meet_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="zero=3"):
        plan_run(configured(tmp_path, "parallel.strategy=auto zero=3"), 1)
