"""transformers: its own Trainer around its own model, as its users run them: SDPA, mixed precision, not compiled."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.bench.clock import Clock
from meshwright.bench.contenders import Unable
from meshwright.bench.trial import Facts, Trial
from meshwright.errors import UserError
from meshwright.models.hf_config import config_from_spec
from meshwright.models.initialize import initialize
from meshwright.strategy import Strategy


def causal_lm(trial: Trial, clock: Clock) -> nn.Module:
    """transformers' model of the trial's shape, float32 weights with our first values where names are the same."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings, recompute = trial.config.train, Strategy.parse(trial.config.parallel.strategy, 1).recompute
    if settings.precision not in ("bf16", "float32") or settings.optimizer != "adamw":
        raise Unable("transformers runs here in bf16 or float32 with adamw")
    if recompute not in ("none", "full"):
        raise Unable(f"transformers has no recompute={recompute}; it has none and full")
    try:
        facts = config_from_spec(trial.spec)
    except UserError as error:
        raise Unable(str(error)) from None
    config = AutoConfig.for_model(**facts)
    config.use_cache = False
    with clock.device:
        model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    with clock.aside():
        initialize(model, trial.spec, trial.config.run.seed)
    if recompute == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return model.train()


NOTES = ("its labels are the inputs, shifted by the model: each sequence has one target less",)


def train(trial: Trial, clock: Clock) -> Facts:
    """Train with its Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    settings = trial.config.train
    model = causal_lm(trial, clock)
    latest: list[Tensor] = []

    class Timed(Trainer):
        """Remembers the loss of the step in hand."""

        def training_step(self, *inputs: Any, **options: Any) -> Tensor:
            latest[:] = [super().training_step(*inputs, **options)]
            return latest[0]

    class Stamps(TrainerCallback):
        """Tells the clock."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.stepped(latest[0])

    with tempfile.TemporaryDirectory(prefix="meshwright-hf-") as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=trial.micro_batch,
            max_steps=trial.total,
            bf16=settings.precision == "bf16",
            use_cpu=clock.device.type == "cpu",
            optim="adamw_torch_fused",
            learning_rate=settings.lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_epsilon=settings.eps,
            max_grad_norm=settings.grad_clip,
            lr_scheduler_type="constant",
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        rows = [row[:-1] for tokens in trial.batches() for row in torch.from_numpy(tokens)]
        samples = [{"input_ids": row, "labels": row} for row in rows]
        trainer = Timed(model=model, args=arguments, train_dataset=_InOrder(samples), callbacks=[Stamps()])
        clock.begin()
        trainer.train()
    return Facts(sum(one.numel() for one in model.parameters()), NOTES)


class _InOrder(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    """Samples in their order: a dataset with a length would be shuffled."""

    def __init__(self, samples: list[dict[str, Tensor]]) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return iter(self.samples)
