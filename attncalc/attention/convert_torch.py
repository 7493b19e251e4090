"""The exact MLA of a GQA (arXiv 2502.07864, TransMLA, section 4), as a specification and as a layer.

For G KV heads of width d, of which p values are rotated, and values of width e:

* the RoPE key holds the rotated values of all groups side by side, G*p, its frequencies tiled: those of one head over
  and over. A plain RoPE of that width would turn each group by other angles.
* the latent holds the other values of all keys and all values, G*(d - p + e).
* head i of group j = i // (H / G): the up-projections pick block j of the latent, and the query of the RoPE key is zero
  outside block j.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from attncalc.attention import gqa_torch, mla_torch
from attncalc.attention.convert import mla_spec_of
from attncalc.attention.rotary import Rotary


@dataclass(frozen=True)
class TiledRotary(Rotary):
    """Frequencies of one head, `block` values wide, repeated for every head that lies beside it in the RoPE key."""

    block: int = 0

    def inverse_frequencies(self, width: int, device: torch.device | None = None) -> Tensor:
        """[width / 2], the frequencies of `block` values over and over."""
        return super().inverse_frequencies(self.block, device).repeat(width // self.block)


def mla_of(layer: gqa_torch.Layer) -> mla_torch.Layer:
    """The absorbed MLA with the same output as a plain GQA layer.

    Raises:
        AttncalcError: the layer has a bias, norm, gate or sink, which this construction does not carry over.
    """
    spec = layer.spec
    made_spec = mla_spec_of(spec)
    H, G, d, e, p = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim, spec.rope_dim
    n = d - p
    w_q, w_k, w_v, w_o = (layer.get_parameter(f"{name}_proj.weight").detach() for name in "qkvo")
    # Pairs of a rotation become neighbours, so that a block of the RoPE key is a whole head.
    order = torch.arange(p) if layer.rotary.interleaved else torch.arange(p).view(2, -1).T.flatten()
    q, k = w_q.view(H, d, -1), w_k.view(G, d, -1)
    (q_pe, q_nope), (k_pe, k_nope) = (torch.split(x, [p, n], dim=1) for x in (q, k))
    q_pe, k_pe = q_pe[:, order], k_pe[:, order]
    wide = q.new_zeros(H, n + G * p, spec.hidden_size)
    up = q.new_zeros(H, n + e, made_spec.kv_lora_rank)
    wide[:, :n] = q_nope
    for i in range(H):
        j = i // (H // G)
        wide[i, n + j * p : n + (j + 1) * p] = q_pe[i]
        up[i, :n, j * n : (j + 1) * n] = torch.eye(n)
        up[i, n:, G * n + j * e : G * n + (j + 1) * e] = torch.eye(e)
    made = mla_torch.Layer(
        made_spec,
        layer.reach,
        "absorbed",
        rotary=tiled(layer.rotary, p),
        softmax_scale=layer.softmax_scale,
        device=w_q.device,
        dtype=w_q.dtype,
    )
    down = torch.cat((k_nope.flatten(0, 1), w_v, k_pe.flatten(0, 1)))
    state = {"q_proj.weight": wide.flatten(0, 1), "kv_a_proj_with_mqa.weight": down}
    made.load_state_dict(state | {"kv_b_proj.weight": up.flatten(0, 1), "o_proj.weight": w_o})
    return made


def tiled(rotary: Rotary, block: int) -> Rotary:
    """The rotation of one head, for all of them side by side and in neighbouring pairs."""
    settings: dict[str, Any] = {f.name: getattr(rotary, f.name) for f in fields(Rotary)}
    return TiledRotary(**settings | {"interleaved": True, "block": block})
