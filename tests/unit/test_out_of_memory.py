"""Errors that say that memory is out, and the smaller micro-batch that the next start takes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from meshwright.config import RunConfig, load_config
from meshwright.errors import ExitCode
from meshwright.parallel.world import World
from meshwright.trainer import Trainer
from meshwright.training.job import make_job
from meshwright.training.out_of_memory import (
    OutOfMemory,
    SmallerMicroBatch,
    _advice,
    explain,
    is_out_of_memory,
    micro_batch_of,
    next_micro_batch,
    with_micro_batch,
)


def error_of(work: object) -> BaseException:
    try:
        work()  # type: ignore[operator]
    except BaseException as error:
        return error
    raise AssertionError("nothing went wrong")


def test_real_errors_of_torch_and_numpy_are_recognised_and_others_are_not() -> None:
    assert is_out_of_memory(error_of(lambda: torch.empty(2**50)))
    assert is_out_of_memory(error_of(lambda: np.empty(2**50)))
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert not is_out_of_memory(error_of(lambda: torch.empty(2) @ torch.empty(3)))
    assert not is_out_of_memory(ValueError("can't allocate memory"))


@pytest.fixture
def config(tiny_run: list[str], tmp_path: Path) -> RunConfig:
    return load_config(None, [*tiny_run, f"run.dir={tmp_path / 'run'}", "observe.tensorboard=false"])


def change(config: RunConfig, **sections: dict[str, object]) -> RunConfig:
    held = config.model_dump()
    return RunConfig.model_validate(
        {name: held[name] | sections.get(name, {}) for name in held}  # type: ignore[operator]
    )


@pytest.mark.parametrize(
    ("batch", "micro", "strategy", "world", "now", "smaller"),
    [
        (8, None, "auto", 1, 8, 4),
        (8, 2, "auto", 2, 2, 1),
        (8, 1, "auto", 2, 1, None),
        (12, None, "auto", 2, 6, 3),
        (12, 3, "auto", 2, 3, 1),
        (14, None, "auto", 1, 14, 7),
        (32, None, "pp=2", 2, 4, 2),
    ],
)
def test_the_next_micro_batch_is_at_most_half_and_divides_the_batch(
    config: RunConfig, batch: int, micro: int | None, strategy: str, world: int, now: int, smaller: int | None
) -> None:
    wanted = change(config, train={"global_batch": batch, "micro_batch": micro}, parallel={"strategy": strategy})
    job = make_job(wanted, world)
    assert micro_batch_of(wanted, job) == now
    assert next_micro_batch(wanted, job) == smaller


def test_the_message_names_rank_phase_size_holdings_and_what_to_change(config: RunConfig) -> None:
    world = World()
    trainer = Trainer(config, world)
    world.pulse.step = 7
    world.pulse.enter("backward")
    error = explain(error_of(lambda: torch.empty(2**50)), config, world, trainer)
    assert isinstance(error, OutOfMemory)
    assert error.exit_code == ExitCode.OUT_OF_MEMORY
    text = str(error)
    for part in ("rank 0 of 1 on ", "step 7 (backward)", "4.1e+03 TiB", "parameters of 497 KiB", "passes of 8 x 32"):
        assert part in text, text
    assert "train.micro_batch=4 (or elastic.oom=retry" in text
    (event,) = [json.loads(line) for line in trainer.job.folder.events.read_text().splitlines()]
    assert (event["event"], event["rank"], event["step"], event["phase"]) == ("out_of_memory", 0, 7, "backward")


def test_retry_leaves_a_smaller_micro_batch_for_the_next_start_and_gives_way_to_a_new_setting(
    config: RunConfig,
) -> None:
    retry = change(config, elastic={"oom": "retry"})
    for expected in (4, 2, 1):
        world = World()
        trainer = Trainer(with_micro_batch(retry, 1), world)
        trainer.job.folder.write_config(retry)
        error = explain(error_of(lambda: torch.empty(2**50)), retry, world, trainer)
        assert isinstance(error, SmallerMicroBatch), error
        assert with_micro_batch(retry, 1).train.micro_batch == expected
        if trainer._lock is not None:
            trainer._lock.close()
    assert with_micro_batch(config, 1).train.micro_batch is None, "without elastic.oom=retry the setting counts"
    changed = change(retry, train={"micro_batch": 8})
    assert with_micro_batch(changed, 1).train.micro_batch == 8
    # At one sample there is nothing left to halve.
    last = explain(error_of(lambda: torch.empty(2**50)), retry, World(), Trainer(with_micro_batch(retry, 1), World()))
    assert isinstance(last, OutOfMemory)
    assert "train.micro_batch=" not in str(last)


def test_advice_is_what_the_strategy_can_take() -> None:
    def advice(strategy: str) -> str:
        return _advice(load_config(None, [f"parallel.strategy={strategy}"]), None)

    assert "add zero=3, which splits" in advice("dp=2")
    compressed = advice("dp=2 compress=topk:0.01")
    assert compressed.index("drop compress=topk:0.01") < compressed.index("then add zero=3")
    assert "add zero=3" not in advice("dp=2 zero=1")
