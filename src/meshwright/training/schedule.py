"""The learning rate of a step: a pure function of the step and the settings."""

from __future__ import annotations

import math

from meshwright.config import TrainSection


def learning_rate(train: TrainSection, step: int) -> float:
    """The learning rate of optimizer step `step`, counted from 0."""
    if step < train.warmup_steps:
        rise = train.lr - train.warmup_lr
        if train.warmup == "log":
            return train.warmup_lr + rise * math.log(step + 1) / math.log(max(2, train.warmup_steps))
        return train.warmup_lr + rise * (step + 1) / train.warmup_steps
    end = train.schedule_steps or train.steps
    match train.schedule:
        case "constant":
            return train.lr
        case "cosine":
            share = (1 + math.cos(math.pi * _progress(step, train.warmup_steps, end))) / 2
        case "linear":
            share = 1 - _progress(step, train.warmup_steps, end)
        case "wsd":
            share = 1 - _progress(step, max(train.warmup_steps, end - decay_length(train, end)), end)
    return train.min_lr + (train.lr - train.min_lr) * share


def decay_length(train: TrainSection, end: int) -> int:
    """Steps in which a wsd schedule decays that ends at step `end`."""
    return train.decay_steps or max(1, end // 10)


def _progress(step: int, start: int, end: int) -> float:
    """How far a decay from `start` has come; the last step reaches 1 - 1 / length, the step after it 1."""
    return min(1.0, max(0.0, (step - start) / max(1, end - start)))
