"""One optimizer step of a model under a strategy: what every rank does, from its share of a batch to new weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from meshwright.axis_order import parse_order, ranks_in_mesh_order
from meshwright.config import RunConfig
from meshwright.errors import ExitCode, UserError
from meshwright.models.cross_entropy import IGNORED
from meshwright.models.head import Targets
from meshwright.models.hf import fill_from_hf
from meshwright.models.initialize import build_meta, initialize, materialise
from meshwright.models.mixture import load_metrics, mixtures, step_load
from meshwright.models.spec import ModelSpec
from meshwright.parallel.compile import compiles
from meshwright.parallel.data import Reduction
from meshwright.parallel.mesh import make_mesh
from meshwright.parallel.parallelize import parallelize
from meshwright.parallel.world import World
from meshwright.strategy import Strategy
from meshwright.torch_private import start_compiler_processes
from meshwright.training.beginning import Beginning
from meshwright.training.guard import Guard, Verdict
from meshwright.training.injected import factor_of_loss, flip_bit, spoil_gradient, use_too_much
from meshwright.training.loss_scale import LossScale
from meshwright.training.optimizer import make_optimizer
from meshwright.training.precision import check_device, precision_of, uses_tf32
from meshwright.training.schedule import learning_rate
from meshwright.training.tf32 import tf32_products
from meshwright.training.travel import travel_of
from meshwright.training.update import OnItsWay, unfit, update, update_if_fit, updates_on_device


class TrainingError(UserError):
    """The run cannot go on: its numbers are no longer numbers."""

    exit_code = ExitCode.DIVERGED


class TrainingStep:
    """A model with its optimizer, split over the ranks, and what one step does to them."""

    def __init__(
        self, config: RunConfig, spec: ModelSpec, strategy: Strategy, world: World, end_token: int | None = None
    ) -> None:
        """With data.mask_documents, `end_token` is the one that ends a document."""
        self.config = config
        self._end_token = end_token if config.data.mask_documents else None
        self.world = world
        self.strategy = strategy
        placement = ranks_in_mesh_order(parse_order(config.parallel.placement, strategy), strategy)
        self.mesh = make_mesh(strategy, world.device.type, placement) if world.size > 1 else None
        self.compiled = compiles(config.train.compile, strategy, world.device)
        if self.compiled and world.device.type == "cuda":
            start_compiler_processes()
        precision = precision_of(config)
        check_device(precision, world.device)
        self._tf32 = uses_tf32(config, world.device)
        self.loss_scale = LossScale(config.precision, precision.param == torch.float16)
        self.guard = Guard(config.elastic)
        self.beginning = Beginning(config, strategy)
        self.losses = torch.zeros(0)
        """This rank's share of the last step's loss, by micro-step."""
        self.own_norm = 0.0
        """The last step's norm of gradients as this rank has it."""
        # Split before it has memory, so that no rank holds more of it than its part.
        self.model = build_meta(spec, precision.stored)
        # Gradients are sums over ranks: the loss is divided by the global count of tokens. DDP's own reduction, an
        # average of a multiple, is the fastest way to the sum.
        averaged = self._averaged = strategy.sums_in_buckets and strategy.dp * strategy.cp > 1
        self._loss_factor = strategy.dp * strategy.cp if averaged else 1
        # The ranks that hold the same tokens, of those which have the loss.
        self._copies = strategy.tp
        reduction: Reduction = "mean" if averaged else "sum"
        self.parallel = parallelize(
            self.model,
            strategy,
            self.mesh,
            precision=precision,
            reduction=reduction,
            compiled=self.compiled,
            travel=replace(travel_of(config, strategy), compress_after=self.beginning.steps),
        )
        self.parallel.pulse = world.pulse
        self.data_rank = self.parallel.data_rank
        self.give_memory(spec)
        self.model.dropout_seed = config.run.seed
        self.model.train()
        # With its memory, so that what gradients leave behind on their way has a place in checkpoints.
        _ = self.parallel.replica
        self.optimizer = make_optimizer(self.parallel, config.train)
        self._mixtures = list(mixtures(self.model))

    @property
    def whole_steps(self) -> int:
        """Steps at the start whose gradients travel whole though the strategy compresses them."""
        return 0 if self.parallel.compressor is None else self.beginning.steps

    def give_memory(self, spec: ModelSpec) -> None:
        """Give the split model its memory and first values."""
        config, device = self.config, self.world.device
        # FSDP keeps shards where they were made; buffers are needed where the model computes.
        materialise(self.model, torch.device("cpu") if self.strategy.host_states == "parameters" else device)
        for module in self.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))
        if config.model.from_hf:
            fill_from_hf(self.model, Path(config.model.from_hf))
        else:
            initialize(self.model, spec, config.run.seed)

    def __call__(self, step: int, batch: dict[str, Tensor], asked_to_stop: bool = False) -> dict[str, float]:
        """Train on this rank's share of the global batch: tokens and samples, each (micro-steps, samples, ...).

        Where it is known, `valid` is how many targets of the whole batch count; else the ranks count them together.
        `ignored` marks samples that do not count.
        Gives the metrics of the whole batch, and under `stop` how many ranks were asked to stop.
        """
        pulse = self.world.pulse
        if self.parallel.compressor is not None:
            self.parallel.compressor.whole_steps = self.beginning.steps
            self.parallel.compressor.begin_step(step)
        scale, exhausted = self.loss_scale.value, self.loss_scale.exhausted
        with tf32_products(self._tf32):
            valid = self._forward_backward(batch, scale)
        spoil_gradient(self.parallel.parameters(), pulse.enter("reduce"))
        norm = self.parallel.grad_norm(scale=scale)
        rate = learning_rate(self.config.train, step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # Before anything is changed the ranks agree: what is no number on one of them is none in the sums of all. On
        # the way they learn the loss of the whole batch, and whether one of them was asked to stop.
        losses = self.losses
        # Filled in, not copied from here: a copy would wait for all that the device has to do.
        asked = torch.full((), float(asked_to_stop), dtype=losses.dtype, device=losses.device)
        own = torch.stack((losses.sum(), asked, norm.to(losses.device)))
        agreed = self.sum(torch.cat((own, self._by_replica(own[0]))))
        load = step_load(self.model, self.parallel.stages if self.model.spec.experts is not None else None)
        counted = [] if load.numbers is None else [load.numbers.to(losses)]
        # Where the ranks have counted together what counts, the host learns of it with the rest.
        unknown = [] if "valid" in batch else [valid.to(losses)[None]]
        numbers = OnItsWay(torch.cat((agreed, norm.to(losses)[None], *unknown, *counted)))
        clip = self.config.train.grad_clip
        at_once = updates_on_device(self.optimizer, self.world.device)
        if at_once:
            fault = pulse.enter("optimizer")
            update_if_fit(self.optimizer, unfit(agreed[0], agreed[2], self.guard.limits()), norm, clip, scale)
        read = iter(numbers.read())
        mean_loss, requests, norms, *by_replica, self.own_norm = islice(read, len(agreed) + 1)
        tokens = int(next(read) if unknown else valid)
        metrics = {"step": step + 1, "loss": mean_loss, "grad_norm": self.own_norm, "lr": rate, "tokens": tokens}
        metrics["loss_max"] = self._highest(by_replica, mean_loss)
        # A smaller scale answers gradients that overflow; a loss that does has nothing to do with it.
        overflows = math.isfinite(mean_loss) and not self.loss_scale.accept(norms) and not exhausted
        verdict = Verdict(learn=False) if overflows else self.guard.judge(mean_loss, norms)
        if not verdict.learn and self.parallel.compressor is not None:
            self.parallel.compressor.forget()
        if verdict.nonfinite and self.config.elastic.nonfinite == "stop":
            raise TrainingError(self._explain_divergence(metrics))
        if not at_once:
            fault = pulse.enter("optimizer")
            if verdict.learn:
                update([self.optimizer], self.parallel.parameters(), norm, clip, scale)
        flip_bit(self.parallel.named_parameters(), fault)
        # Under DDP gradients live in its buckets: dropped, they would be made anew beside them.
        self.optimizer.zero_grad(set_to_none=not self._averaged)
        if verdict.learn:
            load.move_biases()
        return self._complete(metrics, verdict, scale) | load_metrics(list(read)) | {"stop": requests}

    def _by_replica(self, loss: Tensor) -> Tensor:
        """This rank's share of the loss in the place of its data replica, so that a sum tells those of all but the
        last: that one has what is left of the whole."""
        places = loss.new_zeros(self.strategy.dp - 1)
        if self.data_rank < len(places):
            places[self.data_rank] = loss
        return places

    def _highest(self, by_replica: Sequence[float], mean: float) -> float:
        """The largest mean loss of a data replica, each of which has its part of the whole batch's loss."""
        shares, all_shares = self.strategy.data_shares, self.strategy.all_shares
        parts = [*by_replica, mean - sum(by_replica)]
        means = [part * all_shares / share for part, share in zip(parts, shares, strict=True)]
        return max(means) if all(map(math.isfinite, means)) else math.nan

    def _forward_backward(self, batch: dict[str, Tensor], scale: float) -> Tensor:
        """The passes of a step; gives how many targets of the whole batch count."""
        pulse, device = self.world.pulse, self.world.device
        spoiled = factor_of_loss(pulse.enter("forward"))
        tokens, samples = (batch[name].to(device, non_blocking=True) for name in ("tokens", "samples"))
        inputs, targets = tokens[..., :-1], self.parallel.own_tokens(tokens[..., 1:])
        documents = self._documents(inputs)
        if "ignored" in batch:
            targets = targets.masked_fill(batch["ignored"].to(device, non_blocking=True).bool()[..., None], IGNORED)
        if "valid" in batch:
            # Stays where it is known without waiting for the device.
            valid = batch["valid"].double()
        else:
            valid = self.sum((targets != IGNORED).sum().double() * self.parallel.has_loss)
        for mixture in self._mixtures:
            mixture.auxiliary_scale = scale / len(tokens)
        losses = self.losses = torch.zeros(len(tokens), dtype=torch.float64, device=device)
        # Gradients are those of a multiple of the loss.
        multiple = scale * self._loss_factor
        weight = (multiple / valid).to(device, non_blocking=True)

        def loss_of(loss: Tensor, index: int) -> Tensor:
            if spoiled is not None:
                loss = loss * spoiled
            losses[index] = loss.detach().double() / multiple
            use_too_much(pulse.enter("backward"), device)
            return loss

        batches = [
            {
                "tokens_BT": inputs[index],
                "samples_B": samples[index],
                "documents_BT": documents[index],
                "targets": Targets(targets[index], weight),
            }
            for index in range(len(tokens))
        ]
        self.parallel.forward_backward(batches, loss_of)
        return valid

    def _complete(self, metrics: dict[str, float], verdict: Verdict, scale: float) -> dict[str, float]:
        """What else there is to say of a step once it is done."""
        # JSON has no NaN.
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        if self.loss_scale.active:
            metrics |= {"loss_scale": scale}
        if self.loss_scale.active or not verdict.learn:
            metrics |= {"skipped": int(not verdict.learn)}
        metrics |= {name: 1 for name in ("nonfinite", "spike") if getattr(verdict, name)}
        sent = self.parallel.sent_bytes()
        if sent is not None:
            metrics |= {"sent_mib": sent[0] / 2**20, "sent_share": sent[0] / sent[1]}
        bubble = self.parallel.bubble()
        if bubble is not None:
            metrics |= {"pipeline_idle": bubble.measured, "pipeline_idle_predicted": bubble.predicted}
        return metrics

    @torch.no_grad()
    def evaluate(self, tokens: Tensor) -> Tensor:
        """The loss of this rank's sequences, summed over their tokens, and how many tokens that is."""
        tokens = tokens.to(self.world.device)
        inputs, targets = tokens[:, :-1], self.parallel.own_tokens(tokens[:, 1:])
        (documents,) = self._documents(inputs[None])
        weighed = Targets(targets, torch.ones((), device=self.world.device))
        batch = {"tokens_BT": inputs, "documents_BT": documents, "targets": weighed}
        with tf32_products(self._tf32):
            found = self.parallel.forward([batch], lambda loss, _: loss)
        if not found:
            return torch.zeros(2, dtype=torch.float64, device=self.world.device)
        return torch.stack((found[0].double(), (targets != IGNORED).sum().double()))

    def _documents(self, inputs_MBT: Tensor) -> Sequence[Tensor | None]:
        """Of each micro-step, the number of each token's document in its row; None where that does not matter."""
        if self._end_token is None:
            return [None] * len(inputs_MBT)
        ends = (inputs_MBT == self._end_token).long()
        return list(ends.cumsum(dim=-1) - ends)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the ranks that hold different tokens and zeros where there is no loss: a token counts once."""
        return self.world.sum(values).div_(self._copies)

    def _explain_divergence(self, metrics: dict[str, float]) -> str:
        train = self.config.train
        return (
            f"step {metrics['step']}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}: "
            f"training has diverged. The checkpoints in {Path(self.config.run.dir) / 'checkpoints'} are from before. "
            f"Lower train.lr={train.lr:g}, lengthen train.warmup_steps={train.warmup_steps}, "
            "use train.precision=float32, or let such steps be skipped with elastic.nonfinite=skip."
        )
