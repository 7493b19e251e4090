"""The torch layer of `attncalc.attention.gla`: grouped latent attention in its three forms."""

import torch
from torch import Tensor, nn

from attncalc.attention.gla import GLA
from attncalc.attention.latent_torch import PATHS, head_product
from attncalc.attention.rotary import Rotary
from attncalc.attention.torch_base import (
    Cache,
    KernelPath,
    attend_beside,
    choose_path,
    initialise,
    linear,
    make_parameters,
    rms_norm,
    split_heads,
)
from attncalc.reach import FULL, Reach


class Layer(nn.Module):
    """GLA (arXiv 2505.21487); all forms have the same parameters.

    Parameters are `spec.weights(form)`. The cache is c_kv [B, h_c, S, L] and k_pe [B, 1, S, R]; where `cached` is
    decompressed, K [B, H, S, P + R] and V [B, H, S, V]. `softmax_scale` None is (P + R)^-1/2 in every form.
    """

    def __init__(
        self,
        spec: GLA,
        reach: Reach = FULL,
        form: str = "absorbed",
        *,
        cached: str | None = None,
        path: KernelPath | None = None,
        rotary: Rotary | None = None,
        softmax_scale: float | None = None,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        cached = cached or form
        if form not in spec.forms or cached not in spec.forms:
            raise ValueError(f"form {form!r}, cached {cached!r}: the forms are {', '.join(spec.forms)}")
        if cached == "decompressed" and form != "decompressed":
            raise ValueError(f"form {form!r} reads latents, which are not kept where K and V are")
        self.spec, self.reach, self.form, self.cached, self.eps = spec, reach, form, cached, eps
        self.path = choose_path(path, self.paths(spec), "no such path")
        self.rotary = rotary or Rotary()
        width = spec.qk_nope_head_dim + spec.qk_rope_head_dim
        self.softmax_scale = width**-0.5 if softmax_scale is None else softmax_scale
        make_parameters(self, spec.weights(form), device=device, dtype=dtype)
        initialise(self)

    @classmethod
    def paths(cls, spec: GLA) -> tuple[KernelPath, ...]:  # noqa: ARG003
        """The ways to compute it, the preferred first."""
        return PATHS

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; the new tokens come after the `cache.length` that the cache has seen."""
        cache = Cache() if cache is None else cache
        spec, start = self.spec, cache.length
        if self.form == "decompressed" and self.cached != "decompressed" and start:
            raise ValueError("decompressed needs K and V of all earlier tokens in the cache; use expanded")
        q, q_pe = self._query(x, start)
        c, k_pe = self._latents(x, start)
        rope, shared = spec.qk_rope_head_dim > 0, None
        if self.cached == "decompressed":
            k, v = self._per_head(c)
            # The RoPE key is kept in every head.
            q, k = torch.cat((q, q_pe), dim=-1), torch.cat((k, k_pe.expand(-1, spec.num_heads, -1, -1)), dim=-1)
            k, v = cache.append("k", k, self.reach), cache.append("v", v, self.reach)
        else:
            present = cache.append("c_kv", c, self.reach)
            if rope:
                shared = q_pe, cache.append("k_pe", k_pe, self.reach)
            if self.form == "absorbed":
                q, k, v = head_product("absorb_q", q, self._up()[0]), present, present
            else:
                k, v = self._per_head(present)
        cache.advance(x.shape[1])
        out = attend_beside(self.path, (q, k), shared, v, self.reach, start, self.softmax_scale)
        if self.form == "absorbed":
            out = head_product("absorb_v", out, self._up()[1].transpose(1, 2))
        return linear(self, "o_proj", out.transpose(1, 2).flatten(2))

    def _query(self, x: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """[B, T, D] -> [B, H, T, P], and the rotated part [B, H, T, R]."""
        spec, name = self.spec, "q_proj"
        if spec.q_lora_rank is not None:
            x, name = linear(self, "q_a_proj", x), "q_b_proj"
            if spec.latent_norm:
                x = rms_norm(x, self.get_parameter("q_a_layernorm.weight"), self.eps)
        q = split_heads(linear(self, name, x), spec.num_heads)
        left, right = torch.split(q, [spec.qk_nope_head_dim, spec.qk_rope_head_dim], dim=-1)
        return left, self._rotate(right, start)

    def _latents(self, x: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """[B, T, D] -> c_kv [B, h_c, T, L], and k_pe [B, 1, T, R], rotated; R may be 0."""
        spec = self.spec
        c = split_heads(linear(self, "kv_a_proj", x), spec.num_latents)
        if spec.latent_norm:
            c = rms_norm(c, self.get_parameter("kv_a_layernorm.weight").unsqueeze(1), self.eps)
        if not spec.qk_rope_head_dim:
            return c, c[:, :1, :, :0]
        return c, self._rotate(linear(self, "k_pe_proj", x).unsqueeze(1), start)

    def _per_head(self, c: Tensor) -> tuple[Tensor, Tensor]:
        """K [B, H, S, P] and V [B, H, S, V] of all heads from the latents [B, h_c, S, L]."""
        spec = self.spec
        weight = self.get_parameter("kv_b_proj.weight").view(spec.num_latents, -1, spec.kv_lora_rank)
        up = head_product("kv_b_proj", c, weight.transpose(1, 2))
        heads = up.view(*up.shape[:3], spec.num_heads // spec.num_latents, -1).transpose(2, 3).flatten(1, 2)
        k, v = torch.split(heads, [spec.qk_nope_head_dim, spec.v_head_dim], dim=-1)
        return k, v

    def _rotate(self, x: Tensor, start: int) -> Tensor:
        if not x.shape[3]:
            return x
        return self.rotary.rotate(x, self.rotary.table(start, x.shape[2], x.shape[3], x.device))

    def _up(self) -> tuple[Tensor, Tensor]:
        """W_UK [H, P, L] and W_UV [H, V, L]: kv_b_proj holds P rows, then V rows, of each head."""
        spec = self.spec
        both = self.get_parameter("kv_b_proj.weight").view(spec.num_heads, -1, spec.kv_lora_rank)
        w_uk, w_uv = torch.split(both, [spec.qk_nope_head_dim, spec.v_head_dim], dim=1)
        return w_uk, w_uv
