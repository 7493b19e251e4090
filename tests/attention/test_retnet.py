"""Multi-scale retention: golden values, and the layer against its definition."""

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # tiny tensors: two threads wait for each other longer than they compute

from attncalc.attention.base import Step  # noqa: E402
from attncalc.attention.retnet import RetNet  # noqa: E402
from attncalc.attention.retnet_torch import Layer  # noqa: E402
from attncalc.dtypes import Formats  # noqa: E402
from attncalc.errors import AttncalcError  # noqa: E402
from attncalc.reach import FULL  # noqa: E402
from attncalc.workload import Workload  # noqa: E402

# arXiv 2307.08621 table 2, 2.7B: D 2560, heads of 256 keys and 512 values.
LARGE = RetNet(2560, 10, 256, 512)
TINY = RetNet(20, 3, 8, 16, chunk_size=16)


def relative(got: Any, expected: Any) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


def core(form: str, new: int, count: Any = "causal") -> int:
    ops = LARGE.ops(Step(Workload(new, new), FULL, count), form, cached=form).contractions
    return sum(op.flops for op in ops if op.name.startswith(("state", "chunk")))


def test_twice_as_many_values_as_keys() -> None:
    (state,) = (t.at(1_000_000, 1, Formats()) for t in LARGE.cache(FULL, "recurrent"))
    assert (state.shape, state.dtype, state.bytes) == ((1, 10, 256, 512), "fp32", 5_242_880)
    # q, k D x D; v, gate, output D x 2D; and a norm of one head.
    assert sum(w.elements for w in LARGE.weights("recurrent")) == 8 * 2560**2 + 512 == 52_429_312
    assert LARGE.heads("recurrent") == (10, None, 256, 512)
    # k v^T and S^T q: 4 K V for each token and head; in chunks of 64, 2 C (K + V) more.
    assert core("recurrent", 1) == 10 * 4 * 256 * 512
    assert core("chunked", 128, "dense") == 128 * 10 * (2 * 64 * 768 + 4 * 256 * 512)


def test_rotation_needs_pairs() -> None:
    with pytest.raises(AttncalcError) as caught:
        replace(TINY, head_k_dim=7)
    assert caught.value.where == "head_k_dim"


def from_definition(made: Layer, x: Any) -> Any:
    """o_t = sum over i <= t of gamma^(t - i) Re(conj(q_t) k_i e^(i theta (i - t))) v_i, every head by itself."""
    spec, w = made.spec, dict(made.named_parameters())
    H, K, V = spec.num_heads, spec.head_k_dim, spec.head_v_dim
    q, k, v = ((x @ w[f"{n}_proj.weight"].T).view(*x.shape[:2], H, -1) for n in "qkv")
    # A value and the one half the width further are one complex number.
    q, k = (torch.complex(a[..., : K // 2], a[..., K // 2 :]) for a in (q, k))
    theta = 10000.0 ** (-torch.arange(0, K, 2, dtype=x.dtype) / K)
    out = torch.zeros(*x.shape[:2], H, V, dtype=x.dtype)
    for h in range(H):
        gamma = 1 - 2.0 ** (-5 - h)
        for t in range(x.shape[1]):
            for i in range(t + 1):
                turn = torch.polar(torch.ones_like(theta), theta * (i - t))
                score = (q[:, t, h].conj() * k[:, i, h] * turn).real.sum(-1, keepdim=True) / K**0.5
                out[:, t, h] += gamma ** (t - i) * score * v[:, i, h]
    norm = "g_norm_swish_gate.weight" if spec.gate else "g_norm.weight"
    out = out / (out.square().mean(-1, keepdim=True) + made.eps).sqrt() * w[norm]
    if spec.gate:
        gate = (x @ w["g_proj.weight"].T).view(out.shape)
        out = out * gate * torch.sigmoid(gate)
    return out.flatten(2) @ w["o_proj.weight"].T


@pytest.mark.parametrize("form", RetNet.forms)
@pytest.mark.parametrize("gate", [True, False])
def test_equals_the_definition(gate: bool, form: str) -> None:
    torch.manual_seed(0)
    made = Layer(replace(TINY, gate=gate), form=form, dtype=torch.float64)
    x = torch.randn(2, 19, 20, dtype=torch.float64)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.5)
        assert relative(made(x), from_definition(made, x)) < 1e-12
