"""Kimi Delta Attention in torch, one step at a time and in chunks (arXiv 2510.26692).

Shapes: B batch, T new tokens, D hidden size, H q/k heads, HV value heads, K and V their widths, C chunk size.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from attncalc.attention.base import check_form
from attncalc.attention.conv_torch import convolve
from attncalc.attention.kda import KDA
from attncalc.attention.torch_base import Cache, KernelPath, choose_path, initialise, linear, make_parameters, operation
from attncalc.reach import FULL, Reach

DECAY_BOUND = -5.0
L2_EPS = 1e-6


def l2_norm(x: Tensor) -> Tensor:
    """L2 norm: x / sqrt(sum x^2 + 1e-6) over the last axis, as flash-linear-attention does."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + L2_EPS)


def recurrent_core(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The delta rule token by token: o [B, HV, T, V] and the new state [B, HV, K, V].

    q and k [B, HV, T, K] are normalised, q scaled; v [B, HV, T, V], log-decay g [B, HV, T, K], beta [B, HV, T].
    """
    out = []
    for t in range(q.shape[2]):
        q_t, k_t, v_t = q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1]
        state = state * g[:, :, t, :, None].exp()
        with operation("state_update"):
            predicted = k_t @ state
        u = beta[:, :, t, None, None] * (v_t - predicted)
        with operation("state_update"):
            state = state + k_t.mT @ u
        with operation("state_update"):
            out.append(q_t @ state)
    return torch.cat(out, dim=2), state


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


def chunked_core(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, *, size: int, blocks: bool = False
) -> tuple[Tensor, Tensor]:
    """The delta rule in chunks of `size` tokens; arguments and results as of `recurrent_core`.

    With G the cumulative g in the chunk, A = beta_c k_c k_i exp(G_c - G_i) below the diagonal and M = (I + A)^-1:
    w = M (beta exp(G) k), u = M (beta v), v' = u - w S, o = (exp(G) q) S + (q_c k_i exp(G_c - G_i)) v',
    S <- Diag(exp G_C) S + (exp(G_C - G) k)^T v'. The last chunk is padded with tokens that change nothing.
    """
    new_tokens = q.shape[2]
    pad = -new_tokens % size
    q, k, v, g = (functional.pad(x, (0, 0, 0, pad)) for x in (q, k, v, g))
    beta = functional.pad(beta, (0, pad)).unsqueeze(-1)
    identity = torch.eye(size, dtype=q.dtype, device=q.device)
    out = []
    for start in range(0, new_tokens + pad, size):
        qc, kc, vc, gc, bc = (x[:, :, start : start + size] for x in (q, k, v, g, beta))
        total = gc.cumsum(2)
        kk, qk = decayed_products_in_blocks(qc, kc, total) if blocks else decayed_products(qc, kc, total)
        system = identity + bc * kk
        inverse = torch.linalg.solve_triangular(system, identity.expand_as(system), upper=False, unitriangular=True)
        with operation("chunk_w"):
            w = inverse @ (bc * total.exp() * kc)
        with operation("chunk_u"):
            u = inverse @ (bc * vc)
        with operation("state_update"):
            corrected = u - w @ state
        with operation("state_update"):
            read = (qc * total.exp()) @ state
        with operation("chunk_value"):
            out.append(read + qk @ corrected)
        last = total[:, :, -1:]
        with operation("state_update"):
            state = state * last.exp().mT + (kc * (last - total).exp()).mT @ corrected
    return torch.cat(out, dim=2)[:, :, :new_tokens], state


class Layer(nn.Module):
    """One layer of `spec`, in the form `recurrent` or `chunked`; all that came before stands in the cache.

    Parameters are `spec.weights(form)`. The cache is `conv_state` [B, 1, W - 1, channels] in the dtype of x and
    `recurrent_state` [B, HV, K, V] in float32 (float64 where x is); it has the same tensors in both forms. Path
    `fast` forms the decayed products of a chunk in blocks of 16 tokens, with fewer FLOPs than the dense count;
    the recurrent form has no other way. A lower-bounded decay is at least `DECAY_BOUND`.
    """

    def __init__(
        self,
        spec: KDA,
        reach: Reach = FULL,
        form: str = "recurrent",
        *,
        cached: str | None = None,
        path: KernelPath | None = None,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.reach, self.form, self.cached = spec, reach, check_form(spec, form), cached or form
        if reach != FULL:
            raise ValueError(f"a state holds all that came before: reach {reach.text} does not apply")
        self.path = choose_path(path, self.paths(spec), "this layer has no other")
        self.eps = eps
        make_parameters(self, spec.weights(form), device=device, dtype=dtype)
        initialise(self)

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
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        mixed = self._convolution(torch.cat([linear(self, f"{n}_proj", x) for n in "qkv"], dim=-1), cache)
        q, k, v = torch.split(mixed.to(wide), [H * K, H * K, HV * V], dim=-1)

        def heads(values: Tensor, count: int) -> Tensor:
            return values.view(batch, new_tokens, count, -1).transpose(1, 2)

        q, k = (l2_norm(heads(a, H)).repeat_interleave(HV // H, dim=1) for a in (q, k))
        g = heads(self._decay(x).to(wide), HV)
        beta = torch.sigmoid(linear(self, "b_proj", x).to(wide)).transpose(1, 2)
        state = cache.buffers.get("recurrent_state") if cache is not None else None
        if state is None:
            state = torch.zeros(batch, HV, K, V, dtype=wide, device=x.device)
        arguments = (q * K**-0.5, k, heads(v, HV), g, beta, state)
        if self.form == "chunked":
            o, state = chunked_core(*arguments, size=spec.chunk_size, blocks=self.path == "fast")
        else:
            o, state = recurrent_core(*arguments)
        if cache is not None:
            cache.buffers["recurrent_state"] = state
            cache.advance(new_tokens)
        o = o.transpose(1, 2)
        o = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + self.eps) * self.get_parameter("o_norm.weight").to(wide)
        if spec.gate != "none":
            source = linear(self, "g_a_proj", x) if spec.gate == "low_rank" else x
            gate = linear(self, "g_b_proj" if spec.gate == "low_rank" else "g_proj", source)
            o = o * torch.sigmoid(gate.to(wide)).view(batch, new_tokens, HV, V)
        return linear(self, "o_proj", o.reshape(batch, new_tokens, HV * V).to(x.dtype))

    def _convolution(self, mixed: Tensor, cache: Cache | None) -> Tensor:
        """SiLU of the causal depthwise convolution of q, k and v [B, T, channels] over the last W tokens."""
        if not self.spec.conv_kernel:
            return mixed
        return convolve(mixed, torch.cat([self.get_parameter(f"{n}_conv1d.weight") for n in "qkv"]), cache)

    def _decay(self, x: Tensor) -> Tensor:
        """Log-decay g [B, T, HV * K], in float32 at least."""
        spec = self.spec
        f = (
            linear(self, "f_b_proj", linear(self, "f_a_proj", x))
            if spec.decay == "low_rank"
            else linear(self, "f_proj", x)
        )
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        f = f.to(wide) + self.get_parameter("dt_bias").to(wide)
        rate = self.get_parameter("A_log").to(wide).exp().repeat_interleave(spec.head_k_dim)
        return DECAY_BOUND * torch.sigmoid(rate * f) if spec.lower_bound else -rate * functional.softplus(f)
