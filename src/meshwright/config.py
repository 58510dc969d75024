"""RunConfig: every setting of a run, typed and documented in one place.

A setting is written `section.key`. The text under a field is its documentation: `meshwright train --explain` and
docs/configuration.md print it. How files, presets and overrides become a RunConfig is in `config_load`.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from meshwright.address import Address
from meshwright.config_load import load_config, resolve_config
from meshwright.models.shapes import SENSITIVE_LINEARS
from meshwright.profile_steps import parse_steps
from meshwright.secrets import Secrets

__all__ = ["RunConfig", "load_config", "resolve_config"]


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


AUTO_STEPS: Literal["auto"] = "auto"
"""A number of steps that follows from the run."""


def free(default: Any, **constraints: Any) -> Any:
    """A setting that may change when a run is resumed: it does not alter what has been computed so far."""
    return Field(default=default, json_schema_extra={"free": True}, **constraints)


def secret_file(default: str | None = None) -> Any:
    """A free setting that names a file whose content is a secret: no log, file or page may show it."""
    return Field(default=default, json_schema_extra={"free": True, "secret_file": True}, min_length=1)


class RunSection(_Section):
    dir: str = free("runs/default", min_length=1)
    """Folder of the run: configuration, metrics, events, checkpoints."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Decides initial weights, the order of the data and dropout."""
    fresh: bool = free(False)
    """Start anew although the folder holds a run; that run is moved aside to DIR.previous-1, -2, ..."""
    device: Literal["auto", "cpu", "cuda", "cuda-shared"] = free("auto")
    """Where to train; auto takes the GPU when there is one. Each process has a GPU of its own and they talk over NCCL;
    with cuda-shared several share one and talk over gloo, through host memory: right results, not speed."""


class ModelSection(_Section):
    preset: str | None = None
    """Name of a model shape; `meshwright models` lists them."""
    from_hf: str | None = None
    """Folder with a Hugging Face config.json and safetensors files; training starts from those weights."""
    spec: dict[str, Any] = {}
    """Shape settings that replace those of the preset, such as model.spec.num_hidden_layers=4, or a whole shape."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.preset and self.from_hf:
            raise ValueError("model.preset and model.from_hf exclude each other; leave one of them out")
        if self.from_hf and self.spec:
            raise ValueError("model.spec cannot change the shape of the weights in model.from_hf; leave it out")
        return self


class CorpusShare(_Section):
    path: str = Field(min_length=1)
    """Folder made by `meshwright data prepare`, or the prefix of .bin and .idx files in Megatron's format."""
    weight: float = Field(gt=0)
    """Share of the samples relative to the other corpora."""


