"""`meshwright plan --try K`: the best candidates train on real ranks here, and the measured best is chosen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.cluster.calibration import Calibration, Speeds, write_calibration
from meshwright.cluster.cluster import cpu_ranks
from meshwright.errors import UserError
from meshwright.models.spec import ModelSpec
from meshwright.planning.answer import plan
from meshwright.planning.made import Plan
from meshwright.planning.tryout import try_out

SHAPE = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
SPEC = ModelSpec(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
)


def on_two_cores() -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])


def command(tmp_path: Path, *arguments: str, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    words = [sys.executable, "-m", "meshwright", "plan", "--model", str(tmp_path / "config.json"), "--cluster", "here"]
    words += ["--seq-len", "64", "--global-batch", "16", "--precision", "float32", *arguments]
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        preexec_fn=on_two_cores,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), **environment},
    )
    assert done.returncode == code, done.stdout[-500:] + done.stderr[-1500:]
    return done


def wrong_calibration() -> Calibration:
    """Of a machine on which sums over ranks take five seconds, and matrices are split for nothing."""
    collectives: dict[str, Any] = {
        kind: {"2": ((256.0, seconds), (1e6, 1.01 * seconds))}
        for kind, seconds in (
            ("all_reduce", 5.0), ("all_gather", 1e-6), ("reduce_scatter", 1e-6), ("all_to_all", 1e-6), ("send", 5.0),
        )
    }  # fmt: skip
    few = Speeds(
        ranks=2,
        products={"float32": ((64.0, 64.0, 64.0, 5e10),)},
        attention={"float32": ((64.0, 1e10),)},
        attention_backward={"float32": ((64.0, 1e10),)},
        memory=1e10,
        passes={"float32": 4.0},
        layer_s=(5e-4, 1e-3),
        experts_s=(1e-3, 2e-3),
        optimizer_s=1e-9,
        step_s=5e-3,
        micro_s=1e-3,
        collectives=collectives,
        axes={axis: {"2": 1e-6} for axis in ("shard", "tp", "sp", "ring", "ulysses", "ep")},
    )
    return Calibration("elsewhere", "cpu", "2.13.0", "2026-01-01T00:00:00+00:00", {2: few})


@pytest.mark.alone
def test_the_measured_best_is_chosen_where_the_prediction_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_calibration(wrong_calibration())
    out = tmp_path / "run.toml"
    constraints = ["zero=0", "pp=1", "cp=1", "recompute=none", "micro_batch=8"]
    done = command(tmp_path, "--try", "2", "--json", "--emit", "run", "--out", str(out), *constraints)
    found = json.loads(done.stdout)
    tried = found["tried"]
    assert [one["strategy"] for one in tried] == ["dp=1 tp=2", "dp=2"], "in the order of predicted times"
    for one in tried:
        assert one["failure"] is None
        assert one["measured"]["steps"] >= 3
        assert one["measured"]["peak_gib"] > 0.05
    assert tried[0]["predicted"]["step_time_s"] < tried[1]["predicted"]["step_time_s"]
    assert tried[0]["measured"]["step_time_s"] > tried[1]["measured"]["step_time_s"]
    assert found["best"]["strategy"] == found["candidates"][0]["strategy"] == "dp=2"
    assert found["best"]["origin"] == "measured"
    assert found["best"]["step_time_s"] == pytest.approx(tried[1]["measured"]["step_time_s"], rel=1e-3)
    assert "dp=1 tp=2, predicted to be the fastest, took" in " ".join(found["why"])
    assert tomllib.loads(out.read_text())["parallel"]["strategy"] == "dp=2"
    assert "trying 1 of 2" in done.stderr


def test_the_table_shows_predicted_and_measured_side_by_side(tmp_path: Path) -> None:
    shown = command(tmp_path, "--try", "1", "pp=1", "tp=1", "zero=0").stdout
    assert "tried here" in shown
    assert "measured best" in shown


def made() -> Plan:
    return plan(SPEC, cpu_ranks(2), sequence_length=64, global_batch=4, precision="float32", constraints="dp=2 zero=0")


def with_one_rank(first: Plan) -> Plan:
    """The same with the best on one rank as a second candidate."""
    alone = plan(SPEC, cpu_ranks(1), sequence_length=64, global_batch=4, precision="float32").best
    assert first.best is not None
    assert first.found is not None
    assert alone is not None
    found = replace(first.found, ranked=[first.best])
    return replace(first, candidates=(first.best, alone), found=found)


@pytest.mark.parametrize(
    ("kind", "words"), [("oom", "ran out of memory"), ("raise", "injected"), ("sigkill", "rank 1")]
)
def test_a_candidate_that_fails_is_told_and_passed_over(kind: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_FAULT", f"rank=1,step=2,phase=backward,kind={kind}")
    said: list[str] = []
    found = try_out(with_one_rank(made()), 2, say=said.append)
    failed = {str(one.candidate.strategy): one.failure for one in found.tried}
    assert failed["dp=1"] is None
    assert words in str(failed["dp=2"])
    assert found.best is not None
    assert str(found.best.strategy) == "dp=1"
    assert any("failed" in line for line in said)


def test_a_candidate_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_FAULT", "rank=1,step=1,phase=backward,kind=sleep:600")
    with pytest.raises(UserError, match=r"none of 1 candidates ran: dp=2: it was not done in time \(20 s"):
        try_out(made(), 1, limit_s=20.0)
    left = subprocess.run(["pgrep", "-f", "meshwright.planning.trial"], capture_output=True, text=True, check=False)
    own = [pid for pid in left.stdout.split() if os.getppid() and _parent_is_me(int(pid))]
    assert own == []


def _parent_is_me(pid: int) -> bool:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]) == os.getpid()
    except OSError:
        return False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cluster", "8xh100", "--try", "2"], "is not this machine; use --cluster here"),
        (["--cluster", "here", "--try", "0"], "--try=0 must be a number of candidates from 1"),
        (["--cluster", "here", "--try-limit", "5"], "add --try K"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, arguments: list[str], message: str) -> None:
    assert message in command(tmp_path, *arguments, code=2).stderr
