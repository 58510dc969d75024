"""Numbers that go wrong in real runs: what is skipped, undone, left out, named; and a ledger that proves the rest."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from meshwright.data.prepare import prepare
from meshwright.data.shards import Corpus
from meshwright.errors import ExitCode
from meshwright.observe.ledger import account
from tests.chaos.runs import (
    EVERY,
    STEPS,
    Ended,
    assert_near_run,
    assert_same_run,
    checkpoints,
    events,
    fault_time,
    metrics,
    print_cost,
    report,
    start,
)

LEDGER = "observe.ledger=true"


def run(folder: Path, settings: list[str], *options: str, code: int = ExitCode.DONE, **how: object) -> Ended:
    """Train to the end, which must be the expected one."""
    ended = start(folder, settings, LEDGER, *options, **how).wait()  # type: ignore[arg-type]
    assert ended.code == code, ended.err
    assert "Traceback" not in ended.err
    return ended


def say(case: str, folder: Path, kind: str, *, fault: str) -> None:
    """Print what a fault of that kind, which led to an event, cost."""
    found, undone = events(folder, kind)[0], events(folder, "rollback")
    lost = sum(event["step"] - event["to"] for event in undone)
    back = undone[0]["time"] - found["time"] if undone else None
    note = "" if undone else f"no restart: step {found['step']} is left out"
    print_cost(case, found["time"] - fault_time(folder, fault), back, lost, note)


def finite(folder: Path) -> bool:
    """Whether no checkpoint of a run holds anything that is no number."""
    files = list((folder / "checkpoints").glob("step-*/*.safetensors"))
    assert files
    return all(np.isfinite(value).all() for file in files for value in load_file(file).values())


@pytest.mark.parametrize("nproc", [2, 1])
def test_a_loss_that_is_nan_on_one_rank_is_skipped_by_all_and_its_samples_are_named(
    settings: list[str], tmp_path: Path, nproc: int
) -> None:
    rank = nproc - 1
    ended = run(tmp_path, settings, nproc=nproc, fault=f"rank={rank},step=12,phase=forward,kind=nan")
    folder = tmp_path / "run"
    (event,) = events(folder, "nonfinite")
    assert (event["step"], event["skipped"]) == (12, 1)
    own = [92, 96] if nproc == 2 else [88, 96]
    assert [(one["rank"], one["samples"]) for one in event["ranks"]] == [(rank, [own])]
    assert f"step 12: the loss is not a number (rank {rank} on " in ended.err
    assert f"samples {own[0]} to 95" in ended.err
    line = metrics(folder)[11]
    assert (line["step"], line["skipped"], line["nonfinite"], line["skipped_steps"]) == (12, 1, 1, 1)
    assert "loss" not in line
    assert all("skipped" not in line for line in metrics(folder) if line["step"] != 12)
    found = account(folder)
    assert found.exact, found.problems
    assert found.skipped_steps == {12: "nonfinite"}
    assert not events(folder, "rollback")
    assert finite(folder)
    say("27: NaN loss on one rank", folder, "nonfinite", fault="nan")


def test_gradients_that_are_nan_after_they_were_summed_are_skipped_by_all(settings: list[str], tmp_path: Path) -> None:
    ended = run(tmp_path, settings, fault="rank=1,step=12,phase=reduce,kind=nan")
    folder = tmp_path / "run"
    (event,) = events(folder, "nonfinite")
    assert (event["step"], event["ranks"], event["gradients_of_ranks"]) == (12, [], [1])
    assert math.isfinite(event["loss"])
    assert "gradients are not numbers on rank 1 alone" in ended.err
    assert account(folder).skipped_steps == {12: "nonfinite"}
    assert finite(folder)
    say("28: NaN gradient after the sum", folder, "nonfinite", fault="nan")


BAD = "".join(f"rank=1,step={step},phase=forward,kind=nan;" for step in (12, 13, 14))


def test_after_some_bad_steps_the_run_goes_back_and_leaves_their_samples_out(
    settings: list[str], tmp_path: Path
) -> None:
    ended = run(tmp_path, settings, fault=BAD)
    folder = tmp_path / "run"
    (event,) = events(folder, "rollback")
    assert (event["step"], event["to"], event["skipped"]) == (14, 10, [[88, 112]])
    assert "back from step 14 to the checkpoint of step 10 without the samples 88 to 111" in ended.err
    found = account(folder)
    assert found.exact, found.problems
    assert found.skipped_windows == [(88, 112)]
    assert found.steps[11] == [(80, 88)]
    assert found.steps[12] == [(112, 120)]
    assert [line["step"] for line in metrics(folder)] == list(range(1, STEPS + 1))
    assert finite(folder)
    say("27: NaN loss in three steps", folder, "nonfinite", fault="nan")


def test_a_run_that_went_back_and_is_killed_later_goes_on_without_the_same_samples(
    settings: list[str], tmp_path: Path
) -> None:
    run(tmp_path, settings, fault=BAD, name="whole")
    whole = tmp_path / "whole"
    run(tmp_path, settings, fault=f"{BAD}rank=0,step=17,phase=optimizer,kind=sigkill")
    folder = tmp_path / "run"
    assert len(events(folder, "failed")) == len(events(folder, "rollback")) == 1
    found = account(folder)
    assert found.exact, found.problems
    assert found.steps == account(whole).steps
    assert_same_run(folder, whole)


@pytest.mark.slow_chaos
def test_a_checkpoint_alone_knows_what_was_left_out(settings: list[str], tmp_path: Path) -> None:
    options = ["train.schedule=constant"]
    run(tmp_path, settings, *options, fault=BAD, name="whole")
    run(tmp_path, settings, *options, "train.steps=17", fault=BAD)
    (tmp_path / "run/rollbacks.json").unlink()
    run(tmp_path, settings, *options)
    found = account(tmp_path / "run")
    assert found.exact, found.problems
    assert found.steps == account(tmp_path / "whole").steps
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_crash_right_after_going_back_does_not_forget_what_was_left_out(settings: list[str], tmp_path: Path) -> None:
    training = start(tmp_path, settings, LEDGER, fault=BAD + "step=12,phase=hooks,kind=sleep:0;")
    training.wait_for_event("rollback")
    for process in training.ranks().values():
        process.kill()
    ended = training.wait()
    assert ended.code == ExitCode.DONE, ended.err
    run(tmp_path, settings, fault=BAD, name="whole")
    found = account(training.folder)
    assert found.exact, found.problems
    assert found.steps == account(tmp_path / "whole").steps
    assert_same_run(training.folder, tmp_path / "whole")


def test_a_ledger_that_a_crash_kept_from_its_line_of_a_rollback_gets_it_at_the_next_start(
    settings: list[str], tmp_path: Path
) -> None:
    run(tmp_path, settings, "train.steps=18", fault=BAD)
    ledger = tmp_path / "run/ledger.jsonl"
    before = account(ledger)
    assert before.exact, before.problems
    assert before.skipped_windows
    kept = [line for line in ledger.read_text().splitlines(keepends=True) if "rollback" not in line]
    ledger.write_text("".join(kept))
    assert not account(ledger).exact
    run(tmp_path, settings)
    found = account(ledger)
    assert found.exact, found.problems
    assert found.skipped_windows == before.skipped_windows
    assert ledger.read_text().count("rollback") == 1


@pytest.mark.slow_chaos
def test_everything_since_the_checkpoint_can_be_left_out(settings: list[str], tmp_path: Path) -> None:
    run(tmp_path, settings, "elastic.skip_window=checkpoint", "elastic.bad_steps=1", fault=BAD.split(";")[1])
    found = account(tmp_path / "run")
    assert found.exact, found.problems
    assert found.skipped_windows == [(80, 104)]
    assert found.steps[11] == [(104, 112)]


def test_a_stop_in_the_step_that_must_be_undone_does_not_save_it(settings: list[str], tmp_path: Path) -> None:
    faults = "rank=1,step=12,phase=forward,kind=nan;rank=0,step=11,phase=forward,kind=sigterm"
    options = ("elastic.bad_steps=1", LEDGER)
    training = start(tmp_path, settings, *options, fault=faults)
    assert training.wait().code == ExitCode.PREEMPTED
    assert checkpoints(training.folder)[-1] == 10
    again = start(tmp_path, settings, *options)
    assert again.wait().code == ExitCode.DONE
    assert [line["step"] for line in metrics(again.folder)] == list(range(1, STEPS + 1))
    assert not account(again.folder).problems


def test_rollbacks_that_do_not_help_end_the_run_as_diverged(settings: list[str], tmp_path: Path) -> None:
    always = "rank=1,step=8,phase=forward,kind=nan,times=99"
    bounds = ["elastic.bad_steps=1", "elastic.rollbacks=2"]
    ended = run(tmp_path, settings, *bounds, fault=always, code=ExitCode.DIVERGED)
    folder = tmp_path / "run"
    assert [event["to"] for event in events(folder, "rollback")] == [5, 5]
    assert "2 rollbacks did not get past step 8" in ended.err
    assert "Lower train.lr" in ended.err
    assert checkpoints(folder) == [5]
    assert finite(folder)


def test_bad_steps_before_the_first_checkpoint_have_no_way_back(settings: list[str], tmp_path: Path) -> None:
    fault = "rank=0,phase=forward,kind=nan,times=99"
    ended = run(tmp_path, settings, fault=fault, code=ExitCode.DIVERGED)
    assert "there is no checkpoint from before step 1 to go back to" in ended.err


@pytest.mark.slow_chaos
def test_the_run_can_be_told_to_stop_at_the_first_bad_step(settings: list[str], tmp_path: Path) -> None:
    fault = "rank=1,step=12,phase=forward,kind=nan"
    ended = run(tmp_path, settings, "elastic.nonfinite=stop", fault=fault, code=ExitCode.DIVERGED)
    assert "training has diverged" in ended.err
    assert checkpoints(tmp_path / "run") == [5, 10]


def test_weights_that_are_no_numbers_are_never_saved(settings: list[str], tmp_path: Path) -> None:
    options = ["train.lr=1e38", "train.grad_clip=0", "train.steps=2", "checkpoint.every=1"]
    ended = run(tmp_path, settings, *options, code=ExitCode.DIVERGED)
    assert "the state is not saved, since it holds values that are no numbers: model." in ended.err
    assert checkpoints(tmp_path / "run") == []


SPIKES = "".join(f"step={step},phase=forward,kind=spike:10;" for step in (20, 21, 22))
LONGER = ("train.steps=28", "elastic.spike=8.0", "train.lr=1e-3")


SLOW = pytest.mark.slow_chaos


@pytest.mark.parametrize("policy", ["rollback", pytest.param("warn", marks=SLOW), pytest.param("skip", marks=SLOW)])
def test_a_spike_of_the_loss_leads_to_what_was_asked_for(settings: list[str], tmp_path: Path, policy: str) -> None:
    ended = run(tmp_path, settings, *LONGER, f"elastic.spike_policy={policy}", fault=SPIKES)
    folder = tmp_path / "run"
    found = account(folder)
    assert found.exact, found.problems
    assert events(folder, "spike")
    assert "a spike" in ended.err
    by_step = {line["step"]: line for line in metrics(folder)}
    if policy == "warn":
        assert [step for step, line in by_step.items() if line.get("spike")] == [20, 21, 22]
        assert not found.skipped_steps
        assert not events(folder, "rollback")
    else:
        (event,) = events(folder, "rollback")
        assert (event["step"], event["to"], event["skipped"]) == (22, 15, [[152, 176]])
        assert found.skipped_windows == [(152, 176)]
        assert not any(line.get("spike") for line in by_step.values())
    say(f"29: loss spike, {policy}", folder, "spike", fault="spike")


@pytest.mark.parametrize("nproc", [3, 2])
def test_a_bit_that_flips_on_one_rank_is_found_and_undone(
    settings: list[str], tmp_path: Path, undisturbed: Path, nproc: int
) -> None:
    options = ["elastic.check_replicas_every=2"] + (["train.global_batch=12"] if nproc == 3 else [])
    fault = "rank=1,step=15,phase=optimizer,kind=bitflip:q_proj"
    ended = run(tmp_path, settings, *options, nproc=nproc, fault=fault)
    folder = tmp_path / "run"
    (event,) = events(folder, "replicas_differ")
    assert event["step"] == 15, "a checkpoint is due: what differs is not saved"
    (tensor,) = event["tensors"]
    assert "q_proj" in tensor["name"]
    assert tensor["ranks"] == ([1] if nproc == 3 else [0, 1])
    assert "q_proj.weight " in ended.err
    (back,) = events(folder, "rollback")
    assert (back["to"], back["skipped"], back["cause"]) == (10, [], "replicas")
    assert account(folder).exact
    if nproc == 2:
        assert_same_run(folder, undisturbed)
    else:
        run(tmp_path, settings, *options, nproc=3, name="clean")
        assert_same_run(folder, tmp_path / "clean")
    say("30: bit flip on one of several copies", folder, "replicas_differ", fault="bitflip")


@pytest.mark.slow_chaos
def test_a_result_that_is_wrong_once_on_one_rank_is_found_and_computed_again(
    settings: list[str], tmp_path: Path
) -> None:
    # The update of one rank comes from a sum that it alone has wrong; what is computed again is right. (With zero each
    # rank updates a part for all: they would have it wrong alike.)
    options = ["elastic.check_replicas_every=1", "train.global_batch=12", "parallel.strategy=dp=3"]
    fault = "rank=1,step=13,phase=reduce,kind=wrong"
    ended = run(tmp_path, settings, *options, nproc=3, fault=fault)
    folder = tmp_path / "run"
    (event,) = events(folder, "replicas_differ")
    assert event["step"] == 13
    assert {rank for tensor in event["tensors"] for rank in tensor["ranks"]} == {1}
    assert "of rank 1 on " in ended.err
    (back,) = events(folder, "rollback")
    assert (back["to"], back["skipped"], back["cause"]) == (10, [], "replicas")
    run(tmp_path, settings, *options, nproc=3, name="clean")
    assert_same_run(folder, tmp_path / "clean")
    say("31: a wrong result, once, on one rank", folder, "replicas_differ", fault="wrong")


@pytest.mark.slow_chaos
def test_copies_that_differ_can_end_the_run(settings: list[str], tmp_path: Path) -> None:
    options = ["elastic.check_replicas_every=1", "elastic.replica_policy=stop"]
    fault = "rank=0,step=8,phase=optimizer,kind=bitflip"
    ended = run(tmp_path, settings, *options, fault=fault, code=ExitCode.FAILED)
    assert "differs between rank 0 on " in ended.err
    assert "there is no majority" in ended.err
    assert checkpoints(tmp_path / "run") == [5]


def _poisoned(corpus: Path, folder: Path, samples: list[int], length: int, settings: list[str]) -> list[str]:
    """A copy of a corpus in which these samples hold a token that no model has."""
    import shutil

    from meshwright.config import load_config
    from meshwright.training.job import make_job

    copy = folder / "poisoned"
    shutil.copytree(corpus, copy)
    held = Corpus(copy)
    sampler = make_job(load_config(None, [*settings, f"run.dir={folder / 'none'}"]), 1).sampler
    for sample in samples:
        place = sampler.sample(sample).sequence * length + 3
        _overwrite(held, place)
    return [*(setting for setting in settings if not setting.startswith("data.path=")), f"data.path={copy}"]


def _overwrite(corpus: Corpus, token: int) -> None:
    index = json.loads((corpus.path / "index.json").read_text())
    for shard in index["shards"]:
        if token < shard["tokens"]:
            values = np.memmap(corpus.path / shard["file"], dtype=np.dtype(index["dtype"]), mode="r+")
            values[token] = np.iinfo(values.dtype).max
            values.flush()
            return
        token -= shard["tokens"]
    raise AssertionError("beyond the corpus")


def test_a_sample_that_cannot_be_used_is_named_or_left_out_as_asked(
    settings: list[str], corpus: Path, tmp_path: Path
) -> None:
    poisoned = _poisoned(corpus, tmp_path, [53], 32, settings)
    ended = start(tmp_path, poisoned, LEDGER, "elastic.max_restarts=0", name="stops").wait()
    assert ended.code == ExitCode.BAD_INPUT, ended.err
    assert "step 7, rank 1 on " in ended.err
    assert "sample 53 cannot be used" in ended.err
    assert "data.bad_samples=skip" in ended.err
    run(tmp_path, poisoned, "data.bad_samples=skip", name="goes-on")
    found = account(tmp_path / "goes-on")
    assert found.exact, found.problems
    assert found.bad == [53]
    tokens = [line["tokens"] for line in metrics(tmp_path / "goes-on")]
    assert tokens == [8 * 32] * 6 + [7 * 32] + [8 * 32] * 13
    print_cost("36: a sample that cannot be used", None, None, 0, "named, or left out of its step")


@pytest.fixture
def four_steps_an_epoch(tmp_path: Path) -> list[str]:
    """A corpus of exactly four batches of eight sequences."""
    text = "the ranks of a mesh train one model; " * 60
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text(text[: 32 * 32 + 1])
    corpus = prepare([tmp_path / "text"], tmp_path / "packed", "bytes", workers=1)
    assert Corpus(tmp_path / "packed").sequences(32) == 32, corpus
    return [f"data.path={tmp_path / 'packed'}", "data.validation=0.0", "train.eval_sequences=0", "checkpoint.every=0"]


def test_resumes_within_later_epochs_and_at_their_end_lose_and_repeat_nothing(
    settings: list[str], four_steps_an_epoch: list[str], tmp_path: Path
) -> None:
    options = [*four_steps_an_epoch, "train.schedule=constant"]
    run(tmp_path, settings, *options, "train.steps=15", name="straight")
    for stop in (6, 7, 8, 15):
        run(tmp_path, settings, *options, f"train.steps={stop}")
    found = account(tmp_path / "run")
    assert found.exact, found.problems
    assert found.steps == account(tmp_path / "straight").steps
    assert_same_run(tmp_path / "run", tmp_path / "straight")
    print_cost("37: resumed in the second epoch, again, and at its end", None, None, 0, "same samples, same bits")


@pytest.mark.slow_chaos
def test_the_depth_of_the_prefetch_may_change_between_runs(settings: list[str], tmp_path: Path) -> None:
    for steps, depth in ((7, 2), (13, 1), (STEPS, 5)):
        run(tmp_path, settings, f"train.steps={steps}", "train.schedule=constant", f"data.prefetch={depth}")
    found = account(tmp_path / "run")
    assert found.exact, found.problems
    assert found.fed == STEPS * 8
    print_cost("38: resumed with a prefetch of 2, 1 and 5 steps", None, None, 0, "every sample once")


def test_other_numbers_of_ranks_go_on_with_the_same_samples(settings: list[str], tmp_path: Path) -> None:
    exact = ["train.precision=float64", "train.global_batch=12", "train.schedule=constant"]
    run(tmp_path, settings, *exact, nproc=4, name="straight")
    for steps, nproc in ((6, 4), (11, 2), (16, 3), (STEPS, 4)):
        run(tmp_path, settings, *exact, f"train.steps={steps}", nproc=nproc)
    found, straight = account(tmp_path / "run"), account(tmp_path / "straight")
    assert found.exact, found.problems
    assert found.steps == straight.steps
    assert_near_run(tmp_path / "run", tmp_path / "straight", bound=1e-9)
    print_cost("39: resumed on 4, 2, 3, 4 ranks", None, None, 0, "same samples in every step, loss within 1e-9")


MEMORY = ["data.sequence_length=256", "train.global_batch=128", "train.steps=2", "checkpoint.every=1"]


def test_a_rank_without_memory_is_named_with_what_it_holds(settings: list[str], tmp_path: Path) -> None:
    fault = "rank=1,phase=restore,kind=limit:200000000,generation=any"
    ended = run(tmp_path, settings, *MEMORY, fault=fault, code=ExitCode.OUT_OF_MEMORY)
    assert "rank 1 of 2 on " in ended.err
    assert "ran out of memory in step 1 (" in ended.err
    assert "when it asked for " in ended.err
    assert "the address space is limited to" in ended.err
    assert "set train.micro_batch=32 (or elastic.oom=retry" in ended.err
    (event,) = events(tmp_path / "run", "out_of_memory")
    assert event["rank"] == 1


def test_with_retry_a_run_that_ran_out_of_memory_goes_on_with_smaller_passes(
    settings: list[str], tmp_path: Path
) -> None:
    fault = "rank=1,phase=restore,kind=limit:200000000,generation=any"
    ended = start(tmp_path, settings, LEDGER, *MEMORY, "elastic.oom=retry", fault=fault).wait()
    folder = tmp_path / "run"
    assert ended.code == ExitCode.DONE, ended.err
    found = events(folder, "out_of_memory")
    assert (found[0]["was"], found[0]["micro_batch"]) == (64, 32)
    assert json.loads((folder / "micro_batch.json").read_text())["micro_batch"] == found[-1]["micro_batch"] < 64
    assert account(folder).exact
    run(tmp_path, settings, *MEMORY, name="roomy")
    assert_near_run(folder, tmp_path / "roomy", bound=1e-4)
    report("43: out of memory", folder, "with smaller passes")


def test_no_checkpoint_is_lost_to_a_rollback(settings: list[str], tmp_path: Path) -> None:
    """Steps that are reached again are saved again: what the abandoned ones left is gone."""
    fault = "".join(f"step={step},phase=forward,kind=nan;" for step in (9, 10, 11))
    run(tmp_path, settings, "checkpoint.keep=9", fault=fault)
    folder = tmp_path / "run"
    assert [event["step"] for event in events(folder, "checkpoint")] == [EVERY, 10, 10, 15, STEPS]
    manifest = json.loads((folder / "checkpoints/step-000010/manifest.json").read_text())
    assert manifest["state"]["skipped_windows"] == [[64, 88]]
    assert manifest["position"] == 80 + 24
