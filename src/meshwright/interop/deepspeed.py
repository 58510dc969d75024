"""Reads a ds_config.json: `meshwright train --deepspeed FILE`. `deepspeed_rules` has what its keys become. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import nearest
from meshwright.interop.deepspeed_keys import BY_KEY, DIALECT, known_keys, read_json
from meshwright.interop.deepspeed_rules import DTYPES, STEPS_PER_PRINT
from meshwright.interop.deepspeed_zero_rules import MIB, PREFETCH
from meshwright.interop.rules import fitting
from meshwright.interop.translation import STRATEGY, UNKNOWN, Around, Reading, Translation
from meshwright.strategy import AUTO

OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd", "adafactor": "adafactor"}
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
CLIPPING = 1.0
"""What DeepSpeed clips to where the file says nothing, since 0.19."""
HIGHEST_RATE = 0.001
"""Of WarmupDecayLR where the file says nothing, whatever the optimizer's rate is."""


def read_deepspeed(file: str | Path, around: Around) -> Translation:
    """What a ds_config says, in our settings."""
    return translate(read_json(Path(file)), str(file), around)


def translate(content: Mapping[str, Any], file: str, around: Around) -> Translation:
    """The same for what the file holds."""
    reading = Reading(DIALECT, file)
    given = known_keys(reading, content)
    for key, value in given.items():
        BY_KEY[key].act(reading, key, value)
    _autocast(reading, given)
    _zero(reading, given)
    _activations(reading, given)
    _optimizer(reading, given)
    _scheduler(reading, given, around)
    if "gradient_clipping" not in given:
        reading.assume("gradient_clipping", "train.grad_clip", CLIPPING, "absent: DeepSpeed clips to 1.0")
    _watched(reading, given, around)
    _batches(reading, given, around)
    _unsharded(reading, given, around)
    return reading.finish(around)


def _autocast(reading: Reading, given: Mapping[str, Any]) -> None:
    """Without a dtype DeepSpeed takes torch's own for the device, and scales no loss."""
    key = "torch_autocast.dtype"
    if given.get("torch_autocast.enabled") and key not in given and key not in reading.answered:
        told = "torch.autocast would take fp16 on a GPU, without a loss scale, and bf16 on a CPU"
        reading.refuse(key, f"is absent: {told}; add it: bfloat16, or float16")


def _zero(reading: Reading, given: Mapping[str, Any]) -> None:
    """What is in host memory, and how much travels together."""
    zero = "zero_optimization."
    stage = given.get(f"{zero}stage", 0)
    wanted = {name: given.get(f"{zero}offload_{name}.device", "none") for name in ("optimizer", "param")}
    for name, device in wanted.items():
        key = f"{zero}offload_{name}.device"
        if device not in ("none", "cpu"):
            reading.refuse(key, f"= {device!r} is refused: state lives in device or host memory; use cpu or none")
        elif device == "none" and key in given:
            reading.leave(key, device, "state stays on the device")
        elif device == "cpu" and name == "param" and stage < 3:
            reading.refuse(key, f"= 'cpu' is for stage 3, and this is stage {stage}; use offload_optimizer, or stage 3")
        elif device == "cpu" and name == "param":
            note = "" if wanted["optimizer"] == "cpu" else "the optimizer's state goes with them"
            reading.word(key, device, "offload", "parameters", note)
        elif device == "cpu":
            note = "with the parameters" if wanted["param"] == "cpu" else ""
            reading.word(key, device, "offload", "parameters" if wanted["param"] == "cpu" else "optimizer", note)
    key = f"{zero}reduce_bucket_size"
    if given.get(key, 1) < 1:
        reading.refuse(key, f"= {given[key]} must be a whole number from 1")
    elif key in given and stage == 3:
        reading.leave(key, given[key], "gradients of stage 3 travel with their unit: wrap in parallel.strategy")
    elif key in given:
        width = 4 if DTYPES.get(given.get("communication_data_type", "fp32")) == "float32" else 2
        reading.map(key, given[key], "comm.bucket_mb", given[key] * width / MIB, f"{width} bytes for each element")
    _units(reading, given, stage)


def _unsharded(reading: Reading, given: Mapping[str, Any], around: Around) -> None:
    """Stage 0 where the file names no stage, unless the run file says what is sharded."""
    key, note = "zero_optimization.stage", "absent: DeepSpeed shards nothing by default"
    if key in given:
        return
    if not reading.words:
        reading.assume(key, STRATEGY, "zero=0", note)
        return
    base = around.config.parallel.strategy.split()
    free = base[:1] == [AUTO] and len(base) > 1
    if not free and key not in reading.left_to_us and not any(word.startswith("zero=") for word in base):
        reading.word(key, "", "zero", 0, note)


