"""Which of PyTorch's attention kernels runs, by device, dtype and head size: said here, not left to be found out.

    cuDNN       16 bits on Hopper and newer, heads of up to 128; in training, since it plans anew for every new shape
    flash       16 bits on Ampere and newer, heads of up to 256; takes no mask
    efficient   what is left of 16 bits, masks, float32; knows no grouped queries, so keys and values are repeated
    math        products and a softmax, all scores in memory: what float64 asks for, and else nobody's choice

Left to itself, PyTorch takes the last one in silence where grouped queries meet a mask or float32. Here it runs only
where nothing else can, and `math_reason` says so before a run starts. Where PyTorch lacks a kernel that is named here,
it raises an error. On CPUs it chooses by itself, among fused kernels for every dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwright.models.linear import HALVES

PLAIN = "in plain products, slow and with all scores in memory"
Capability = int
"""NVIDIA's compute capability, times ten: 80 is an A100, 90 an H100. Layers ask for it while they are traced, and of
tuples that are constants compilers have no comparison (torch 2.11)."""


def attend_with_kernel(
    q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = False, mask: Tensor | None = None
) -> Tensor:
    """Attention by the kernel for this device, dtype and head size; K key-value heads for H query heads."""
    if q_BHTD.device.type != "cuda":
        return _attend(q_BHTD, k_BKSD, v_BKSD, causal, mask)
    capability, masked, training = capability_of(q_BHTD.device), mask is not None, torch.is_grad_enabled()
    kernels = kernels_for(capability, q_BHTD.dtype, q_BHTD.shape[-1], masked=masked, training=training)
    return attend_with(kernels, q_BHTD, k_BKSD, v_BKSD, causal=causal, mask=mask)


def attend_with(
    kernels: list[SDPBackend], q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool, mask: Tensor | None
) -> Tensor:
    """Attention by the first of these kernels that can; an error where none of them can."""
    if kernels == [SDPBackend.EFFICIENT_ATTENTION]:
        k_BKSD, v_BKSD = (repeat_heads(x, q_BHTD.shape[1]) for x in (k_BKSD, v_BKSD))
    with sdpa_kernel(kernels, set_priority=True):
        return _attend(q_BHTD, k_BKSD, v_BKSD, causal, mask)


def repeat_heads(x_BKSD: Tensor, heads: int) -> Tensor:
    """Keys or values once for every query head."""
    return x_BKSD if x_BKSD.shape[1] == heads else x_BKSD.repeat_interleave(heads // x_BKSD.shape[1], dim=1)


def _attend(q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, causal: bool, mask: Tensor | None) -> Tensor:
    grouped = q_BHTD.shape[1] != k_BKSD.shape[1]
    return F.scaled_dot_product_attention(q_BHTD, k_BKSD, v_BKSD, mask, is_causal=causal, enable_gqa=grouped)


def kernels_for(
    capability: Capability, dtype: torch.dtype, head_size: int, *, masked: bool, training: bool
) -> list[SDPBackend]:
    """The kernels of a GPU that may run, the first choice first."""
    if without_kernel(capability, dtype, head_size, masked=masked) is not None:
        return [SDPBackend.MATH]
    found = []
    if dtype in HALVES and not masked:
        # A kernel that pads to 8 exists, but it is the next one.
        if training and capability >= 90 and head_size <= 128 and head_size % 8 == 0:
            found.append(SDPBackend.CUDNN_ATTENTION)
        if _has_flash(capability, head_size):
            found.append(SDPBackend.FLASH_ATTENTION)
    return found or [SDPBackend.EFFICIENT_ATTENTION]


def without_kernel(capability: Capability, dtype: torch.dtype, head_size: int, *, masked: bool) -> str | None:
    """Why a GPU has no fused kernel for such attention; None where it has one."""
    if dtype in HALVES and not masked and _has_flash(capability, head_size):
        return None
    if dtype not in (*HALVES, torch.float32):
        return f"no fused kernel computes in {_name(dtype)}"
    if dtype == torch.bfloat16 and capability < 80:
        return "GPUs before Ampere have no fused kernel in bfloat16"
    multiple = 8 if dtype in HALVES else 4
    if head_size % multiple:
        return f"fused kernels in {_name(dtype)} want heads of a multiple of {multiple}"
    return None


def math_reason(device: torch.device, dtype: torch.dtype, head_size: int, *, masked: bool) -> str | None:
    """In words, why attention of such heads runs as plain products on a device, where nobody asked for that.

    `masked`: tokens see their documents or a window only.
    """
    if device.type != "cuda" or dtype == torch.float64:
        return None
    masked = masked and not takes_blocks(device, dtype, head_size)
    reason = without_kernel(capability_of(device), dtype, head_size, masked=masked)
    if reason is None:
        return None
    return f"{PLAIN}: {reason}, and here are heads of {head_size} in {_name(dtype)}"


def takes_blocks(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether attention that leaves out blocks of tokens (`document_attention`) has a kernel: generated by Triton."""
    if device.type != "cuda" or capability_of(device) < 80:
        return False
    # Its products want at least 16 columns; wider rows than these do not fit beside each other on a chip.
    return 16 <= head_size <= (256 if dtype in HALVES else 128) and dtype in (*HALVES, torch.float32)


def capability_of(device: torch.device) -> Capability:
    """The compute capability of a GPU."""
    return int(_capability_words(device))


# To a compiler it is a constant; a word, for it might take a number for one that varies.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _capability_words(device: torch.device) -> str:
    return "{}{}".format(*torch.cuda.get_device_capability(device))


def _has_flash(capability: Capability, head_size: int) -> bool:
    if 86 <= capability < 90 or capability >= 120:
        # Gradients of these sizes do not fit into the smaller shared memory of such chips.
        return head_size <= 192 or 224 < head_size <= 256
    return capability >= 80 and head_size <= 256


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