class DataSection(_Section):
    path: str | None = free(None)
    """Folder made by `meshwright data prepare`, or the prefix of .bin and .idx files in Megatron's format; a resumed
    run refuses other data, wherever it lies."""
    mix: list[CorpusShare] = []
    """Several corpora instead of one: a list of {path, weight}."""
    sources: list[str] = free([])
    """Raw text to prepare into data.path when that folder does not exist yet; `python-stdlib` is built in."""
    tokenizer: str | None = free(None)
    """`bytes` or a tokenizer file; the packed corpus must have been made with it. None accepts the corpus's own,
    which files in Megatron's format do not have."""
    sequence_length: int = Field(default=512, gt=0)
    """Tokens per sample."""
    mask_documents: bool = False
    """Let tokens attend within their own document only, where several are packed into one sample."""
    validation: float = Field(default=0.01, ge=0, lt=1)
    """Share of the sequences that training never sees and evaluation uses."""
    prefetch: int = free(2, ge=1)
    """How many steps' batches are made ahead in the background."""
    bad_samples: Literal["stop", "skip"] = free("stop")
    """A sample that cannot be read, or holds tokens that the model does not have: end the run, or go on without it."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.path and self.mix:
            raise ValueError("data.path and data.mix exclude each other; leave one of them out")
        if self.sources and not self.path:
            raise ValueError("data.sources needs data.path, the folder to prepare them into")
        return self


class TrainSection(_Section):
    steps: int = free(1000, gt=0)
    """Optimizer steps of the whole run; the learning-rate schedule ends there, unless train.schedule_steps is set."""
    global_batch: int = Field(default=16, gt=0)
    """Samples per optimizer step, over all ranks."""
    batch_schedule: int | str | list[list[int]] | None = None
    """Replaces train.global_batch: "16..64 over 200" ramps up in 200 steps; [[0, 16], [100, 64]] sets it by hand."""
    micro_batch: int | None = free(None, gt=0)
    """Samples per forward pass and rank; the rest of the batch is accumulated. None takes the rank's whole share.
    Where parallel.strategy deals out shares, those of one share: with shares=3+1 a rank takes 3 x or 1 x as many.
    The balancing loss of a mixture of experts is taken over the samples of one pass on all ranks."""
    optimizer: Literal["adamw", "sgd", "adafactor"] = "adamw"
    """adamw; sgd with momentum train.beta1; adafactor keeps row and column means of squared gradients instead of all
    of them, needs whole parameters, and so goes without zero, tp and offload."""
    lr: float = Field(default=3e-4, gt=0)
    """Highest learning rate."""
    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the end of a decay."""
    schedule: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    """Learning rate after the warm-up; wsd is stable, then decays linearly over the last train.decay_steps."""
    schedule_steps: int | None = Field(default=None, gt=0)
    """Step at which the schedule ends, for a run that is longer or shorter than it; None is train.steps."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the learning rate rises; a shorter run ends while it rises."""
    warmup: Literal["linear", "log"] = "linear"
    """How it rises: by the same amount each step, or with the logarithm of the step."""
    warmup_lr: float = Field(default=0.0, ge=0)
    """The learning rate from which the warm-up rises."""
    decay_steps: int | None = Field(default=None, gt=0)
    """Length of the decay of the wsd schedule; None is a tenth of the run."""
    weight_decay: float = Field(default=0.1, ge=0)
    """AdamW's decay of matrices; norms and biases are not decayed."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's decay of the mean of gradients."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW's decay of the mean of squared gradients."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's guard against division by zero."""
    grad_clip: float = Field(default=1.0, ge=0)
    """Largest global norm of the gradient; 0 does not clip."""
    precision: Literal["float32", "tf32", "bf16", "fp16", "fp8", "float64"] = "float32"
    """tf32 is float32 whose matrix products a GPU computes in TF32 (on a CPU it is float32); bf16 and fp16 compute in
    it and keep weights, gradients and optimizer state in float32, unless precision.stored and precision.moments say
    otherwise; fp16 scales the loss; fp8 is bf16 with linears that multiply in 8 bits; float64 is for proofs."""
    compile: Literal["auto", "on", "off"] = free("auto")
    """torch.compile of the layers; auto does it on a GPU. A first step takes longer, unless the compiler remembers."""
    gc_every: int = free(200, ge=0)
    """Steps between Python's garbage collections, which all ranks do together; 0 leaves them to Python."""
    deterministic: bool = False
    """Only algorithms that give the same bits on every run, sums over ranks included; slower on a GPU."""
    eval_every: int = free(0, ge=0)
    """Steps between evaluations on the held-out sequences; 0 evaluates at the end only."""
    eval_sequences: int = free(64, ge=0)
    """How many held-out sequences an evaluation reads at most; 0 switches evaluation off."""
    early_stop: int = free(0, ge=0)
    """Stop after this many evaluations in a row without a better loss; 0 never does."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.min_lr > self.lr:
            raise ValueError(f"train.min_lr={self.min_lr:g} is above train.lr={self.lr:g}; lower it")
        if self.warmup_lr > self.lr:
            raise ValueError(f"train.warmup_lr={self.warmup_lr:g} is above train.lr={self.lr:g}; lower it")
        if self.decay_steps is not None and self.schedule != "wsd":
            raise ValueError("train.decay_steps belongs to train.schedule='wsd'; leave it out")
        if self.early_stop and not (self.eval_every and self.eval_sequences):
            raise ValueError("train.early_stop needs evaluations: set train.eval_every and train.eval_sequences")
        return self


Dtype = Literal["float32", "bf16", "fp16", "float64"]


class PrecisionSection(_Section):
    param: Dtype | None = None
    """Dtype in which the model reads its parameters and computes; None is that of train.precision."""
    stored: Literal["float32", "bf16"] | None = None
    """Dtype in which weights and gradients are stored; None is float32. bf16 takes half the memory: AdamW then computes
    in float32 and rounds each new weight up or down at random, so that small updates are not lost on average."""
    moments: Literal["float32", "bf16", "int8"] = free("float32")
    """How AdamW keeps its two moments: 8, 4 or 2 bytes a parameter for both. int8 are small floating-point numbers
    relative to the largest of 256 neighbours on a rank. Checkpoints hold int8 as float32, and any of the three goes on
    from any other."""
    reduce: Dtype | None = None
    """Dtype in which gradients are summed over ranks; None is that in which they are stored."""
    buffer: Dtype | None = None
    """Dtype of state that is not trained, such as the bias that balances experts; None is float32."""
    loss_scale: float | Literal["dynamic"] = "dynamic"
    """fp16 only: the factor of the loss; dynamic halves it after overflows and doubles it when all goes well."""
    initial_power: int = Field(default=16, ge=0, le=60)
    """Dynamic loss scale: it starts at two to this power."""
    window: int = Field(default=1000, gt=0)
    """Dynamic loss scale: steps in a row without overflow after which it doubles."""
    hysteresis: int = Field(default=2, gt=0)
    """Dynamic loss scale: how many overflows are skipped before it is halved; counted anew after it doubles."""
    minimum: float = Field(default=1.0, gt=0)
    """Dynamic loss scale: its lowest value; an overflow there is a fault, see elastic.nonfinite."""
    fp8_recipe: Literal["rowwise", "tensorwise"] = "rowwise"
    """fp8 only: a scale for each row and column of a product, or one for each tensor, which is coarser."""
    fp8_weight_gradient: bool = True
    """fp8 only: compute gradients of weights in 8 bits, too. Where the tokens of a pass are no multiple of 16 they are
    computed in bf16 in any case."""
    fp8_skip: list[str] = list(SENSITIVE_LINEARS)
    """fp8 only: names of linears that stay in bf16, with * for any letters: the head and routers."""
    fp8_smallest: int = Field(default=512, ge=16)
    """fp8 only: linears with a dimension below this on a rank stay in bf16, and those with one that is no multiple of
    16. The start of a run names them."""

    @model_validator(mode="after")
    def _positive(self) -> Self:
        if self.loss_scale != "dynamic" and self.loss_scale <= 0:
            raise ValueError(f"precision.loss_scale={self.loss_scale:g} must be above zero, or 'dynamic'")
        return self


class ParallelSection(_Section):
    strategy: str = free("auto", min_length=1)
    """How the work is split, such as zero=3 tp=2; docs/strategies.md explains the keys. auto asks the planner for the
    best strategy and micro-batch on the ranks there are, with constraints after it: auto tp<=2 zero=3."""
    cluster: str | None = free(None, min_length=1)
    """The machines that auto plans for, such as 64xh100 or a cluster file; None are machines like this one."""
    placement: str = free("auto", min_length=1)
    """Which ranks lie next to each other: in-order (pp, dp, cp, tp, outermost first, so that tp is on neighbours), the
    axes in another order, such as dp,pp,tp, or auto, which is in order unless parallel.cluster describes machines on
    which another order, also one of the machines, should be faster (docs/plan.md)."""
    retune: bool = free(False)
    """Measure links and ranks at checkpoints, and change the strategy there when another should be 10% faster."""


class CommSection(_Section):
    allreduce: Literal["backend", "ring", "tree", "halving-doubling", "hierarchical", "ps"] = free("backend")
    """How gradients are summed over data-parallel ranks at zero=0 and 1 without tp, pp and ep: by the backend, or by an
    algorithm of our own over messages from rank to rank, for study (docs/communication.md)."""
    bucket_mb: Annotated[float, Field(gt=0)] | Literal["auto"] | None = free(None)
    """MiB of gradients that travel together, while the backward pass goes on: buckets of that size where each rank sums
    them whole, and as many layers as hold so much with zero=2, tp, pp or ep. None is 25, and single layers there; auto
    measures what a sum takes and chooses."""
    compress_after: Annotated[int, Field(ge=0)] | Literal["auto"] = AUTO_STEPS
    """Steps in which gradients travel whole before a strategy's `compress` begins: the first ones change most. auto is
    0 for fp16, bf16 and int8, and 70% to 90% of the run's steps for powersgd and topk (docs/communication.md)."""