def _units(reading: Reading, given: Mapping[str, Any], stage: int) -> None:
    """What is gathered together in stage 3: units as large as is gathered ahead, two of which are whole at a time."""
    ahead = "zero_optimization.stage3_prefetch_bucket_size"
    live = "zero_optimization.stage3_max_live_parameters"
    negative = [key for key in (ahead, live) if given.get(key, 0) < 0]
    for key in negative:
        reading.refuse(key, f"= {given[key]} must be a whole number from 0")
    if negative:
        return
    if stage < 3:
        for key in {ahead, live} & given.keys():
            reading.leave(key, given[key], f"it is for stage 3, and this is stage {stage}")
        return
    size = given.get(ahead, PREFETCH)
    bounded = live in given and given[live] // 2 < size
    if bounded:
        size = given[live] // 2
    value = f"size:{size}" if size else "block"
    if bounded:
        reading.word(live, given[live], "wrap", value, "two units are whole at a time")
        if ahead in given:
            reading.leave(ahead, given[ahead], "stage3_max_live_parameters leaves room for smaller units")
        return
    if ahead in given:
        reading.word(ahead, given[ahead], "wrap", value, "a unit is gathered ahead of its turn")
    if live in given:
        reading.leave(live, given[live], "two units are whole at a time, which is less: wrap in parallel.strategy")


def _activations(reading: Reading, given: Mapping[str, Any]) -> None:
    """In DeepSpeed the model says what is computed again, and the file how the rest is kept."""
    section = "activation_checkpointing."
    for name in ("partition_activations", "cpu_checkpointing"):
        key = section + name
        if given.get(key):
            reading.word(key, True, "recompute", "full", "DeepSpeed leaves it to the model which layers are")
        elif key in given:
            reading.leave(key, False, "off; recompute in parallel.strategy says which layers are computed again")
    if given.get(f"{section}cpu_checkpointing"):
        states = reading.words.pop("offload", None)
        value = f"{states}+activations" if states else "activations"
        reading.word(f"{section}cpu_checkpointing", True, "offload", value)


