"""`meshwright plan` as people use it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from meshwright.config import load_config
from meshwright.observe.ledger import account
from meshwright.strategy import Strategy
from tests.conftest import CommandLine

SMALL = ["--model", "llama3.2-1b", "--cluster", "8xh100", "--seq-len", "2048", "--global-batch", "64"]


def plan(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "meshwright", "plan", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stdout[-500:] + done.stderr[-1500:]
    assert "Traceback" not in done.stderr
    return done


def as_json(*arguments: str, code: int = 0) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(plan(*arguments, "--json", code=code).stdout)
    return result


def test_json_has_what_the_documentation_says() -> None:
    found = as_json(*SMALL)
    for candidate in (found["best"], *found["candidates"]):
        assert {
            "strategy",
            "verdict",
            "memory",
            "step_time_s",
            "step_time",
            "tokens_per_s_per_gpu",
            "mfu",
        } <= candidate.keys()
        memory = candidate["memory"]
        assert {"peak_gib", "terms", "by_stage", "margin_gib", "host_gib", "peaks"} <= memory.keys()
        assert memory["peak_gib"] == pytest.approx(sum(memory["terms"].values()), abs=0.01)
        if candidate["step_time_s"] is not None:
            assert candidate["step_time_s"] == pytest.approx(sum(candidate["step_time"].values()), rel=1e-3)
        Strategy.parse(candidate["strategy"], 8)
    assert found["best"]["strategy"] == found["candidates"][0]["strategy"]
    assert found["best"]["verdict"] == "fits"
    assert found["why"]


def test_the_table_says_why() -> None:
    shown = plan("--model", "llama3.1-70b", "--cluster", "16xh100", "--seq-len", "4096", "--global-batch", "64").stdout
    assert "memory peaks at" in shown
    assert "schedule" in shown or "pp=" not in shown.splitlines()[3]
    assert "placement  tp=" in shown
    assert "slower" in shown or "does not fit" in shown


def test_a_seven_billion_model_prints_the_sum_of_its_states() -> None:
    why = as_json("--model", "llama2-7b", "--cluster", "8xa100")["why"][0]
    numbers = [float(one) for one in re.findall(r"([\d.]+) GB", why)]
    assert numbers == pytest.approx([27.0, 53.9, 27.0, 107.8], abs=0.05)


def test_a_run_file_that_train_takes(tmp_path: Path) -> None:
    out = tmp_path / "run.toml"
    plan(*SMALL, "--emit", "run", "--out", str(out))
    config = load_config(out)
    assert config.train.global_batch == 64
    strategy = Strategy.parse(config.parallel.strategy, 8)
    strategy.micro_steps(64, config.train.micro_batch)
    assert tomllib.loads(out.read_text())["model"]["preset"] == "llama3.2-1b"


@pytest.mark.parametrize(("form", "file"), [("run", "run.toml"), ("deepspeed", "ds_config.json")])
def test_a_file_that_nobody_has_named_is_not_replaced(
    meshwright: CommandLine, tmp_path: Path, form: str, file: str
) -> None:
    (tmp_path / file).write_text("mine")
    asked = ("plan", *SMALL, "--strategy", "zero=3", "--emit", form)
    refused = meshwright(*asked)
    assert refused.returncode == 2
    assert f"--out {file} replaces it" in refused.stderr
    assert (tmp_path / file).read_text() == "mine"
    assert meshwright(*asked, "--out", file).returncode == 0
    assert (tmp_path / file).read_text() != "mine"


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    plan("--model", "llama3.1-8b", "--cluster", "16xa100-40", "--global-batch", "64", "pp=4", "--html", str(page))
    text = page.read_text()
    assert "<svg" in text
    assert not re.search(r"(src|href)\s*=|https?://|@import", text)


def test_a_given_strategy_is_estimated_and_told_what_would_make_it_fit() -> None:
    found = as_json(
        "--model", "llama3.1-8b", "--cluster", "8xh100", "--global-batch", "64", "--strategy", "dp=8", code=1
    )
    assert found["best"] is None
    assert found["candidates"][0]["verdict"] == "does not fit"
    assert found["runners_up"][0]["change_to_fit"]


def test_inverse_questions() -> None:
    asked = as_json(*SMALL, "--ask", "largest-micro-batch")["asked"]
    assert asked["answer"] >= 8
    fewest = as_json("--model", "llama3.1-8b", "--cluster", "16xh100", "--global-batch", "64", "--ask", "fewest-gpus")
    assert 1 <= fewest["asked"]["answer"] <= 4
    longest = as_json(
        "--model", "llama3.2-1b", "--cluster", "2xh100", "--global-batch", "16", "--ask", "longest-sequence"
    )
    assert longest["asked"]["answer"] >= 8192
    largest = as_json("--cluster", "8xh100", "--ask", "largest-model", "--seq-len", "2048", "--global-batch", "64")
    assert largest["asked"]["answer"]


def test_an_inverse_question_that_nothing_answers() -> None:
    found = as_json("--model", "llama3.1-405b", "--cluster", "8xh100", "--ask", "fewest-gpus", code=1)
    assert found["asked"]["answer"] is None
    assert "nothing fits" in found["asked"]["text"]


def test_the_fewest_chips_of_a_machine_need_not_be_a_power_of_two() -> None:
    asked = ["--model", "qwen2.5-32b", "--cluster", "8xh200", "--global-batch", "840", "--ask", "fewest-gpus"]
    assert as_json(*asked)["asked"]["answer"] == 3


def test_the_longest_sequence_is_that_of_the_model() -> None:
    asked = as_json("--model", "gpt2", "--cluster", "1xh100", "--global-batch", "8", "--ask", "longest-sequence")
    assert asked["asked"]["answer"] == 1024
    assert "positions" in asked["asked"]["text"]


def test_the_largest_micro_batch_has_no_bound_but_memory() -> None:
    asked = ["--model", "tiny", "--cluster", "1xh100", "--seq-len", "128", "--global-batch", "1024"]
    assert as_json(*asked, "--ask", "largest-micro-batch")["asked"]["answer"] == 1024


def test_sequences_beyond_the_model_are_told() -> None:
    found = as_json("--model", "gpt2", "--cluster", "1xh100", "--seq-len", "2048", "--global-batch", "8")
    assert any("1024 positions" in line for line in found["why"])


def test_a_micro_batch_is_a_constraint_of_the_search() -> None:
    found = as_json("--model", "tiny", "--cluster", "2xh100", "--global-batch", "12", "--micro-batch", "3")
    assert found["best"]["micro_batch"] == 3


def test_auto_is_searched() -> None:
    found = as_json(*SMALL, "--strategy", "auto tp=2")
    assert Strategy.parse(found["best"]["strategy"], 8).tp == 2
    assert found["searched"]["bounded"] > 0


def test_a_rehearsal_counts_what_was_planned() -> None:
    found = as_json(*SMALL, "--strategy", "dp=2 zero=3 tp=2 pp=2", "--micro-batch", "1", "--rehearse", "5")["rehearsal"]
    assert found["counted_parameters"] == found["exact_parameters"]
    assert found["counted_optimizer"] == found["exact_optimizer"]
    assert found["planned_optimizer"] == pytest.approx(found["exact_optimizer"], rel=0.01)


def test_days_cost_and_interruptions() -> None:
    found = as_json(*SMALL, "--tokens", "300B", "--price", "2", "--spot", "4")
    best = found["best"]
    assert best["cost"] == pytest.approx(best["days"] * 24 * 2 * 8, rel=1e-3)
    spot = found["spot"]
    assert spot["best_slower"] <= spot["slower"] + 1e-9
    assert spot["days"] * (1 - spot["slower"]) == pytest.approx(found["best"]["days"], rel=1e-3)
    assert spot["cost"] == pytest.approx(spot["days"] * 24 * 2 * found["best"]["gpus"], rel=1e-6)


def test_the_page_and_the_terminal_say_all_that_json_says(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    asked = [*SMALL, "--tokens", "300B", "--price", "2", "--spot", "4", "--ask", "fewest-gpus", "--html", str(path)]
    shown, written = plan(*asked).stdout, path.read_text()
    for text in (shown, written):
        assert "fewest GPUs on which it fits" in text
        assert "interruptions a day" in text
        assert re.search(r"initialisation \d.*forward and backward \d.*optimizer step \d.*checkpoint \d", text)
    assert "<th>days</th><th>cost</th>" in written


def test_every_pipeline_stage_has_its_margin_and_verdict() -> None:
    found = as_json("--model", "llama3.1-70b", "--cluster", "8xh100", "--global-batch", "16", "--strategy",
                    "dp=1 pp=8", "--micro-batch", "1", code=1)["candidates"][0]  # fmt: skip
    stages = found["memory"]["by_stage"]
    assert len(stages) == 8
    for stage in stages:
        assert stage["margin_gib"] == pytest.approx(stage["capacity_gib"] - stage["peak_gib"], abs=0.01)
        assert (stage["verdict"] == "does not fit") >= (stage["margin_gib"] < -10)
    assert stages[found["memory"]["fullest_stage"]]["verdict"] == found["verdict"]


def test_constraints_are_kept() -> None:
    found = as_json("--model", "llama3.1-8b", "--cluster", "8xh100", "--global-batch", "64", "tp=4", "zero<=1")
    for candidate in found["candidates"]:
        strategy = Strategy.parse(candidate["strategy"], 8)
        assert strategy.tp == 4
        assert strategy.zero <= 1


def test_a_hugging_face_config_is_a_model(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 5632,
        "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu",
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert as_json("--model", str(path), "--cluster", "4xa100", "--global-batch", "64")["best"]["verdict"] == "fits"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "llama3.1-8b", "--cluster", "8xh999"], "unknown chip"),
        (["--model", "llama9", "--cluster", "8xh100"], "unknown model preset"),
        (["--model", "llama3.1-8b", "--cluster", "8xh100", "tp<=2", "tp>=4"], "contradict"),
        (["--model", "llama3.1-8b", "--cluster", "8xh100", "--global-batch", "0"], "whole numbers from 1"),
        (["--model", "llama3.1-8b", "--cluster", "8xv100"], "lacks it"),
        (
            ["--model", "llama3.1-8b", "--cluster", "8xh100+8xv100"],
            "NVIDIA V100 SXM 32 GB lacks it; use fp16 or float32",
        ),
        (["--model", "llama3.1-8b", "--cluster", "8xh100", "shares!=even"], "are of one kind"),
        (["--model", "tiny", "--cluster", "1xh100+1xa100", "pp=2", "layers=9+9"], "layers=9+9 is not searched"),
        (["--model", "llama3.1-8b", "--cluster", "8xh100", "--tokens", "many"], "number of tokens"),
        (["--model", "llama3.1-8b", "--cluster", "8xh100", "--objective", "luck"], "not one of"),
        (["--model", "llama3.1-8b", "--cluster", "8xh100", "--out", "x"], "--emit"),
        (["--cluster", "8xh100"], "--model is missing"),
        (["--model", "llama3.1-8b", "--cluster", "1xh100", "zero=3"], "no strategy for 1 GPUs"),
        (["--model", "", "--cluster", "8xh100"], "--model is empty"),
        ([*SMALL, "--micro-batch", "-1"], "whole numbers from 1"),
        ([*SMALL, "--strategy", "dp=8", "--micro-batch", "0"], "whole numbers from 1"),
        ([*SMALL, "--micro-batch", "7"], "meets micro_batch=7"),
        ([*SMALL, "--strategy", "dp=8", "tp=2", "zero<=1"], "does not meet tp=2;"),
        ([*SMALL, "--strategy", "dp=8", "--ask", "fewest-gpus"], "as constraints"),
        (["--model", "tiny", "--cluster", "1xh100", "--seq-len", "0"], "whole numbers from 1"),
        (["--model", "tiny", "--cluster", "1xh100", "--seq-len", "-4"], "whole numbers from 1"),
        (["--model", "gpt2", "--cluster", "1xh100", "--seq-len", "2048", "--emit", "run"], "1024 positions"),
        (["--model", "tiny", "--cluster", "/tmp"], "cannot be read"),
        (["--model", "tiny", "--cluster", "99999999999xh100"], "more than 1,000,000 chips"),
        (["--model", "tiny", "--cluster", "1xh100", "--html", "/tmp"], "is a folder"),
        (["--model", "tiny", "--cluster", "1xh100", "--html", "/nowhere/a.html"], "there is no folder /nowhere"),
        (["--model", "tiny", "--cluster", "1xh100", "--emit", "run", "--out", "/tmp"], "is a folder"),
        (["--model", "tiny", "--cluster", "1xh100", "--spot", "inf"], "--spot=inf"),
        (["--model", "tiny", "--cluster", "1xh100", "--spot", "nan"], "--spot=nan"),
        (["--model", "tiny", "--cluster", "1xh100", "--spot", "2", "--interval", "nan"], "--interval=nan"),
        (["--model", "tiny", "--cluster", "1xh100", "--price", "nan"], "--price=nan"),
        (["--model", "tiny", "--cluster", "1xh100", "--price", "inf"], "--price=inf"),
        ([*SMALL, "schedule=banana"], "unknown word 'banana'; known: gpipe, 1f1b, interleaved:N, zero-bubble, zbv"),
        ([*SMALL, "recompute=banana"], "unknown word 'banana'; known: none, full, selective, first:N"),
        ([*SMALL, "sp=maybe"], "unknown word 'maybe'; known: on, off"),
        ([*SMALL, "schedule=gpipe"], "schedule=gpipe is not searched"),
        ([*SMALL, "layers=balanced"], "layers=balanced is not searched"),
        ([*SMALL, "cp=3"], "cp=3 is not searched"),
        ([*SMALL, "recompute=first:3"], "recompute=first:3 is not searched"),
    ],
)
def test_mistakes_are_told_with_exit_code_2(arguments: list[str], message: str) -> None:
    assert message in plan(*arguments, code=2).stderr


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('chip = "h100"\nnodes = 2\ndomain = 2.5', "domain=2.5 must be a whole number"),
        ('chip = "h100"\nnodes = 900000', "are not planned for"),
        ("nodes = 1\n[chip]\nmemory_mib = 80000\nmemory_bandwidth = 3000\nlink = 450\nnic = 50\n"
         "tflops = { banana = 1 }", "unknown dtype 'banana'"),
    ],
)  # fmt: skip
def test_a_wrong_cluster_file_is_told(tmp_path: Path, lines: str, message: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(lines)
    assert message in plan("--model", "tiny", "--cluster", str(path), code=2).stderr


def hugging_face(folder: Path, layers: int) -> str:
    folder.mkdir(parents=True)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_folder_with_any_name_is_shown(tmp_path: Path) -> None:
    shown = plan("--model", hugging_face(tmp_path / "m[/red]", 4), "--cluster", "1xh100", "--global-batch", "8").stdout
    assert "m[/red]" in shown


def test_a_model_with_too_many_layers_is_refused(tmp_path: Path) -> None:
    path = hugging_face(tmp_path / "deep", 1_000_000_000)
    assert "num_hidden_layers" in plan("--model", path, "--cluster", "1xh100", code=2).stderr


def test_more_interruptions_than_time_are_told() -> None:
    assert "does not get on" in as_json(*SMALL, "--spot", "2000")["spot"]["text"]
    assert "does not get on" in as_json(*SMALL, "--spot", "4", "--interval", "0.01")["spot"]["text"]


def test_the_exit_code_is_that_of_the_question() -> None:
    asked = as_json("--cluster", "1xcpu", "--ask", "largest-model", "--seq-len", "128", "--global-batch", "1")
    assert asked["asked"]["answer"]


def test_a_model_that_fits_nowhere_names_the_nearest() -> None:
    shown = plan("--model", "llama3.1-405b", "--cluster", "8xrtx4090", code=1).stdout
    assert "nothing fits" in shown
    assert "nearest is" in shown


def test_a_plan_for_two_kinds_of_chips_shows_the_ways_and_who_is_where(tmp_path: Path) -> None:
    asked = ["--model", "llama3.2-1b", "--cluster", "8xh100+8xa100", "--seq-len", "2048", "--global-batch", "256"]
    page = tmp_path / "plan.html"
    shown = plan(*asked, "--html", str(page)).stdout
    for words in (
        "only 8 x NVIDIA H100",
        "at the pace of the slowest",
        "a pipeline over the groups",
        "shares of every",
    ):
        assert words in shown
        assert words in page.read_text()
    assert "the choice" in shown
    found = as_json(*asked, "zero=1", "dp=16", "shares!=even")
    assert [group["chip"] for group in found["cluster"]["groups"]] == ["h100", "a100"]
    best = found["best"]
    assert [one["data_ranks"] for one in best["placement"]] == [list(range(8)), list(range(8, 16))]
    fast, slow = (one["shares"][0] for one in best["placement"])
    assert fast > slow
    assert [way["strategy"] is None for way in found["ways"]] == [True, True, True, True, False]
    staged = as_json(*asked, "pp=2", "dp=8", "layers!=even", "shares=even")["best"]
    assert [one["pipeline_ranks"] for one in staged["placement"]] == [[0], [1]]
    assert staged["placement"][0]["layers"][0] > staged["placement"][1]["layers"][0]
    assert len(staged["memory"]["by_stage"]) == 2


@pytest.mark.parametrize(
    ("constraints", "words"), [(["dp=2", "shares!=even"], "shares="), (["pp=2", "layers!=even"], "layers=")]
)
def test_a_plan_for_two_kinds_of_chips_is_trained_as_it_is(
    constraints: list[str], words: str, tiny_run: list[str], tmp_path: Path
) -> None:
    """Two ranks here stand for the two chips: what was planned runs, and every sample is fed once."""
    cluster, out = tmp_path / "cluster.toml", tmp_path / "run.toml"
    slow, other = "memory_mib = 8192\nlink = 10\nnic = 10\nunits = 1\n", "[[group]]\nnodes = 1\ngpus_per_node = 1\n"
    fast = f"{other}[group.chip]\nname = 'fast'\nmemory_bandwidth = 20\ntflops = {{ float32 = 0.0003 }}\n{slow}"
    cluster.write_text(fast + fast.replace("fast", "slow").replace("20", "7").replace("0.0003", "0.0001"))
    asked = ["--model", "tiny", "--cluster", str(cluster), "--seq-len", "32", "--global-batch", "24"]
    plan(*asked, "--precision", "float32", "--emit", "run", "--out", str(out), *constraints)
    assert words in tomllib.loads(out.read_text())["parallel"]["strategy"]
    assert "# Ranks 1 on slow: " in out.read_text()
    data = next(setting for setting in tiny_run if setting.startswith("data.path="))
    settings = [data, "train.steps=2", "run.device=cpu", f"run.dir={tmp_path / 'run'}", "observe.ledger=true"]
    command = [sys.executable, "-m", "meshwright", "train", str(out), *settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-1500:]
    found = account(tmp_path / "run" / "ledger.jsonl")
    assert (found.exact, found.fed) == (True, 48)