class CheckpointSection(_Section):
    every: int = free(500, ge=0)
    """Steps between checkpoints; one is always saved at the end. 0 saves at the end only."""
    dir: str | None = free(None, min_length=1)
    """Where checkpoints lie: a folder or s3://..., gs://... (pip install 'meshwright[s3]', 'meshwright[gs]'); None is
    RUN_DIR/checkpoints. All machines must see it."""
    background: bool = free(True)
    """Write while training goes on: a step waits only until its state is copied to host memory."""
    cpu_share: float | None = free(None, gt=0, le=1)
    """Share of a core that the writing of a rank may take from the training; None is 0.03 where training computes on
    the CPU, and 1 on a GPU, where cores have time."""
    wait_s: float = free(30.0, ge=0)
    """Seconds that a checkpoint which is due waits for the one before, still being written; then it is left out."""
    keep: int = free(2, ge=1)
    """How many of the latest checkpoints stay. Only those count that were read again and found whole."""
    keep_every: int = free(0, ge=0)
    """Checkpoints of steps that this divides stay for ever; 0 for none."""
    keep_best: int = free(0, ge=0)
    """How many of the best checkpoints by checkpoint.best stay as well."""
    best: str = free("eval_loss", pattern=r"-?[a-z_]+")
    """The metric of checkpoint.keep_best, less is better; with a minus before it more is."""
    verify: bool = free(True)
    """Read every checkpoint again after it was written; without it old checkpoints are never removed."""
    fallback: int = free(2, ge=0)
    """How many damaged checkpoints a resumed run may pass over to reach one that is whole."""


