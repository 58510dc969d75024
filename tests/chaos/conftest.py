"""The undisturbed run that broken ones are compared with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.runs import start

SETTINGS = [
    "model.preset=tiny",
    "model.spec.num_hidden_layers=2",
    "data.sequence_length=32",
    "train.global_batch=8",
    "train.lr=1e-2",
    "train.eval_sequences=8",
    "observe.tensorboard=false",
    # Plain copies, whatever the planner would choose: what is compared was computed by them.
    "parallel.strategy=zero=0",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real trainings take seconds each: `make test-fast` leaves them out."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def settings(corpus: Path) -> list[str]:
    """A run that takes a second or two."""
    return [*SETTINGS, f"data.path={corpus}"]


@pytest.fixture(scope="session")
def undisturbed(settings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on two ranks that nobody disturbed."""
    training = start(tmp_path_factory.mktemp("undisturbed"), settings)
    ended = training.wait()
    assert ended.code == 0, ended.err
    return training.folder
