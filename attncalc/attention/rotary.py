"""Rotary position embedding, plain, with YaRN, or with given divisors of the frequencies.

Sources: RoFormer (arXiv 2104.09864) section 3.2; YaRN (arXiv 2309.00071) sections 3.2 and 3.4; LongRoPE
(arXiv 2402.13753) for divisors per frequency.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Table(NamedTuple):
    """cos and sin, [T, width / 2] each, of the angles of T positions."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class Rotary:
    """How positions turn pairs of values.

    `interleaved`: a pair is two neighbours (DeepSeek) instead of two values half the width apart (Llama).
    `factor`: YaRN's extension of `original_max_position` tokens; None is plain RoPE. `divisors`: one for each
    frequency (LongRoPE's short or long factors). `attention_factor` multiplies cos and sin; None is YaRN's own.
    """

    theta: float = 10000.0
    interleaved: bool = False
    factor: float | None = None
    original_max_position: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    divisors: tuple[float, ...] = ()
    attention_factor: float | None = None

    @property
    def magnitude(self) -> float:
        """What cos and sin are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._m(self.mscale) / self._m(self.mscale_all_dim)
        return self._m(1.0)

    @property
    def softmax_factor(self) -> float:
        """m^2 with m = 0.1 * mscale_all_dim * ln(factor) + 1: what DeepSeek multiplies the softmax scale by."""
        return self._m(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _m(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor and self.factor > 1 else 1.0

    def inverse_frequencies(self, width: int, device: torch.device | None = None) -> Tensor:
        """[width / 2] angles per position, float64."""
        exponents = torch.arange(0, width, 2, dtype=torch.float64, device=device) / width
        plain = self.theta**-exponents
        if self.divisors:
            return plain / torch.tensor(self.divisors, dtype=torch.float64, device=device)
        if self.factor is None:
            return plain
        low, high = self._turning(self.beta_fast, width), self._turning(self.beta_slow, width)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        index = torch.arange(width // 2, dtype=torch.float64, device=device)
        # A difference of 0 would divide by 0: the published code uses 0.001 as well.
        slow = ((index - low) / ((high - low) or 0.001)).clamp(0, 1)
        return plain * (1 - slow) + plain / self.factor * slow

    def _turning(self, rotations: float, width: int) -> float:
        """The index of the frequency that turns `rotations` times within the original context."""
        return width * math.log(self.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

    def table(self, start: int, tokens: int, width: int, device: torch.device, step: int = 1) -> Table:
        """The angles of so many positions, `step` apart. float64, because float32 is off by 1e-2 at 10^5."""
        positions = start + step * torch.arange(tokens, dtype=torch.float64, device=device)
        angles = positions[:, None] * self.inverse_frequencies(width, device)
        return Table(angles.cos() * self.magnitude, angles.sin() * self.magnitude)

    def rotate(self, x: Tensor, table: Table) -> Tensor:
        """Turn the first values of each head, [..., T, d] -> [..., T, d]; as many as the table has angles for."""
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        cos, sin = table.cos.to(wide), table.sin.to(wide)
        width = 2 * cos.shape[-1]
        turned, rest = x[..., :width], x[..., width:]
        if self.interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
            out = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        else:
            a, b = turned.chunk(2, dim=-1)
            out = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        out = out.to(x.dtype)
        return torch.cat((out, rest), dim=-1) if rest.shape[-1] else out