class ElasticSection(_Section):
    timeout_s: float = free(600.0, gt=0)
    """Seconds that a rank waits for the others before the run ends with an error."""
    max_restarts: int = free(100, ge=0)
    """How often failed ranks are started again from the newest checkpoint; 0 ends the run with their error. One local
    process with 0 is not a process of its own, as a debugger wants it."""
    same_step_failures: int = free(3, ge=1)
    """The run ends, with exit code 5, when the same step has failed this many times in a row."""
    join_timeout_s: float = free(600.0, gt=0)
    """Several machines: seconds that one waits until enough of them have met."""
    quarantine_failures: int = free(3, ge=1)
    """Several machines: one that was lost this many times within elastic.quarantine_window_s is not let in again."""
    quarantine_window_s: float = free(600.0, gt=0)
    """Several machines: the time in which losses of one are counted."""
    watchdog: bool = free(True)
    """Watch the ranks from a process of its own, and start them again when one of them holds up the others for ever."""
    first_timeout_s: float = free(480.0, gt=0)
    """How long a rank may stay in a phase (data, forward, backward, ...) before it is known how long that takes here:
    the first steps, which compile, the first evaluation and save, start and restore. Less than elastic.timeout_s, so
    that it is the watchdog, which can name the rank, that ends a wait."""
    hang_factor: float = free(5.0, ge=1)
    """Once it is known: a rank hangs after this many times the longest that a phase has taken, ..."""
    hang_floor_s: float = free(60.0, gt=0)
    """... and this many seconds more. A rank that a signal has stopped may stay so for this long."""
    health: Literal["warn", "drain", "off"] = free("warn")
    """What to do when a sensor of a machine crosses a limit: tell, or, where its hardware is at fault, save and leave
    that machine as if it had been sent SIGTERM."""
    health_memory: float = free(0.97, ge=0, le=1)
    """Share of the machine's, or container's, memory that may be in use; 0 is no limit."""
    health_load: float = free(0.0, ge=0)
    """Processes that may want to run for each core, over a minute; 0 is no limit."""
    health_disk_gib: float = free(1.0, ge=0)
    """GiB that should be free on the disk of the run folder; 0 is no limit."""
    health_gpu_celsius: float = free(90.0, ge=0)
    """How hot a GPU may be; 0 is no limit. Errors of GPUs are always told."""
    nonfinite: Literal["skip", "stop"] = free("skip")
    """A loss or gradient that is NaN or infinite on any rank: skip the step on all of them, or end the run."""
    bad_steps: int = free(3, ge=1)
    """Skipped steps in a row after which the run goes back to its last good checkpoint and leaves out their samples."""
    rollbacks: int = free(3, ge=0)
    """How often the run may go back without getting past the step that went wrong; then it ends as diverged."""
    skip_window: Literal["bad", "checkpoint"] = free("bad")
    """Which samples are left out after going back: those of the bad steps, or all since the checkpoint."""
    spike: float = free(0.0, ge=0)
    """A loss this many deviations above the median of the last elastic.spike_window steps is a spike; 0 looks for none,
    6 is a usual choice. The deviation is 1.4826 times the median distance from the median."""
    spike_norm: float = free(0.0, ge=0)
    """The same for the norm of the gradients."""
    spike_window: int = free(128, ge=2)
    """Steps with which a spike is compared; the first 16 steps have none."""
    spike_steps: int = free(3, ge=1)
    """Spikes in a row after which elastic.spike_policy=rollback goes back and =warn says so."""
    spike_policy: Literal["warn", "skip", "rollback"] = free("warn")
    """What a spike leads to: a line in events.jsonl; a skipped step (elastic.bad_steps of them lead back to a
    checkpoint); or the way back after elastic.spike_steps of them."""
    check_replicas_every: int = free(100, ge=0)
    """Steps between comparisons of what several ranks hold alike, which must be the same bit for bit; also done before
    every checkpoint. 0 never compares."""
    replica_policy: Literal["rollback", "stop"] = free("rollback")
    """What copies that differ lead to: back to the last checkpoint, or the end of the run."""
    oom: Literal["stop", "retry"] = free("stop")
    """When a rank runs out of memory: end the run, or start again with half the micro-batch and the same global one."""


