"""Kimi Delta Attention in torch, one step at a time and in chunks (arXiv 2510.26692).

Shapes: B batch, T new tokens, D hidden size, H q/k heads, HV value heads, K and V their widths, C chunk size.
"""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from attncalc.attention.conv_torch import convolve
from attncalc.attention.kda import KDA
from attncalc.attention.state_torch import (
    StateLayer,
    delta_chunked,
    delta_recurrent,
    keep_state,
    kept_state,
    l2_norm,
    wide,
)
from attncalc.attention.torch_base import (
    Cache,
    KernelPath,
    linear,
    operation,
    rms_norm,
    split_heads,
)

DECAY_BOUND = -5.0


def decayed_products(q: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """sum_d k_c k_i exp(G_c - G_i) for i < c and the same of q_c for i <= c, both [B, HV, C, C].

    q, k and the cumulative log-decay G [B, HV, C, K] of one chunk. G falls without bound, so that exp(-G) alone could
    overflow: keys are decayed for each query, [B, HV, C, C, K], where no exponent is above 0.
    """
    size = k.shape[2]
    lower = torch.ones(size, size, dtype=torch.bool, device=k.device).tril()
    exponent = (total.unsqueeze(3) - total.unsqueeze(2)).masked_fill(~lower[..., None], float("-inf"))
    decayed = k.unsqueeze(2) * exponent.exp()
    with operation("chunk_kk"):
        kk = (decayed @ k.unsqueeze(-1)).squeeze(-1)
    with operation("chunk_qk"):
        qk = (decayed @ q.unsqueeze(-1)).squeeze(-1)
    return kk.tril(-1), qk


def decayed_products_in_blocks(q: Tensor, k: Tensor, total: Tensor, block: int = 16) -> tuple[Tensor, Tensor]:
    """The same in blocks: G is taken relative to the first row of each block of queries.

    For queries c of a block that begins at row r and keys i < r, exp(G_c - G_i) = exp(G_c - G_r) exp(G_r - G_i) with
    no exponent above 0: one matrix product. Only the blocks on the diagonal decay keys for each query.
    """
    kk, qk = k.new_zeros(*k.shape[:3], k.shape[2]), k.new_zeros(*k.shape[:3], k.shape[2])
    for r in range(0, k.shape[2], block):
        rows = slice(r, r + block)
        k_rows, q_rows, first = k[:, :, rows], q[:, :, rows], total[:, :, r : r + 1]
        kk[:, :, rows, rows], qk[:, :, rows, rows] = decayed_products(q_rows, k_rows, total[:, :, rows])
        if r:
            down = (total[:, :, rows] - first).exp()
            keys = (k[:, :, :r] * (first - total[:, :, :r]).exp()).mT
            with operation("chunk_kk"):
                kk[:, :, rows, :r] = (k_rows * down) @ keys
            with operation("chunk_qk"):
                qk[:, :, rows, :r] = (q_rows * down) @ keys
    return kk, qk


class Layer(StateLayer[KDA]):
    """One layer of `spec`, in the form `recurrent` or `chunked`; all that came before stands in the cache.

    Parameters are `spec.weights(form)`. The cache is `conv_state` [B, 1, W - 1, channels] in the dtype of x and
    `recurrent_state` [B, HV, K, V] in float32 (float64 where x is); it has the same tensors in both forms. Path
    `fast` forms the decayed products of a chunk in blocks of 16 tokens, with fewer FLOPs than the dense count;
    the recurrent form has no other way. A lower-bounded decay is at least `DECAY_BOUND`.
    """

    counted: ClassVar[tuple[KernelPath, ...]] = ("reference",)
    """The paths whose products are those of the specification."""

    @classmethod
    def paths(cls, spec: KDA) -> tuple[KernelPath, ...]:  # noqa: ARG003
        """The ways to compute it; the first counts FLOPs as the specification does."""
        return ("reference", "fast")

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; the new tokens continue what `cache` has seen."""
        spec = self.spec
        batch, new_tokens, _ = x.shape
        H, HV, K, V = spec.num_heads, spec.num_v_heads, spec.head_k_dim, spec.head_v_dim
        mixed = torch.cat([linear(self, f"{n}_proj", x) for n in "qkv"], dim=-1)
        if spec.conv_kernel:
            taps = torch.cat([self.get_parameter(f"{n}_conv1d.weight") for n in "qkv"])
            mixed = convolve(mixed, taps, cache)
        q, k, v = torch.split(mixed.to(wide(x)), [H * K, H * K, HV * V], dim=-1)
        q, k = (l2_norm(split_heads(a, H)).repeat_interleave(HV // H, dim=1) for a in (q, k))
        v, g = split_heads(v, HV), split_heads(self._decay(x), HV)
        beta = torch.sigmoid(linear(self, "b_proj", x).to(wide(x))).transpose(1, 2)
        arguments = (q * K**-0.5, k, v, g, beta, kept_state(cache, v, K))
        if self.form == "chunked":
            decayed = decayed_products_in_blocks if self.path == "fast" else decayed_products
            o, state = delta_chunked(*arguments, size=spec.chunk_size, decayed=decayed)
        else:
            o, state = delta_recurrent(*arguments)
        keep_state(cache, state, new_tokens)
        o = rms_norm(o.transpose(1, 2), self.get_parameter("o_norm.weight").to(wide(x)), self.eps)
        if spec.gate != "none":
            source = linear(self, "g_a_proj", x) if spec.gate == "low_rank" else x
            gate = linear(self, "g_b_proj" if spec.gate == "low_rank" else "g_proj", source)
            o = o * torch.sigmoid(gate.to(wide(x))).view(batch, new_tokens, HV, V)
        return linear(self, "o_proj", o.reshape(batch, new_tokens, HV * V).to(x.dtype))

    def _decay(self, x: Tensor) -> Tensor:
        """Log-decay g [B, T, HV * K], in float32 at least."""
        spec = self.spec
        f = (
            linear(self, "f_b_proj", linear(self, "f_a_proj", x))
            if spec.decay == "low_rank"
            else linear(self, "f_proj", x)
        )
        f = f.to(wide(x)) + self.get_parameter("dt_bias").to(wide(x))
        rate = self.get_parameter("A_log").to(wide(x)).exp().repeat_interleave(spec.head_k_dim)
        return DECAY_BOUND * torch.sigmoid(rate * f) if spec.lower_bound else -rate * functional.softplus(f)
