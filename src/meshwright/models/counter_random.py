"""Random numbers that are a function of (key, index): no state, no order, the same on every device.

Initial weights and dropout masks take them, so that neither depends on how a model or a batch is split: whoever holds
element i computes the number of element i. The mixing is splitmix64's finaliser, on int64 tensors that wrap around.
"""

from __future__ import annotations

import math

import torch
import xxhash
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_ITS_INVERSE = pow(_GOLDEN, -1, 1 << 64)
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def key_of(*parts: object) -> int:
    """A 64-bit key from anything that prints the same everywhere (seed, names, numbers)."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, parts)).encode())


def random_bits(key: int | Tensor, index: Tensor) -> Tensor:
    """64 random bits for each index, as int64."""
    # Keys are themselves well mixed (hashes, or bits from here): each is a random start in one long sequence.
    return _mix(index * _signed(_GOLDEN) + (_signed(key) if isinstance(key, int) else key))


def normal(key: int, index: Tensor) -> Tensor:
    """Float64 from the standard normal distribution for each index (Box-Muller on the two halves of the bits)."""
    bits = random_bits(key, index)
    # 32 bits each; the half keeps the logarithm away from zero.
    radius = (_logical_shift(bits, 32).double() + 0.5) * 2.0**-32
    angle = (bits & 0xFFFFFFFF).double() * (2.0**-32 * 2 * math.pi)
    return radius.log_().mul_(-2.0).sqrt_().mul_(angle.cos_())


def _mix(bits: Tensor) -> Tensor:
    """The finaliser, in place: the argument is a fresh intermediate of the caller."""
    bits.bitwise_xor_(_logical_shift(bits, 30)).mul_(_signed(_FIRST))
    bits.bitwise_xor_(_logical_shift(bits, 27)).mul_(_signed(_SECOND))
    return bits.bitwise_xor_(_logical_shift(bits, 31))


def _logical_shift(bits: Tensor, by: int) -> Tensor:
    # `>>` of int64 copies the sign bit; the mask takes the copies away.
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def token_keys(seed: int, samples_B: Tensor, positions_BT: Tensor) -> Tensor:
    """A key for each token of a batch, from the sample's global number and the token's place in it."""
    return random_bits(random_bits(key_of(seed, "token"), samples_B)[:, None], positions_BT)


def keep_mask(token_keys_BT: Tensor, site: int, channels: int, dropout: float) -> Tensor:
    """Which of the channels of each token are kept at a dropout site; True with probability 1 - dropout."""
    keys = random_bits(token_keys_BT, torch.full((), site, dtype=torch.int64, device=token_keys_BT.device))
    channel = torch.arange(channels, device=token_keys_BT.device)
    threshold = _signed(int(dropout * 2.0**64) - (1 << 63)) if dropout else -(1 << 63)
    # keys + channel * golden. A compiler would multiply the channels in 32 bits, where the factor does not fit.
    start = keys * _signed(_ITS_INVERSE)
    return _mix((start[..., None] + channel) * _signed(_GOLDEN)) >= threshold