class ObserveSection(_Section):
    log_every: int = free(10, ge=1)
    """Steps between lines on the console when it is not a terminal."""
    profile_every: int = free(50, ge=0)
    """Steps between two that run under a profiler, for what is in DIR/ranks; 0 is never."""
    tensorboard: bool = free(True)
    """Write TensorBoard files to DIR/tensorboard."""
    ledger: bool = free(False)
    """Write the samples that every step was fed to DIR/ledger.jsonl; docs/numbers.md says what that can prove."""
    wandb: bool = free(False)
    """Send metrics to Weights & Biases (pip install 'meshwright[wandb]'); WANDB_MODE=offline keeps them here."""
    mlflow: bool = free(False)
    """Send metrics to the MLflow tracking server that MLFLOW_TRACKING_URI names, http:// or https://."""
    prometheus: str | None = free(None, min_length=1)
    """Serve metrics for Prometheus (pip install 'meshwright[prometheus]') at HOST:PORT or :PORT, by the first rank of
    each machine; :0 takes any free port. Without a host it is 127.0.0.1; another one needs
    observe.prometheus_token_file."""
    prometheus_token_file: str | None = secret_file()
    """A file with the bearer token that a scraper must show; nobody else may read it (chmod 600)."""
    profile_steps: str | None = free(None, min_length=1)
    """Steps to profile on every rank, such as 10:12 for 10, 11 and 12; traces and memory go to DIR/profile."""
    sample: str | None = free(None)
    """Prompt that the model continues on the console at the end of the run."""
    sample_tokens: int = free(200, gt=0)
    """Length of that continuation."""
    straggler_every: int = free(20, ge=0)
    """Steps after which ranks compare what they spend on themselves, to name slow ones; 0 is never."""

    @model_validator(mode="after")
    def _steps_to_profile(self) -> Self:
        if self.profile_steps is not None:
            try:
                parse_steps(self.profile_steps)
            except ValueError as error:
                raise ValueError(f"observe.profile_steps={error}") from None
        return self

    @model_validator(mode="after")
    def _reachable_by_whom(self) -> Self:
        if self.prometheus is None:
            return self
        try:
            address = Address.parse(self.prometheus)
        except ValueError as error:
            raise ValueError(f"observe.prometheus={error}") from None
        if not address.is_loopback and self.prometheus_token_file is None:
            raise ValueError(
                f"observe.prometheus={self.prometheus} can be reached from other machines, and so needs a bearer "
                "token: set observe.prometheus_token_file, or listen at 127.0.0.1"
            )
        return self


