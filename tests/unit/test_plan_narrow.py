"""Plans with narrow weights and moments: what they take, what is advised, what a run file gets."""

from __future__ import annotations

import pytest

from meshwright.cli.main import main
from meshwright.config import RunConfig
from meshwright.errors import UserError
from meshwright.estimate.kept import Kept
from meshwright.planning.answer import plan
from meshwright.planning.corrections import subject_of
from meshwright.planning.emit import run_table
from meshwright.planning.explain import explain

ONE = {"model": "llama3.1-8b", "cluster": "1xh200", "sequence_length": 4096, "global_batch": 8}


def test_eight_billion_parameters_train_on_one_card_without_host_memory_only_when_states_are_narrow() -> None:
    wide = plan(**ONE, constraints="offload=none")
    assert wide.best is None
    narrow = plan(**ONE, constraints="offload=none", stored="bf16", moments="int8")
    assert narrow.best is not None
    terms = narrow.best.memory.stages[0]
    count = narrow.question.parameters
    assert terms.parameters == 2 * count
    assert terms.optimizer == pytest.approx((2 + 8 / 256) * count, rel=1e-6)


@pytest.mark.parametrize("constraints", ["offload=none", ""])
def test_where_nothing_fits_or_only_in_host_memory_narrow_states_are_advised(constraints: str) -> None:
    made = plan(**ONE, constraints=constraints)
    assert made.narrower is not None
    assert made.narrower.fits
    said = [line for line in explain(made) if line.startswith("with precision.moments=int8, dp=1")]
    assert len(said) == 1
    assert said[0].endswith("times as fast") == (made.best is not None)


def test_nothing_is_advised_where_all_fits_or_states_are_narrow_already() -> None:
    assert plan("llama3.2-1b", "1xh200", sequence_length=4096, global_batch=8).narrower is None
    assert plan("llama3.1-70b", "1xh200", constraints="offload=none", stored="bf16").narrower is None
    assert plan("llama3.1-405b", "1xh200", constraints="offload=none").narrower is None


def test_the_run_file_and_the_json_say_how_states_are_kept() -> None:
    made = plan(**ONE, stored="bf16", moments="int8")
    config = RunConfig.model_validate(run_table(made))
    assert (config.precision.stored, config.precision.moments) == ("bf16", "int8")
    facts = made.as_json()
    assert (facts["stored"], facts["moments"]) == ("bf16", "int8")
    assert "precision" not in run_table(plan("llama3.2-1b", "1xh200", global_batch=8))


def test_what_was_seen_of_float32_is_not_taken_for_narrow_states() -> None:
    wide, narrow = plan(**ONE), plan(**ONE, moments="int8")
    assert subject_of(wide.question) != subject_of(narrow.question)


@pytest.mark.parametrize(
    ("given", "said"), [({"stored": "int8"}, "--stored=int8"), ({"moments": "fp8"}, "--moments=fp8")]
)
def test_other_dtypes_are_refused_with_those_there_are(given: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=f"{said} is not known; use float32, bf16"):
        plan(**ONE, **given)


def test_the_command_takes_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["plan", "--model", "llama3.1-8b", "--cluster", "1xh200", "--global-batch", "8", "--stored", "bf16"]) == 0
    )
    assert "precision.stored=bf16" in capsys.readouterr().out


def test_bytes_of_an_update() -> None:
    assert Kept().updated == 28
    assert Kept("bf16", "bf16").updated == 14
    assert Kept("bf16", "int8").updated == pytest.approx(10, abs=0.1)
