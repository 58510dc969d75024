"""How long single operations take on a chip: matrix products, attention, what is bound by memory. No torch."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from meshwright.planning.blocks import Product, Work
from meshwright.planning.links import Links
from meshwright.planning.measured_links import links_of
from meshwright.planning.scenario import Scenario
from meshwright.planning.software import Constants

TILE = 128
BACKWARD_ATTENTION = 2.5
"""Products of fused attention's backward pass over those of its forward pass: five for two."""
ADAM_BYTES = 30
"""Read and written for each parameter that an optimizer step updates: two moments, gradient, wide and narrow copy."""
OWN_ADAM_BYTES = 32
"""The same of our own kernel: two moments, gradient and weight, and the gradient once more for the norm."""
LOGIT_BYTES, OWN_LOGIT_BYTES = 16, 6
"""Read and written for each logit by the loss, forward and backward: in float32; overwritten where it is."""
COMPRESSED_BYTES = {"fp16": 20.0, "bf16": 12.0, "int8": 60.0, "powersgd": 60.0, "topk": 120.0}
"""Read and written for each gradient to make it smaller and large again, as far as time goes; seen on CPU cores."""
CPU_LAYER_S = 0.001
"""Least time for a layer's forward pass on a CPU where nothing was measured."""


class Operations:
    """Times of operations, by a roofline: what the chip computes or what its memory moves, whichever is longer."""

    def __init__(self, scenario: Scenario, constants: Constants) -> None:
        chip, speed = scenario.cluster.chip, constants.chip(scenario.cluster.chip.key)
        software = scenario.software
        self.on_cpu = chip.key == "cpu"
        if self.on_cpu:
            # Nothing runs beside a core's own work, and every operation is waited for.
            layer_s = CPU_LAYER_S / scenario.cluster.share
            software = replace(
                software, compute=1.0, overlap=0.0, contention=0.0, tp_exposed=1.0, ep_exposed=1.0, passes=1.0,
                host_s=layer_s, host_experts_s=2 * layer_s, step_s=2 * layer_s, jitter=0.0,
            )  # fmt: skip
        elif scenario.compiled:
            software = replace(software, passes=software.compiled_passes, host_s=software.compiled_host_s)
        self.software = software
        self.bandwidth = chip.memory_bandwidth * 1e9
        self.common = constants.common
        share = constants.common.float32 if scenario.wide == "float32" and not self.on_cpu else speed.gemm
        wide = chip.peak(scenario.wide) * share * software.compute
        self.wide = wide
        if scenario.dtype == scenario.wide:
            self.narrow = wide
        else:
            share = speed.fp8 if scenario.dtype == "fp8" else speed.fp4
            self.narrow = chip.peak(scenario.dtype) * share * software.compute
        kernel = speed.portable_attention if software.portable_attention else speed.attention
        # PyTorch's kernels for attention in float32 take no notice of TF32.
        attends_in = "float32" if scenario.wide == "tf32" else scenario.wide
        self.attention = chip.peak(attends_in) * kernel * software.attention
        self.memory = self.bandwidth * speed.memory
        self.units = chip.units
        self.host = speed.host
        self.links: Links = links_of(scenario.cluster, constants.common)
        self.element = scenario.element
        self.flash_attention = scenario.flash_attention

    def is_narrow(self, one: Product) -> bool:
        """Whether a product is computed in the narrow dtype, where there is one."""
        return one.narrow and (self.software.narrow_experts or not one.experts)

    def product(self, one: Product) -> tuple[float, float, float]:
        """Seconds of the forward product and of those to its input and to its weights."""
        peak = self.narrow if self.is_narrow(one) else self.wide
        if one.times > 1:
            peak *= self.common.grouped * one.rows / (one.rows + self.common.rows)
        flops = 2 * one.rows * one.inner * one.outer * one.times
        return (
            self._time(flops, peak, one.rows, one.inner, one.outer, one.times),
            self._time(flops, peak, one.rows, one.outer, one.inner, one.times),
            self._time(flops, peak, one.inner, one.rows, one.outer, one.times),
        )

    def _time(self, flops: float, peak: float, rows: float, inner: float, outer: float, times: float) -> float:
        share = self.shape_share(rows, inner, outer, times)
        moved = 2 * (rows * inner + inner * outer + rows * outer) * times
        return max(flops / (peak * share), moved / self.memory)

    def shape_share(self, rows: float, inner: float, outer: float, times: float) -> float:
        """Of a product's full speed, what its shape leaves: waves of tiles that are not full, short sums."""
        waves = ceil(rows / TILE) * ceil(outer / TILE) * times / self.units
        waste = ceil(waves) / waves - 1 if waves < 64 else 0.0
        return inner / (inner + self.common.depth) / (1 + self.common.quantum * min(waste, 8.0))

    def attend(self, work: Work, own: float) -> tuple[float, float]:
        """Seconds of attention forward and backward, with so many tokens of a sequence on this rank."""
        common = self.common
        if not self.flash_attention:
            # Full products, and the scores go through memory for masks, softmax and dropout.
            forward = 2 * work.attention_flops / self.wide * 1.6 + work.scores * 2 * common.unfused / self.memory
            return forward, 2 * forward
        share = own / (own + common.attention_length) * min(1.0, 0.6 + 0.4 * work.head_dim / 128)
        forward = work.attention_flops / (self.attention * share)
        return forward, forward * BACKWARD_ATTENTION * 1.1

    def move(self, elements: float) -> float:
        """Seconds in which operations between the products read and write so many elements."""
        return elements * self.element * self.software.passes / self.memory

    def host_times(self, sparse: bool) -> tuple[float, float]:
        """Least seconds of a layer's forward and backward pass, in which the host starts its operations."""
        once = (self.software.host_experts_s if sparse else self.software.host_s) * self.host
        return once, 2 * once

    def casts(self, parameters: float) -> tuple[float, float]:
        """Seconds of narrow copies of so many parameters, and of their gradients; fitted constants have it in them."""
        return 0.0, 0.0

    def micro_step(self) -> float:
        """What a micro-step costs beside its layers and head."""
        return 0.0

    def update(self, parameters: float) -> float:
        """Seconds in which the optimizer updates so many parameters."""
        if self.software.update and not self.on_cpu:
            return parameters * OWN_ADAM_BYTES / (self.bandwidth * self.software.update)
        return parameters * ADAM_BYTES / self.memory

    def compress(self, gradients: float, kind: str) -> float:
        """Seconds in which so many gradients are made smaller for their way and large again."""
        return gradients * COMPRESSED_BYTES[kind] / self.memory

    def loss(self, logits: float, split: bool) -> float:
        """Seconds in which the loss reads and writes so many logits; ranks that split them agree in between."""
        own = self.software.name == "meshwright" and not (self.on_cpu or split or self.element == 4)
        return logits * (OWN_LOGIT_BYTES if own else LOGIT_BYTES) / self.memory

    def hide(self, communication: float, compute: float, edge: float) -> float:
        """What is seen of communication that runs beside computation; a share of it has nothing to run beside."""
        hidden = min(communication * (1 - edge), compute * self.software.overlap)
        return communication - hidden + hidden * self.software.contention
