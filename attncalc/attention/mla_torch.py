"""The torch layer of `attncalc.attention.mla`: multi-head latent attention in its four forms."""

from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from attncalc.attention.latent_torch import PATHS, LatentLayer, head_product
from attncalc.attention.mla import MLA
from attncalc.attention.rotary import Rotary
from attncalc.attention.torch_base import Cache, KernelPath, linear, rms_norm, split_heads
from attncalc.reach import FULL, Reach


class Layer(LatentLayer):
    """MLA of DeepSeek-V2 (arXiv 2405.04434 section 2.1), with the options of the specification.

    Parameters are `spec.weights(form)`. The cache is c_kv [B, 1, S, L] and k_pe [B, 1, S, R], side by side in one
    buffer, so that absorbed MLA is an MQA whose K is the buffer and whose V is the first L columns of it; where
    `cached` is decompressed, K [B, H, S, P + R] and V [B, H, S, V]. `softmax_scale` None is (P + R)^-1/2 in every
    form, times the factor m^2 of the rotary embedding where it is applied.
    """

    def __init__(
        self,
        spec: MLA,
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
        rotary = rotary or Rotary()
        if softmax_scale is None:
            factor = rotary.softmax_factor if spec.rotated and spec.qk_rope_head_dim else 1.0
            softmax_scale = (spec.qk_nope_head_dim + spec.qk_rope_head_dim) ** -0.5 * factor
        super().__init__(
            spec,
            reach,
            form,
            cached=cached,
            path=path,
            rotary=rotary,
            softmax_scale=softmax_scale,
            eps=eps,
            device=device,
            dtype=dtype,
        )
        self.spec = spec

    def like(self, form: str, cached: str | None) -> Self:
        """A layer of the same settings in another form, without weights."""
        return type(self)(self.spec, self.reach, form, cached=cached, device="meta", **self._settings())

    def _settings(self) -> dict[str, Any]:
        scale = self.softmax_scale
        return {"path": self.path, "rotary": self.rotary, "softmax_scale": scale, "eps": self.eps}

    @classmethod
    def paths(cls, spec: MLA) -> tuple[KernelPath, ...]:  # noqa: ARG003
        """The ways to compute it, the preferred first."""
        return PATHS

    def query_source(self, x: Tensor) -> Tensor:
        """The query latent [B, T, Q], or x where there is none."""
        if self.spec.q_lora_rank is None:
            return x
        source = linear(self, "q_a_proj", x)
        return (
            rms_norm(source, self.get_parameter("q_a_layernorm.weight"), self.eps) if self.spec.latent_norm else source
        )

    def query(self, source: Tensor, start: int) -> Tensor:
        """[B, T, D or Q] -> [B, H, T, P + R], or in the latent space [B, H, T, L + R]."""
        spec = self.spec
        name = "q_proj" if spec.q_lora_rank is None else "q_b_proj"
        if self.form == "merged":
            left = split_heads(linear(self, "q_merged_proj", source), spec.num_heads)
            right = (
                split_heads(linear(self, "q_pe_proj", source), spec.num_heads)
                if spec.qk_rope_head_dim
                else left[..., :0]
            )
        else:
            q = split_heads(linear(self, name, source), spec.num_heads)
            left, right = torch.split(q, [spec.qk_nope_head_dim, spec.qk_rope_head_dim], dim=-1)
        if self.form == "absorbed":
            left = head_product("absorb_q", left, self._up()[0])
        right = self._rotate(right, start)
        return torch.cat((left, right), dim=-1)

    def latents(self, x: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """[B, T, D] -> [c_kv; k_pe] [B, 1, T, L + R], and c_kv."""
        spec = self.spec
        down = linear(self, "kv_a_proj_with_mqa", x, "kv_a_proj").unsqueeze(1)
        c_kv, k_pe = torch.split(down, [spec.kv_lora_rank, spec.qk_rope_head_dim], dim=-1)
        if spec.latent_norm:
            c_kv = rms_norm(c_kv, self.get_parameter("kv_a_layernorm.weight"), self.eps)
        record = torch.cat((c_kv, self._rotate(k_pe, start)), dim=-1)
        return record, record[..., : spec.kv_lora_rank]

    def keep(self, cache: Cache, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """One buffer for both; V is a view of K."""
        spec = self.spec
        parts = {"c_kv": spec.kv_lora_rank}
        if spec.qk_rope_head_dim:
            parts["k_pe"] = spec.qk_rope_head_dim
        record = cache.append("latent", key, self.reach, parts)
        return record, record[..., : spec.kv_lora_rank]

    def per_head(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """K [B, H, S, P + R] with the RoPE key in every head, and V [B, H, S, V]."""
        spec = self.spec
        up = split_heads(linear(self, "kv_b_proj", value.squeeze(1)), spec.num_heads)
        k, v = torch.split(up, [spec.qk_nope_head_dim, spec.v_head_dim], dim=-1)
        k_pe = key[..., spec.kv_lora_rank :].expand(-1, spec.num_heads, -1, -1)
        return torch.cat((k, k_pe), dim=-1), v

    def output(self, x: Tensor, out: Tensor) -> Tensor:
        """W_UV where it was not applied before, gate and output projection."""
        if self.form == "merged" and self.spec.gate == "none":
            return linear(self, "o_merged_proj", out.transpose(1, 2).flatten(2))
        if self.form in ("absorbed", "merged"):
            out = head_product("absorb_v", out, self._up()[1].transpose(1, 2))
        out = out.transpose(1, 2).flatten(2)
        if self.spec.gate == "full":
            out = out * torch.sigmoid(linear(self, "gate_proj", x))
        return linear(self, "o_proj", out)

    def _rotate(self, x: Tensor, start: int) -> Tensor:
        if not (self.spec.rotated and self.spec.qk_rope_head_dim):
            return x
        return self.rotary.rotate(x, self.rotary.table(start, x.shape[2], x.shape[3], x.device))

    def _up(self) -> tuple[Tensor, Tensor]:
        """W_UK [H, P, L] and W_UV [H, V, L]: a checkpoint's kv_b_proj holds P rows, then V rows, of each head.

        Merged keeps W_UV alone, where a gate stands between it and W_O.
        """
        spec = self.spec
        if self.form == "merged":
            w_uv = self.get_parameter("v_b_proj.weight").view(spec.num_heads, spec.v_head_dim, -1)
            return w_uv[:, :0], w_uv
        both = self.get_parameter("kv_b_proj.weight").view(spec.num_heads, -1, spec.kv_lora_rank)
        w_uk, w_uv = torch.split(both, [spec.qk_nope_head_dim, spec.v_head_dim], dim=1)
        return w_uk, w_uv


L = TypeVar("L", bound=Layer)


def convert(layer: L, form: str, *, cached: str | None = None) -> L:
    """The same function in another form, with copies of the same weights, or their products where it is merged.

    Raises:
        ValueError: a merged layer has lost the factors of its products.
    """
    if layer.form == "merged" and form != "merged":
        raise ValueError("a merged layer holds products, whose factors cannot be recovered")
    made = layer.like(form, cached)
    state = {name: tensor.detach().clone() for name, tensor in layer.state_dict().items()}
    if form == "merged" and layer.form != "merged":
        _merge(layer, state)
    made.load_state_dict(state, assign=True)
    return made


def _merge(layer: Layer, state: dict[str, Tensor]) -> None:
    """Replace the factors in `state` by W_UK^T W_UQ and W_O W_UV of each head."""
    spec = layer.spec
    up = state.pop("kv_b_proj.weight").view(spec.num_heads, -1, spec.kv_lora_rank)
    w_uk, w_uv = torch.split(up, [spec.qk_nope_head_dim, spec.v_head_dim], dim=1)
    w_q = state.pop("q_proj.weight" if spec.q_lora_rank is None else "q_b_proj.weight")
    w_q = w_q.view(spec.num_heads, -1, w_q.shape[1])
    w_uq, w_qr = torch.split(w_q, [spec.qk_nope_head_dim, spec.qk_rope_head_dim], dim=1)
    state["q_merged_proj.weight"] = (w_uk.transpose(1, 2) @ w_uq).flatten(0, 1)
    if spec.qk_rope_head_dim:
        state["q_pe_proj.weight"] = w_qr.flatten(0, 1)
    if spec.gate == "full":
        state["v_b_proj.weight"] = w_uv.flatten(0, 1)
        return
    w_o = state.pop("o_proj.weight").view(-1, spec.num_heads, spec.v_head_dim)
    state["o_merged_proj.weight"] = (w_o.transpose(0, 1) @ w_uv).transpose(0, 1).flatten(1)
    if spec.bias:
        state["o_merged_proj.bias"] = state.pop("o_proj.bias")
