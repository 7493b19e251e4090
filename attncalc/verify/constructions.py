"""Identities and errors shown on a few numbers, without a layer of the project but for the last."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from attncalc.reach import FULL
from attncalc.verify.identities import SMALL, TOKENS, inputs, layer_of
from attncalc.verify.proof import Proof, different, same


def latent_first() -> Iterator[Proof]:
    """A (B C) = (A B) C: weighting the latents first and applying W_UV after."""
    weights = torch.randn(4, TOKENS, TOKENS, dtype=torch.float64).softmax(-1)
    latents, up = torch.randn(TOKENS, 16, dtype=torch.float64), torch.randn(4, 16, 10, dtype=torch.float64)
    yield same(
        "W_UV before the weighting = after it", "document 000", weights @ (latents @ up), (weights @ latents) @ up
    )


def toy() -> Iterator[Proof]:
    """The worked example: three tokens, two heads, a latent of 2."""
    source = "document 004 sections 4 and 6"

    def t(*rows: Sequence[float]) -> Tensor:
        return torch.tensor(rows, dtype=torch.float64)

    h, w_dkv = t([1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0]), t([0.5, 0, 0.5, 0], [0, 0.5, 0, 0.5])
    swap, w_q, w_uv = t([0, 1], [1, 0]), t([1, 0, 0, 0], [0, 0, 1, 0]), t([1, 1], [0, 1])
    c, q = h @ w_dkv.T, w_q @ h[2]
    yield same("scores of head 1", source, t([1, 0, 0.5]), (c @ q)[None])
    scores = (c @ swap.T) @ q
    yield same("scores of head 2, from the same cache", source, t([0, 1, 0.5]), scores[None])
    weights = scores.softmax(0)
    # The document prints 0.507 for 0.5065.
    yield same("softmax, a unit of the last digit", source, t([0.186, 0.507, 0.307]), weights[None], 2e-3)
    out = weights @ (c @ w_uv.T)
    yield same("output by the value route, to three digits", source, t([1.000, 0.660]), out[None].round(decimals=3))
    yield same("output by the latent route", source, out[None], (w_uv @ (weights @ c))[None])
    yield same("merged matrix", source, t([0, 0, 1, 0], [1, 0, 0, 0]), swap.T @ w_q)
    yield same("merged matrix on the hidden state", source, (swap.T @ q)[None], (swap.T @ w_q @ h[2])[None])


def errors() -> Iterator[Proof]:
    """Where the code of the documents (README lists them) is wrong, the right result differs from theirs."""
    groups_ = torch.randn(2, 4, 7, 8, dtype=torch.float64)
    copies = groups_.repeat_interleave(8, dim=1)[:, :4]
    yield different(
        "001: [:, :n_groups] after repeat_interleave keeps copies of group 0", "document 001, GQA", groups_, copies
    )
    q, up, c = (torch.randn(*s, dtype=torch.float64) for s in ((3, 8), (8, 6), (5, 6)))
    right = torch.einsum("td,dl,sl->ts", q, up, c)
    apart = torch.einsum("td,dL,sl->ts", q, up, c)
    yield different("001: `L` in one operand and `l` in the other contract nothing", "document 001, MLA", right, apart)
    q1, k1, v1 = (torch.randn(6, dtype=torch.float64) for _ in range(3))
    yield different(
        "001: reading v k^T by the wrong index gives (q.v) k", "document 001, KDA", (q1 @ k1) * v1, (q1 @ v1) * k1
    )
    wrong = layer_of(SMALL, FULL, "absorbed", softmax_scale=(SMALL.kv_lora_rank + SMALL.qk_rope_head_dim) ** -0.5)
    layer = layer_of(SMALL, FULL, "absorbed")
    layer.load_state_dict(wrong.state_dict())
    x = inputs(SMALL)
    yield different("the scale is (P + R)^-1/2, never (L + R)^-1/2", "document 000", layer(x), wrong(x))
