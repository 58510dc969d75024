"""The parts of elastic training that need no ranks: budgets, causes, heartbeats, locks, endpoints."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest

from meshwright.elastic import failure as failure_module
from meshwright.elastic import rendezvous
from meshwright.elastic.budget import Budget
from meshwright.elastic.failure import Failure, describe_death, first_cause
from meshwright.elastic.rendezvous import Endpoint, JsonState, interface_to, settings_of
from meshwright.elastic.supervisor import _sweep
from meshwright.errors import ConfigError, ExitCode
from meshwright.lock import Fence, LockedError, read_holder, take_lock
from meshwright.parallel.torch_releases import TCPStore
from meshwright.torch_private import RendezvousMember
from meshwright.training.run_folder import RunFolder


def failed(step: int, rank: int = 0, when: float = 0.0, consequence: bool = False) -> Failure:
    return Failure(rank, 2, "here", "broke", "it broke", step=step, time=when, consequence=consequence)


@pytest.mark.parametrize(
    ("steps", "code"),
    [
        ([], None),
        ([7, 7], None),
        ([7, 7, 7], ExitCode.NO_PROGRESS),
        ([7, 7, 8, 7, 7], None),
        ([7, 7, 8, 8, 8], ExitCode.NO_PROGRESS),
        ([1, 2, 3, 4, 5, 6], ExitCode.FAILED),
    ],
)
def test_budget(steps: list[int], code: int | None) -> None:
    refusal = Budget(max_restarts=5, same_step_failures=3).refusal([failed(step) for step in steps])
    assert (refusal.exit_code if refusal is not None else None) == code


def test_lost_machines_are_not_the_steps_fault() -> None:
    lost = [failed(7, rank=-1)] * 3
    assert Budget(5, 3).refusal(lost) is None
    assert Budget(2, 3).refusal(lost) is not None


def test_consequences_come_after_causes() -> None:
    early, late = failed(3, rank=0, when=1.0, consequence=True), failed(3, rank=1, when=2.0)
    assert first_cause([early, late]) is late
    assert first_cause([early]) is early


def test_kernel_that_killed_for_memory_is_named() -> None:
    assert "out-of-memory killer was at work" in describe_death(1, 2, signal.SIGKILL, out_of_memory=True)
    assert "may have run out of memory" in describe_death(1, 2, signal.SIGKILL, out_of_memory=False)
    assert describe_death(1, 2, signal.SIGSEGV, out_of_memory=True) == "rank 1 of 2 was ended by SIGSEGV"
    assert failure_module.kills_for_memory() >= 0


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("node-1:123", "node-1", 123), ("10.0.0.5", "10.0.0.5", 29400), ("[::1]:5", "::1", 5), ("[::1]", "::1", 29400)],
)
def test_endpoint(text: str, host: str, port: int) -> None:
    assert Endpoint.parse(text, "--listen") == Endpoint(host, port)


@pytest.mark.parametrize("text", [":1", "host:port", "host:99999", ""])
def test_endpoint_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--listen"):
        Endpoint.parse(text, "--listen")


def test_interface_to_this_machine_is_loopback() -> None:
    assert interface_to(Endpoint("127.0.0.1", 1)) == "lo"


@pytest.mark.parametrize("host", ["0.0.0.0", "0", "::", "::ffff:0.0.0.0"])
def test_no_store_on_every_network(host: str) -> None:
    with pytest.raises(ConfigError, match="every network"):
        rendezvous.listen(Endpoint(host, 0))


@pytest.fixture
def store() -> TCPStore:
    return rendezvous.serve(rendezvous.listen(Endpoint("127.0.0.1", 0)), "run")


def joined(store: TCPStore, host: str) -> tuple[JsonState, object]:
    """A machine that has joined the meeting."""
    state = JsonState(store, "meeting", settings_of("run", 1, 4, 10), cache_s=0)
    node = RendezvousMember.node_of(host, 1, 0)
    state.sync()
    beat(state, node, 0.0)
    state.state.participants[node] = 0
    state.mark_dirty()
    assert state.sync()
    return state, node


def beat(state: JsonState, node: object, skew_s: float) -> None:
    """A heartbeat by a clock that is wrong by so much."""
    state.state.last_heartbeats[node] = rendezvous.datetime.now(rendezvous.UTC) + timedelta(seconds=skew_s)
    state.mark_dirty()


@pytest.mark.parametrize("skew_s", [-86400.0, 0.0, 86400.0])
def test_clock_of_another_machine_decides_nothing(
    store: TCPStore, skew_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, _ = joined(store, "here")
    there, node = joined(store, "there")
    now = time.monotonic()
    for second in range(20):
        monkeypatch.setattr(time, "monotonic", lambda second=second: now + second)
        # A machine's own heartbeat is anew by its own clock, whatever that says.
        there.sync()
        beat(there, node, skew_s + second)
        assert there.sync()
        here.sync()
        assert node in here.state.participants
    for second in range(20, 30):
        monkeypatch.setattr(time, "monotonic", lambda second=second: now + second)
        here.sync()
    assert node not in here.state.participants, "one that says nothing more is gone, whatever its clock says"


def test_state_of_a_meeting_is_plain_text(store: TCPStore) -> None:
    joined(store, "here")
    text = store.get("meeting").decode()
    assert text.startswith('{"round": 0')
    assert '["here", 1, 0, 0]' in text


def test_change_that_somebody_else_was_faster_with_is_not_written(store: TCPStore) -> None:
    here, mine = joined(store, "here")
    there, _ = joined(store, "there")
    beat(here, mine, 0.0)
    said = here.state.last_heartbeats[mine]
    assert here.sync() is False, "it has not seen what the other wrote"
    assert len(here.state.participants) == 2
    assert here.state.last_heartbeats[mine] < said, "a heartbeat that was not written must not look as if it were"
    there.remove(mine)
    here.sync()
    assert mine not in here.state.participants


def test_lock_says_who_holds_it_and_refuses_others(tmp_path: Path) -> None:
    lock = take_lock(tmp_path / ".lock", Fence("mine"))
    lock.write(Fence("mine", generation=4, host="other-host-name"))
    lock.write(Fence("mine", generation=5))
    holder = read_holder(tmp_path / ".lock")
    assert holder is not None
    assert (holder.launch, holder.generation, holder.pid) == ("mine", 5, os.getpid())
    with pytest.raises(LockedError, match=rf"process {os.getpid()} on .* \(generation 5\)"):
        take_lock(tmp_path / ".lock", Fence("other"))
    lock.close()
    take_lock(tmp_path / ".lock", Fence("other")).close()


def test_later_generation_takes_the_lock_from_one_that_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.lock.OWN_WAIT_S", 0.2)
    old, new = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    zombie = old.hold(False, Fence("launch", 0, host="frozen"))
    old.check_generation()
    lock = new.hold(False, Fence("launch", 1))
    new.check_generation()
    assert lock.is_current
    assert not zombie.is_current
    with pytest.raises(LockedError, match="generation 1.*was replaced and writes nothing more"):
        old.check_generation()


def test_what_killed_supervisors_left_is_swept_away(tmp_path: Path) -> None:
    for name, pid in (("meshwright-dead", 2**22 - 1), ("meshwright-alive", os.getpid()), ("other", 2**22 - 1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "owner").write_text(str(pid))
    (tmp_path / "meshwright-unknown").mkdir()
    _sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["meshwright-alive", "meshwright-unknown", "other"]
