"""TF32: a setting of the process that is put back; refused where a GPU lacks it; planned at its own speed."""

from __future__ import annotations

import pytest
import torch

from meshwright.config import load_config
from meshwright.errors import ConfigError, UserError
from meshwright.planning.answer import plan
from meshwright.training.precision import precision_of, uses_tf32
from meshwright.training.tf32 import tf32_products

TF32 = load_config(None, ["train.precision=tf32"])


def settings() -> tuple[str, str, str]:
    try:
        old = torch.get_float32_matmul_precision()
    except RuntimeError:
        old = "mixed"
    return old, torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision


def fail_inside() -> None:
    with tf32_products(True):
        assert settings()[:2] == ("high", "tf32")
        raise RuntimeError("in the middle")


@pytest.mark.parametrize("before", ["untouched", "old interface", "new interface"])
def test_the_process_has_its_own_setting_back_after_a_step_even_one_that_fails(before: str) -> None:
    untouched = settings()
    try:
        if before == "old interface":
            torch.set_float32_matmul_precision("medium")
        if before == "new interface":
            torch.backends.cuda.matmul.fp32_precision = "tf32"
        found = settings()
        with tf32_products(False):
            assert settings() == found
        with pytest.raises(RuntimeError, match="in the middle"):
            fail_inside()
        assert settings() == found
    finally:
        torch.set_float32_matmul_precision(untouched[0])
        torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision = untouched[1:]


def test_everything_is_stored_and_sent_as_in_float32() -> None:
    assert precision_of(TF32) == precision_of(load_config(None, ["train.precision=float32"]))


@pytest.mark.parametrize(("capability", "refused"), [((7, 0), True), ((7, 5), True), ((8, 0), False), ((9, 0), False)])
def test_gpus_without_tf32_are_refused(
    capability: tuple[int, int], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    assert not uses_tf32(TF32, torch.device("cpu"))
    assert not uses_tf32(load_config(None, ["train.precision=float32"]), torch.device("cuda"))
    if refused:
        with pytest.raises(ConfigError, match="Some GPU has no products in TF32; use float32"):
            uses_tf32(TF32, torch.device("cuda"))
    else:
        assert uses_tf32(TF32, torch.device("cuda"))


def test_a_plan_in_tf32_holds_what_float32_holds_and_lies_between_it_and_bf16_in_time() -> None:
    found = {
        precision: plan(
            "llama3.1-8b", "8xh100", strategy="dp=8 zero=3 recompute=full", precision=precision, global_batch=64,
            micro_batch=1,
        ).shown
        for precision in ("bf16", "tf32", "float32")
    }  # fmt: skip
    assert found["tf32"].memory.peak == found["float32"].memory.peak
    assert found["bf16"].step_s < found["tf32"].step_s < found["float32"].step_s / 2
    with pytest.raises(UserError, match="lacks it"):
        plan("llama3.1-8b", "8xv100", precision="tf32", global_batch=64)