class RunConfig(_Section):
    """All settings of a run."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    precision: PrecisionSection = PrecisionSection()
    parallel: ParallelSection = ParallelSection()
    comm: CommSection = CommSection()
    checkpoint: CheckpointSection = CheckpointSection()
    elastic: ElasticSection = ElasticSection()
    observe: ObserveSection = ObserveSection()

    @model_validator(mode="after")
    def _narrow_states_fit(self) -> Self:
        train, precision = self.train, self.precision
        narrow = [f"precision.stored={precision.stored}"] if precision.stored == "bf16" else []
        narrow += [f"precision.moments={precision.moments}"] if precision.moments != "float32" else []
        if narrow and train.optimizer != "adamw":
            raise ValueError(
                f"{narrow[0]} needs train.optimizer=adamw, which rounds at random; {train.optimizer} does not"
            )
        if train.precision == "float64" and (narrow or precision.stored):
            given = narrow[0] if narrow else f"precision.stored={precision.stored}"
            raise ValueError(f"train.precision=float64 keeps everything in float64; leave {given} out")
        if train.precision == "fp16" and precision.stored == "bf16":
            raise ValueError(
                "precision.stored=bf16 has less precision than train.precision=fp16 computes with; "
                "use train.precision=bf16, or leave precision.stored out"
            )
        return self

    @model_validator(mode="after")
    def _float8_computes_in_bf16(self) -> Self:
        if self.train.precision == "fp8" and self.precision.param not in (None, "bf16"):
            raise ValueError(f"train.precision=fp8 computes in bf16; leave precision.param={self.precision.param} out")
        return self

    def secrets(self) -> Secrets:
        """What no text that leaves the program may hold: logins in settings, token files, secrets of the environment.

        A file that cannot be read holds none here; who needs it says so.
        """
        named = (
            value
            for section in type(self).model_fields
            for key, value in getattr(self, section).model_dump().items()
            if value is not None and _is_marked(getattr(self, section), key, "secret_file")
        )
        contents = []
        for name in named:
            with suppress(OSError, UnicodeDecodeError):
                contents.append(Path(name).read_text())
        return Secrets.known(self.model_dump(), contents)

    def identity(self) -> dict[str, dict[str, Any]]:
        """The settings that decide what is computed: a run folder belongs to one set of them."""
        sections = type(self).model_fields
        return {
            section: {
                key: value
                for key, value in getattr(self, section).model_dump().items()
                if not _is_marked(getattr(self, section), key, "free")
            }
            for section in sections
        }


def _is_marked(section: BaseModel, key: str, mark: str) -> bool:
    extra = type(section).model_fields[key].json_schema_extra
    return isinstance(extra, dict) and bool(extra.get(mark))
