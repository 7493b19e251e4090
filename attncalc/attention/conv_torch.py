"""The short causal convolution that several layers share, with the columns that it keeps."""

import torch
from torch import Tensor
from torch.nn import functional

from attncalc.attention.torch_base import Cache, operation


def convolve(
    mixed: Tensor, taps: Tensor, cache: Cache | None, bias: Tensor | None = None, *, silu: bool = True
) -> Tensor:
    """The causal depthwise convolution of [B, T, channels] with `taps` [channels, 1, W], and its SiLU.

    What came before stands in `conv_state` [B, 1, W - 1, channels] of the cache, where the last columns are kept.
    """
    kept = taps.shape[-1] - 1
    past = cache.buffers.get("conv_state") if cache is not None else None
    seen = functional.pad(mixed, (0, 0, kept, 0)) if past is None else torch.cat((past[:, 0], mixed), dim=1)
    if cache is not None and kept:
        # A slice would keep the whole input alive.
        cache.buffers["conv_state"] = seen[:, None, seen.shape[1] - kept :].clone()
    with operation("conv"):
        out = functional.conv1d(seen.mT, taps, bias, groups=taps.shape[0])
    return functional.silu(out.mT) if silu else out.mT
