"""The torch layer of `attncalc.attention.mla_split`: separate latents for K and V, no RoPE key."""

import torch
from torch import Tensor

from attncalc.attention.latent_torch import PATHS, LatentLayer, head_product
from attncalc.attention.mla_split import MLASplit
from attncalc.attention.rotary import Rotary
from attncalc.attention.torch_base import Cache, KernelPath, bias_of, linear, split_heads
from attncalc.reach import FULL, Reach


class Layer(LatentLayer):
    """Attention over a key latent and a value latent (after arXiv 2405.04434 section 2.1.2).

    Parameters are `spec.weights(form)`. The cache is c_k [B, 1, S, Lk] and c_v [B, 1, S, Lv]; where `cached` is
    decompressed, K [B, H, S, n] and V [B, H, S, v]. `softmax_scale` None is n^-1/2 in every form. `rotary` must be
    None: nothing is rotated.
    """

    def __init__(
        self,
        spec: MLASplit,
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
        if rotary is not None:
            raise ValueError("rotary: mla-split has no RoPE key, and a key made from a latent cannot be rotated")
        super().__init__(
            spec,
            reach,
            form,
            cached=cached,
            path=path,
            rotary=Rotary(),
            softmax_scale=spec.head_dim**-0.5 if softmax_scale is None else softmax_scale,
            eps=eps,
            device=device,
            dtype=dtype,
        )
        self.spec = spec

    @classmethod
    def paths(cls, spec: MLASplit) -> tuple[KernelPath, ...]:  # noqa: ARG003
        """The ways to compute it, the preferred first."""
        return PATHS

    def query(self, source: Tensor, start: int) -> Tensor:  # noqa: ARG002
        """[B, T, D] -> [B, H, T, n], or in the latent space [B, H, T, Lk]."""
        name = "q_merged_proj" if self.form == "merged" else "q_proj"
        q = split_heads(linear(self, name, source), self.spec.num_heads)
        # The bias of k_b_proj adds q . b to every logit of a query, which the softmax takes out again.
        return head_product("absorb_q", q, self._up("k")) if self.form == "absorbed" else q

    def latents(self, x: Tensor, start: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """[B, T, D] -> c_k [B, 1, T, Lk] and c_v [B, 1, T, Lv]."""
        down = linear(self, "kv_a_proj", x).unsqueeze(1)
        c_k, c_v = torch.split(down, [self.spec.k_lora_rank, self.spec.v_lora_rank], dim=-1)
        return c_k, c_v

    def keep(self, cache: Cache, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Two tensors."""
        return cache.append("c_k", key, self.reach), cache.append("c_v", value, self.reach)

    def per_head(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """K [B, H, S, n] and V [B, H, S, v]."""
        k, v = linear(self, "k_b_proj", key.squeeze(1)), linear(self, "v_b_proj", value.squeeze(1))
        return split_heads(k, self.spec.num_heads), split_heads(v, self.spec.num_heads)

    def output(self, x: Tensor, out: Tensor) -> Tensor:  # noqa: ARG002
        """W_UV and its bias where they were not applied before, and the output projection."""
        if self.form == "merged":
            return linear(self, "o_merged_proj", out.transpose(1, 2).flatten(2))
        if self.form == "absorbed":
            out = head_product("absorb_v", out, self._up("v").transpose(1, 2))
        out = out.transpose(1, 2).flatten(2)
        bias = bias_of(self.get_submodule("v_b_proj"))
        if self.form == "absorbed" and bias is not None:
            out = out + bias  # the weights of a query sum to 1
        return linear(self, "o_proj", out)

    def _up(self, side: str) -> Tensor:
        """W_UK [H, n, Lk] or W_UV [H, v, Lv]."""
        weight = self.get_parameter(f"{side}_b_proj.weight")
        return weight.view(self.spec.num_heads, -1, weight.shape[1])


def convert(layer: Layer, form: str, *, cached: str | None = None) -> Layer:
    """The same function in another form, with copies of the same weights, or their products where it is merged.

    Raises:
        ValueError: a merged layer has lost the factors of its products.
    """
    if layer.form == "merged" and form != "merged":
        raise ValueError("a merged layer holds products, whose factors cannot be recovered")
    made = Layer(
        layer.spec,
        layer.reach,
        form,
        cached=cached,
        path=layer.path,
        softmax_scale=layer.softmax_scale,
        eps=layer.eps,
        device="meta",
    )
    state = {name: tensor.detach().clone() for name, tensor in layer.state_dict().items()}
    if form == "merged" and layer.form != "merged":
        _merge(layer, state)
    made.load_state_dict(state, assign=True)
    return made


def _merge(layer: Layer, state: dict[str, Tensor]) -> None:
    """Replace the factors in `state` by W_UK^T W_Q and W_O W_UV of each head, and their biases likewise."""
    heads, spec = layer.spec.num_heads, layer.spec
    w_uk = state.pop("k_b_proj.weight").view(heads, -1, spec.k_lora_rank)
    w_uv = state.pop("v_b_proj.weight").view(heads, -1, spec.v_lora_rank)
    w_q = state.pop("q_proj.weight").view(heads, -1, spec.hidden_size)
    w_o = state.pop("o_proj.weight")
    merged_o = w_o.view(-1, heads, spec.v_head_dim).transpose(0, 1) @ w_uv
    state["q_merged_proj.weight"] = (w_uk.transpose(1, 2) @ w_q).flatten(0, 1)
    state["o_merged_proj.weight"] = merged_o.transpose(0, 1).flatten(1)
    if spec.bias:
        del state["k_b_proj.bias"]  # cancels in the softmax
        b_q = state.pop("q_proj.bias").view(heads, -1, 1)
        state["q_merged_proj.bias"] = (w_uk.transpose(1, 2) @ b_q).flatten()
        state["o_merged_proj.bias"] = state.pop("o_proj.bias") + w_o @ state.pop("v_b_proj.bias")