def _optimizer(reading: Reading, given: Mapping[str, Any]) -> None:
    """The optimizer, with the values that DeepSpeed takes where the file has none."""
    params = {key.removeprefix("optimizer.params."): value for key, value in given.items() if ".params." in key}
    params = {name: value for name, value in params.items() if f"optimizer.params.{name}" in given}
    if "optimizer.type" not in given:
        if params:
            reading.refuse("optimizer.params", "has no optimizer.type; add it: AdamW")
        return
    name = given["optimizer.type"]
    ours = OPTIMIZERS.get(name.lower())
    if ours is None:
        close = nearest(name, ["Adam", "AdamW", "SGD", "Adafactor"])
        reading.refuse("optimizer.type", f"= '{name}' is refused{close}: here are Adam, AdamW, SGD and Adafactor")
        return
    if params.get("adam_w_mode") is False and name.lower() == "adam" and params.get("weight_decay", 0.0):
        reading.refuse("optimizer.params.adam_w_mode", "= false is refused: decay is apart from the gradient (AdamW)")
        return
    reading.map("optimizer.type", name, "train.optimizer", ours)
    if "adam_w_mode" in params and ours == "adamw":
        reading.leave("optimizer.params.adam_w_mode", params["adam_w_mode"], "AdamW; without decay both are the same")
    # Where DeepSpeed has no optimizer of that name, it is torch's.
    defaults: dict[str, float] = {"lr": 1e-2 if ours == "adafactor" else 1e-3, "weight_decay": 0.0}
    if ours == "adamw":
        defaults |= {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
        torch_default = params.get("torch_adam", False) and name.lower() == "adamw"
        defaults["weight_decay"] = 0.01 if torch_default else 0.0
    elif ours == "sgd":
        defaults |= {"beta1": 0.0}
    values: dict[str, float] = {name: params[name] for name in ("lr", "weight_decay") if name in params}
    for field, target in (("momentum", "sgd"), ("betas", "adamw"), ("eps", "adamw"), ("adam_w_mode", "adamw")):
        if field in params and ours != target:
            reading.refuse(f"optimizer.params.{field}", f"does not belong to {name}; leave it out")
    if "eps" in params and ours == "adamw":
        values["eps"] = params["eps"]
    origin: dict[str, str] = {field: f"optimizer.params.{field}" for field in values}
    if "momentum" in params and ours == "sgd":
        values["beta1"], origin["beta1"] = params["momentum"], "optimizer.params.momentum"
    if "betas" in params and ours == "adamw":
        pair = _pair(params["betas"])
        if pair is None:
            reading.refuse("optimizer.params.betas", f"= {params['betas']!r} must be two numbers")
            return
        values |= {"beta1": pair[0], "beta2": pair[1]}
        origin |= dict.fromkeys(("beta1", "beta2"), "optimizer.params.betas")
    for field, value in values.items():
        # The schedule's own highest rate wins, as in DeepSpeed.
        if field == "lr" and "scheduler.params.warmup_max_lr" in given:
            reading.leave(origin[field], value, "scheduler.params.warmup_max_lr is what counts")
            continue
        note = "norms and biases are not decayed here" if field == "weight_decay" and value else ""
        given_as = params.get(origin[field].removeprefix("optimizer.params."))
        reading.map(origin[field], given_as, f"train.{field}", value, note)
    for field, value in defaults.items():
        if field not in values and not (field == "lr" and "scheduler.params.warmup_max_lr" in given):
            reading.assume(f"optimizer.params.{field}", f"train.{field}", value, "absent: DeepSpeed's default")


def _pair(value: Any) -> tuple[float, float] | None:
    """Two numbers, or None where the value is something else."""
    if not isinstance(value, list) or len(value) != 2:
        return None
    try:
        return fitting("number", value[0]), fitting("number", value[1])
    except ValueError:
        return None


def _scheduler(reading: Reading, given: Mapping[str, Any], around: Around) -> None:
    """The schedule of the learning rate."""
    params = {
        key.removeprefix("scheduler.params."): value
        for key, value in given.items()
        if key.startswith("scheduler.params.")
    }
    if "scheduler.type" not in given:
        if params:
            reading.refuse("scheduler.params", "has no scheduler.type; add it: WarmupDecayLR")
        elif "optimizer.type" in given:
            reading.assume("scheduler", "train.schedule", "constant", "absent: DeepSpeed keeps the rate as it is")
        return
    name = given["scheduler.type"]
    if name not in SCHEDULES:
        reading.refuse(
            "scheduler.type", f"= '{name}' is refused{nearest(name, SCHEDULES)}: here are {', '.join(SCHEDULES)}"
        )
        return
    cosine, decay = name == "WarmupCosineLR", name != "WarmupLR"
    own = {"warmup_min_ratio", "cos_min_ratio"} if cosine else {"warmup_min_lr", "warmup_max_lr"}
    own |= {"warmup_num_steps", "warmup_type", "last_batch_iteration"} | ({"total_num_steps"} if decay else set())
    for field in params.keys() - own:
        reading.refuse(f"scheduler.params.{field}", f"does not belong to {name}{nearest(field, own)}; leave it out")
    if decay and "total_num_steps" not in params:
        # Hugging Face's "auto" leaves it to the length of the run.
        reading.leave("scheduler.params.total_num_steps", "", "the schedule ends with the run: train.steps")
    reading.map("scheduler.type", name, "train.schedule", SCHEDULES[name])
    kind = params.get("warmup_type", "log")
    if kind not in ("log", "linear"):
        reading.refuse("scheduler.params.warmup_type", f"= '{kind}' is neither log nor linear")
        return
    note = "DeepSpeed's first two steps are at the start of the warm-up: its curve comes up to two steps later"
    _stated(reading, params, "warmup_type", "train.warmup", kind, note)
    steps = params.get("warmup_num_steps", 1000)
    if steps < 1:
        reading.refuse("scheduler.params.warmup_num_steps", f"= {steps} must be a whole number from 1")
        return
    _stated(reading, params, "warmup_num_steps", "train.warmup_steps", max(2, steps))
    if "total_num_steps" in params:
        _stated(reading, params, "total_num_steps", "train.schedule_steps", params["total_num_steps"])
    if cosine:
        rate = reading.stated.get("train.lr", reading.assumed.get("train.lr", around.config.train.lr))
        _stated(reading, params, "warmup_min_ratio", "train.warmup_lr", rate * params.get("warmup_min_ratio", 0.0))
        _stated(reading, params, "cos_min_ratio", "train.min_lr", rate * params.get("cos_min_ratio", 1e-4))
        return
    least = params.get("warmup_min_lr", 0.0)
    _stated(reading, params, "warmup_min_lr", "train.warmup_lr", least)
    if decay:
        _stated(reading, params, "warmup_min_lr", "train.min_lr", least)
    key = "scheduler.params.warmup_max_lr"
    if "warmup_max_lr" in params:
        reading.map(key, params["warmup_max_lr"], "train.lr", params["warmup_max_lr"])
    elif decay and not any(entry.key == key for entry in reading.entries):
        if reading.stated.get("train.lr", HIGHEST_RATE) != HIGHEST_RATE:
            rate = reading.stated["train.lr"]
            reading.refuse(key, f"is absent: DeepSpeed would go up to {HIGHEST_RATE}, not to {rate:g}; add it")
        reading.assume(key, "train.lr", HIGHEST_RATE, "absent: DeepSpeed's default")


def _stated(reading: Reading, params: Mapping[str, Any], field: str, setting: str, value: Any, note: str = "") -> None:
    """A parameter of the schedule, or what DeepSpeed takes where it is left out."""
    key = f"scheduler.params.{field}"
    if field in params:
        reading.map(key, params[field], setting, value, note)
    elif setting not in reading.stated:
        reading.assume(key, setting, value, "; ".join(filter(None, ["absent: DeepSpeed's default", note])))


def _watched(reading: Reading, given: Mapping[str, Any], around: Around) -> None:
    """Breakdowns and profiles."""
    if given.get("wall_clock_breakdown"):
        every = given.get("steps_per_print", STEPS_PER_PRINT)
        reading.map("wall_clock_breakdown", True, "observe.profile_every", every, "`meshwright watch` shows it")
    elif "wall_clock_breakdown" in given:
        reading.leave("wall_clock_breakdown", False, "phases are always timed; observe.profile_every takes them apart")
    step, steps = given.get("flops_profiler.profile_step", 1), around.config.train.steps
    if step < 1:
        reading.refuse("flops_profiler.profile_step", f"= {step} must be a whole number from 1")
    elif given.get("flops_profiler.enabled"):
        key = "flops_profiler.profile_step" if "flops_profiler.profile_step" in given else "flops_profiler.enabled"
        never = f"it will never act: the run ends with step {steps} (train.steps)" if step > steps else ""
        reading.map(key, given[key], "observe.profile_steps", f"{step}:{step}", never)
        if key != "flops_profiler.enabled":
            reading.leave("flops_profiler.enabled", True, "its profile_step is what counts")
    else:
        for key in sorted({"flops_profiler.enabled", "flops_profiler.profile_step"} & given.keys()):
            reading.leave(key, given[key], "off")


def _batches(reading: Reading, given: Mapping[str, Any], around: Around) -> None:
    """The global batch and the micro-batch; what does not multiply out with the ranks is refused."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for name in names:
        if name in given and given[name] < 1:
            reading.refuse(name, f"= {given[name]} must be a whole number from 1")
            return
    batch, micro, passes = (given.get(name) for name in names)
    if batch is micro is None:
        if passes is not None:
            reading.refuse(names[2], f"needs {names[0]} or {names[1]} beside it")
        return
    if around.unknown and (batch is None or passes is not None):
        reading.refuse(names[0] if batch is None else names[2], f"{UNKNOWN}; give {names[0]}, without {names[2]}")
        return
    data = 1 if around.unknown else around.data_ranks(reading.words)
    if around.ranks is None and not around.unknown and batch and micro and passes and batch % (micro * passes) == 0:
        # All three together say how many ranks there are to be.
        data = batch // (micro * passes)
        reading.word(names[0], batch, "dp", data, f"{batch} / ({micro} x {passes})")
    known = {name: value for name, value in zip(names, (batch, micro, passes), strict=True) if value is not None}
    said = ", ".join(f"{name}={value}" for name, value in known.items())
    if batch is None:
        batch = (micro or 1) * (passes or 1) * data
    unit = data * (micro or 1) * (passes or 1)
    exact = batch == unit if micro is not None and passes is not None else batch % unit == 0
    if not exact:
        reading.refuse(
            names[0],
            f"= {batch} is not {names[1]} x {names[2]} x ranks: {said} on {data} data-parallel ranks; "
            f"change one of them, or start with another --nproc",
        )
        return
    if micro is None and not around.unknown:
        micro = batch // data // (passes or 1)
    for name, value in known.items():
        if name == names[0]:
            reading.map(name, value, "train.global_batch", batch)
        elif name == names[1]:
            reading.map(name, value, "train.micro_batch", micro)
        elif "train_micro_batch_size_per_gpu" not in known:
            reading.map(name, value, "train.micro_batch", micro, f"{value} passes of {micro} on {data} ranks")
        elif names[0] not in known:
            reading.map(name, value, "train.global_batch", batch, f"{micro} x {value} x {data} ranks")
        else:
            reading.leave(name, value, f"{batch} = {micro} x {value} x {data} ranks")
    if names[0] not in known and names[2] not in known:
        reading.map(names[1], micro, "train.global_batch", batch, f"{micro} on each of {data} ranks")
