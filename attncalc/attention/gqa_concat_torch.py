"""The torch layer of `attncalc.attention.gqa_concat`: attention over the hidden state beside the embedding."""

import torch

from attncalc.attention import gqa_torch
from attncalc.attention.gqa_concat import ConcatGQA
from attncalc.attention.rotary import Rotary
from attncalc.attention.torch_base import KernelPath
from attncalc.reach import FULL, Reach


class Layer(gqa_torch.Layer):
    """[B, T, input_size] -> [B, T, D]; parameters, cache and options are those of GQA.

    `softmax_scale` None is (d/2)^-1/2 (arXiv 2405.16712).
    """

    def __init__(
        self,
        spec: ConcatGQA,
        reach: Reach = FULL,
        form: str = "direct",
        *,
        cached: str | None = None,
        path: KernelPath | None = None,
        rotary: Rotary | None = None,
        softmax_scale: float | None = None,
        softcap: float = 50.0,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            spec,
            reach,
            form,
            cached=cached,
            path=path,
            rotary=rotary,
            softmax_scale=(spec.head_dim / 2) ** -0.5 if softmax_scale is None else softmax_scale,
            softcap=softcap,
            eps=eps,
            device=device,
            dtype=dtype,
        )
