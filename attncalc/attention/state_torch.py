"""What layers with a recurrent state share in torch: their construction, the delta rule, and retention.

Shapes: B batch, T new tokens, H heads (HV of values in a delta rule), K and V their widths, C chunk size.
"""

from collections.abc import Callable
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from attncalc.attention.base import Attention, check_form
from attncalc.attention.torch_base import Cache, KernelPath, choose_path, initialise, make_parameters, operation
from attncalc.reach import FULL, Reach

L2_EPS = 1e-6

Decayed = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""q, k [B, HV, C, K] and the cumulative log-decay of one chunk -> the decayed k k^T (i < c) and q k^T (i <= c)."""


S = TypeVar("S", bound=Attention)


class StateLayer(nn.Module, Generic[S]):
    """One layer of `spec`, whose parameters are `spec.weights(form)` and whose cache holds all that came before.

    `form` None is the variant's first. `eps` None is `default_eps`; variants without a norm have it for the signature
    that all layers share.

    Raises:
        AttncalcError: the variant has no such form.
        ValueError: a reach that is not full, or a path that the layer has not.
    """

    default_eps: ClassVar[float] = 1e-6

    def __init__(
        self,
        spec: S,
        reach: Reach = FULL,
        form: str | None = None,
        *,
        cached: str | None = None,
        path: KernelPath | None = None,
        eps: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        form = spec.forms[0] if form is None else form
        self.spec, self.reach, self.form, self.cached = spec, reach, check_form(spec, form), cached or form
        if reach != FULL:
            raise ValueError(f"a state holds all that came before: reach {reach.text} does not apply")
        self.path = choose_path(path, self.paths(spec), "this layer has no other")
        self.eps = self.default_eps if eps is None else eps
        make_parameters(self, spec.weights(form), device=device, dtype=dtype)
        initialise(self)

    @classmethod
    def paths(cls, spec: S) -> tuple[KernelPath, ...]:  # noqa: ARG003
        """The ways to compute it; the first counts FLOPs as the specification does."""
        return ("reference",)


def wide(x: Tensor) -> torch.dtype:
    """The dtype of states and decays: float32, or float64 where x is."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def l2_norm(x: Tensor) -> Tensor:
    """L2 norm: x / sqrt(sum x^2 + 1e-6) over the last axis, as flash-linear-attention does."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + L2_EPS)


def kept_state(cache: Cache | None, values: Tensor, width: int) -> Tensor:
    """The state that `cache` holds, or zeros [B, H, width, V] for values [B, H, T, V]."""
    state = cache.buffers.get("recurrent_state") if cache is not None else None
    if state is not None:
        return state
    return values.new_zeros(*values.shape[:2], width, values.shape[3])


def keep_state(cache: Cache | None, state: Tensor, new_tokens: int) -> None:
    """Put the state into the cache and count the new tokens."""
    if cache is not None:
        cache.buffers["recurrent_state"] = state
        cache.advance(new_tokens)


def delta_recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The delta rule token by token: o [B, HV, T, V] and the new state [B, HV, K, V].

    q and k [B, HV, T, K] are normalised, q scaled; v [B, HV, T, V], beta [B, HV, T]; log-decay g [B, HV, T, K], or
    [B, HV, T, 1] for one decay of a whole head.
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


def head_decayed(q: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """`Decayed` with one decay for a head, G [B, HV, C, 1]: it stands outside the products."""
    size = k.shape[2]
    upper = torch.ones(size, size, dtype=torch.bool, device=k.device).triu(1)
    decay = (total - total.mT).masked_fill(upper, float("-inf")).exp()
    with operation("chunk_kk"):
        kk = k @ k.mT
    with operation("chunk_qk"):
        qk = q @ k.mT
    return (kk * decay).tril(-1), qk * decay


def delta_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    size: int,
    decayed: Decayed = head_decayed,
) -> tuple[Tensor, Tensor]:
    """The delta rule in chunks of `size` tokens; arguments and results as of `delta_recurrent`.

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
        kk, qk = decayed(qc, kc, total)
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


def retention_recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """S_t = exp(g) S_{t-1} + k v^T, o = S_t^T q: o [B, H, T, V] and the new state [B, H, K, V].

    q, k [B, H, T, K], v [B, H, T, V], and one fixed log-decay for each head, g [H].
    """
    decay, out = g.exp().view(-1, 1, 1), []
    for t in range(q.shape[2]):
        now = slice(t, t + 1)
        with operation("state_update"):
            state = decay * state + k[:, :, now].mT @ v[:, :, now]
        with operation("state_update"):
            out.append(q[:, :, now] @ state)
    return torch.cat(out, dim=2), state


def retention_chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, *, size: int) -> tuple[Tensor, Tensor]:
    """The same in chunks of `size` tokens; o_c = exp(c g) q_c S + sum over i <= c of exp((c - i) g) (q_c k_i) v_i.

    The last chunk is padded with zeros, over which nothing decays.
    """
    new_tokens = q.shape[2]
    pad = -new_tokens % size
    q, k, v = (functional.pad(x, (0, 0, 0, pad)) for x in (q, k, v))
    row = torch.arange(1, size + 1, dtype=g.dtype, device=g.device)
    upper = torch.ones(size, size, dtype=torch.bool, device=g.device).triu(1)
    pairs = (g.view(-1, 1, 1) * (row[:, None] - row)).masked_fill(upper, float("-inf")).exp()
    reads = (g[:, None] * row).exp().unsqueeze(-1)
    out = []
    for start in range(0, new_tokens + pad, size):
        qc, kc, vc = (x[:, :, start : start + size] for x in (q, k, v))
        length = min(size, new_tokens - start)
        left = (g[:, None] * (length - row).clamp(min=0)).exp().unsqueeze(-1)
        with operation("chunk_qk"):
            qk = qc @ kc.mT
        with operation("state_update"):
            read = (qc * reads) @ state
        with operation("chunk_value"):
            out.append(read + (qk * pairs) @ vc)
        with operation("state_update"):
            state = (g * length).exp().view(-1, 1, 1) * state + (kc * left).mT @ vc
    return torch.cat(out, dim=2)[:, :, :new_tokens], state
