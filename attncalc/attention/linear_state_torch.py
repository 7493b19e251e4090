"""The linear-state layer in torch. Shapes: B batch, T new tokens, D hidden size, s state width."""

import torch
from torch import Tensor, nn

from attncalc.attention.base import check_form
from attncalc.attention.linear_state import LinearState
from attncalc.attention.torch_base import Cache, KernelPath, choose_path, initialise, linear, make_parameters, operation
from attncalc.reach import FULL, Reach


class Layer(nn.Module):
    """One layer of `spec`, token by token; all that came before stands in the cache.

    Parameters are `spec.weights(form)`. The cache is `recurrent_state` [B, 1, s (key), s (value)] in float32
    (float64 where x is). `eps` is there for the signature that all layers share.
    """

    def __init__(
        self,
        spec: LinearState,
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

    @classmethod
    def paths(cls, spec: LinearState) -> tuple[KernelPath, ...]:  # noqa: ARG003
        """The ways to compute it."""
        return ("reference",)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; the new tokens continue what `cache` has seen."""
        batch, new_tokens, _ = x.shape
        size = self.spec.state_dim
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        q, k, v, decay = (linear(self, f"{name}_proj", x).to(wide) for name in ("q", "k", "v", "decay"))
        decay = torch.sigmoid(decay)
        kept = cache.buffers.get("recurrent_state") if cache is not None else None
        state = torch.zeros(batch, size, size, dtype=wide, device=x.device) if kept is None else kept[:, 0]
        out = []
        for t in range(new_tokens):
            now = slice(t, t + 1)
            with operation("state_update"):
                state = decay[:, t, :, None] * state + k[:, now].mT @ v[:, now]
            with operation("state_update"):
                out.append(q[:, now] @ state)
        if cache is not None:
            cache.buffers["recurrent_state"] = state[:, None]
            cache.advance(new_tokens)
        return linear(self, "o_proj", torch.cat(out, dim=1).to(x.dtype))
