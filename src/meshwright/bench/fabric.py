"""Lightning Fabric: its loop in the form of its guide, around transformers' model, not compiled."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import torch

from meshwright.bench.clock import Clock
from meshwright.bench.hugging_face import causal_lm
from meshwright.bench.trial import Facts, Trial


def train(trial: Trial, clock: Clock) -> Facts:
    """Train with Fabric."""
    # Lightning is packed in two ways.
    package = import_module("lightning_fabric" if find_spec("lightning_fabric") else "lightning.fabric")
    settings, device = trial.config.train, clock.device
    precision = "bf16-mixed" if settings.precision == "bf16" else "32-true"
    fabric = package.Fabric(accelerator=device.type, devices=1, precision=precision)
    model = causal_lm(trial, clock)
    groups = [
        {"params": [one for one in model.parameters() if one.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [one for one in model.parameters() if one.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (settings.beta1, settings.beta2)
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=betas, eps=settings.eps, fused=True)
    parameters = sum(one.numel() for one in model.parameters())
    model, optimizer = fabric.setup(model, optimizer)
    batches = [torch.from_numpy(tokens) for tokens in trial.batches()]
    clock.begin()
    for batch in batches:
        rows = fabric.to_device(batch)
        # Its own shift of labels would leave out the last target.
        loss = model(rows[:, :-1], labels=rows[:, 1:], shift_labels=rows[:, 1:].contiguous()).loss
        fabric.backward(loss)
        if settings.grad_clip:
            fabric.clip_gradients(model, optimizer, max_norm=settings.grad_clip, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
        clock.stepped(loss)
    return Facts(parameters)
