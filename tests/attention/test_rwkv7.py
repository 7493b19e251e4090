"""RWKV-7: golden values, and the layer against its definition."""

from dataclasses import replace
from math import exp, prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch
from torch import Tensor, nn

from attncalc.attention.base import Step
from attncalc.attention.rwkv7 import RWKV7
from attncalc.attention.rwkv7_torch import Layer, recurrent_core
from attncalc.attention.state_torch import delta_recurrent as delta_rule
from attncalc.attention.torch_base import Cache, CountOperations
from attncalc.dtypes import Formats
from attncalc.errors import AttncalcError
from attncalc.ops import Contraction
from attncalc.reach import FULL, Reach
from attncalc.workload import Workload
from tests.attention.common import by_name

torch.set_num_threads(1)

GOOSE = RWKV7(2048, 32, 64, 64, 96, 96, 64, 256)
FIRST = replace(GOOSE, v_rank=None)
WIDE = RWKV7(96, 4, 16, 24, 8, 12, 4, 20)
SPECS = {"1.5b": GOOSE, "first layer": FIRST, "wide values": WIDE}
TINY = RWKV7(12, 3, 5, 4, 3, 2, 6, 7)
FORMATS = Formats()


def products(spec: RWKV7, context: int, new: int, batch: int = 1) -> list[Contraction]:
    step = Step(Workload(context, new, batch))
    return list(spec.ops(step, "recurrent", cached="recurrent").contractions)


def layer(spec: RWKV7) -> Layer:
    made = Layer(spec, dtype=torch.float64)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.5)
    return made


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


def test_heads_of_64() -> None:
    """D 2048, 32 heads of 64: a state of 32 x 64 x 64 in fp32 and one row of 2048."""
    shift, state = (t.at(131_072, 1, FORMATS) for t in GOOSE.cache(FULL, "recurrent"))
    assert (shift.name, shift.shape, shift.dtype, shift.bytes) == ("shift_state", (1, 1, 1, 2048), "bf16", 4096)
    assert (state.shape, state.dtype, state.bytes) == ((1, 32, 64, 64), "fp32", 524_288)
    D = 2048
    # r, k, v, o; w, a and v of ranks 96, 96 and 64 with biases; the gate of 256; mixes, k_k, k_a, r_k, group norm.
    projections = 4 * D * D + 2 * D * (96 + 96 + 64 + 256)
    assert sum(w.elements for w in GOOSE.weights("")) == projections + 3 * D + (6 + 3 + 2) * D == 18_903_040
    assert sum(w.elements for w in FIRST.weights("")) == 18_903_040 - 2 * D * 64 - D
    decode = by_name(products(GOOSE, 131_072, 1))
    assert decode["state_update"] == 8 * 32 * 64 * 64
    assert sum(decode.values()) == 2 * projections + 8 * 32 * 64 * 64


def test_shapes() -> None:
    assert {w.name: w.sizes for w in WIDE.weights("recurrent")} == {
        **{f"x_{name}": (1, 1, 96) for name in "rwkvag"},
        "k_k": (64,),
        "k_a": (64,),
        "r_k": (4, 16),
        "r_proj.weight": (64, 96),
        "k_proj.weight": (64, 96),
        "v_proj.weight": (96, 96),
        "w_lora.lora.0.weight": (8, 96),
        "w_lora.lora.2.weight": (64, 8),
        "w_lora.lora.2.bias": (64,),
        "a_lora.lora.0.weight": (12, 96),
        "a_lora.lora.2.weight": (64, 12),
        "a_lora.lora.2.bias": (64,),
        "v_lora.lora.0.weight": (4, 96),
        "v_lora.lora.2.weight": (96, 4),
        "v_lora.lora.2.bias": (96,),
        "g_lora.lora.0.weight": (20, 96),
        "g_lora.lora.2.weight": (96, 20),
        "g_norm.weight": (96,),
        "g_norm.bias": (96,),
        "o_proj.weight": (96, 96),
    }
    assert {w.kind for w in WIDE.weights("") if not w.name.endswith("weight") or "norm" in w.name} == {"vector"}


def test_nothing_grows_and_heads_split() -> None:
    assert sum(t.elements_per_token for t in GOOSE.cache(FULL, "recurrent")) == 0
    assert GOOSE.with_kv_heads(1) is None
    assert WIDE.heads("recurrent") == (4, None, 16, 24)
    assert (GOOSE.query_heads(), GOOSE.default_form(Workload(9, 9))) == (32, "recurrent")
    shift, state = (t.at(1, 1, FORMATS).bytes for t in GOOSE.shard(32).cache(FULL, ""))
    assert (shift, state * 32) == (4096, 524_288)
    split = {w.name: w.sizes for w in GOOSE.shard(8).weights("")}
    replicated = {w.name for w in GOOSE.weights("") if split[w.name] == w.sizes}
    assert replicated == {f"x_{n}" for n in "rwkvag"} | {f"{n}_lora.lora.0.weight" for n in "wavg"}
    for refused in (
        lambda: GOOSE.shard(3),
        lambda: GOOSE.ops(Step(Workload(1)), "chunked", cached="recurrent"),
        lambda: replace(GOOSE, v_rank=0),
        lambda: replace(GOOSE, gate_rank=0),
    ):
        with pytest.raises(AttncalcError):
            refused()


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5), batch=st.integers(1, 3))
def test_a_prompt_costs_the_sum_of_its_parts(lengths: list[int], batch: int) -> None:
    whole = sum(lengths)
    for spec in SPECS.values():
        ops = products(spec, whole, whole, batch)
        cost = sum(op.flops for op in ops)
        assert cost == sum(op.flops for n in lengths for op in products(spec, whole, n, batch))
        assert cost == whole * sum(op.flops for op in products(spec, whole, 1, batch))
        held = sum(t.at(whole, batch, FORMATS).bytes for t in spec.cache(FULL, ""))
        assert sum(op.bytes(FORMATS)["cache"] for op in ops) == held
        assert sum(op.bytes(FORMATS)["cache_write"] for op in ops) == held
        matrices = [w for w in spec.weights("") if w.kind == "weight"]
        assert sum(op.bytes(FORMATS)["weight"] for op in ops) == 2 * sum(w.elements for w in matrices)
        assert all(2 * prod(op.gemm.values()) == op.flops for op in ops)


@pytest.mark.parametrize("name", SPECS)
def test_layer_is_the_specification(name: str) -> None:
    spec = SPECS[name]
    made = Layer(spec, device="meta", dtype=torch.bfloat16)
    assert {n: tuple(p.shape) for n, p in made.named_parameters()} == {w.name: w.sizes for w in spec.weights("")}
    cache = Cache()
    for new in (6, 1):
        x = torch.empty(2, new, spec.hidden_size, device="meta", dtype=torch.bfloat16)
        with CountOperations() as counter:
            assert made(x, cache).shape == x.shape
        expected = by_name(products(spec, cache.length, new, 2))
        assert counter.flops == expected
        assert counter.total == sum(expected.values())
        kept = {t.name: t.at(cache.length, 2, FORMATS) for t in spec.cache(FULL, "")}
        assert {n: tuple(t.shape) for n, t in cache.tensors.items()} == {n: t.shape for n, t in kept.items()}
        assert {n: t.nbytes for n, t in cache.tensors.items()} == {n: t.bytes for n, t in kept.items()}
    assert cache.storage_bytes == sum(t.bytes for t in kept.values())


def test_a_reach_does_not_apply() -> None:
    with pytest.raises(ValueError, match="window 4"):
        Layer(TINY, Reach("window", 4))


def from_definition(made: Layer, x: Tensor, v_first: Tensor | None) -> Tensor:
    """Every head and token by itself: S_t = S_{t-1} (Diag(exp w) - kk^T (a kk)) + v^T k, rows by value (the paper's)."""
    spec, w = made.spec, dict(made.named_parameters())
    H, K, V = spec.num_heads, spec.head_k_dim, spec.head_v_dim
    out = torch.zeros_like(x)

    def low(name: str, token: Tensor) -> Tensor:
        inside = w[f"{name}_lora.lora.0.weight"] @ token
        inside = torch.tanh(inside) if name == "w" else torch.sigmoid(inside) if name == "g" else inside
        return w[f"{name}_lora.lora.2.weight"] @ inside + w.get(f"{name}_lora.lora.2.bias", torch.zeros(()))

    for n, sequence in enumerate(x):
        states = [torch.zeros(V, K, dtype=x.dtype) for _ in range(H)]
        last = torch.zeros_like(sequence[0])
        for t, token in enumerate(sequence):
            mix = {name: token * (1 - w[f"x_{name}"][0, 0]) + last * w[f"x_{name}"][0, 0] for name in "rwkvag"}
            last = token
            r, k, v = (w[f"{name}_proj.weight"] @ mix[name] for name in "rkv")
            if spec.v_rank is not None and v_first is not None:
                rate = torch.sigmoid(low("v", mix["v"]))
                v = (1 - rate) * v + rate * v_first[n, t]
            decay = (-exp(-0.5) * torch.sigmoid(low("w", mix["w"]))).exp()
            a, g = torch.sigmoid(low("a", mix["a"])), low("g", mix["g"])
            removal, rate_k = k * w["k_k"], k * (1 + (a - 1) * w["k_a"])
            heads = []
            for i in range(H):
                keys, values = slice(i * K, (i + 1) * K), slice(i * V, (i + 1) * V)
                kk = removal[keys] / removal[keys].square().sum().sqrt()
                move = torch.diag(decay[keys]) - torch.outer(kk, a[keys] * kk)
                states[i] = states[i] @ move + torch.outer(v[values], rate_k[keys])
                o = states[i] @ r[keys]
                o = (o - o.mean()) / (o.var(unbiased=False) + V * made.eps).sqrt()
                o = o * w["g_norm.weight"][values] + w["g_norm.bias"][values]
                heads.append(o + (r[keys] * w["r_k"][i] * rate_k[keys]).sum() * v[values])
            out[n, t] = w["o_proj.weight"] @ (torch.cat(heads) * g)
    return out


VARIATIONS = {"mixed": TINY, "first layer": replace(TINY, v_rank=None), "one head": replace(TINY, num_heads=1)}


@pytest.mark.parametrize("name", VARIATIONS)
def test_layer_equals_the_definition(name: str) -> None:
    torch.manual_seed(0)
    made, x = layer(VARIATIONS[name]), torch.randn(2, 13, 12, dtype=torch.float64)
    first = torch.randn(2, 13, made.spec.num_heads * 4, dtype=torch.float64)
    with torch.no_grad():
        assert relative(made(x, v_first=first), from_definition(made, x, first)) < 1e-12
        # Without it v is mixed with itself.
        assert relative(made(x), from_definition(made, x, None)) < 1e-12
        changes = relative(made(x, v_first=first), made(x)) > 1e-2
    assert changes == (made.spec.v_rank is not None)


@pytest.mark.parametrize("name", VARIATIONS)
def test_steps_from_the_cache_equal_one_prefill(name: str) -> None:
    torch.manual_seed(1)
    made, x, cache = layer(VARIATIONS[name]), torch.randn(2, 14, 12, dtype=torch.float64), Cache()
    with torch.no_grad():
        parts = [made(part, cache) for part in torch.split(x, [6, 5, 1, 1, 1], dim=1)]
        assert relative(torch.cat(parts, dim=1), made(x)) < 1e-12
    assert cache.length == 14
    assert {t.dtype for t in cache.tensors.values()} == {torch.float64}


def test_the_prediction_reads_the_state_before_its_decay() -> None:
    """With a = -kk and b = beta kk the delta rule of KDA differs in that alone: without decay both are equal."""
    torch.manual_seed(2)
    q, k, v = (torch.randn(2, 3, 9, 6, dtype=torch.float64) for _ in range(3))
    k = nn.functional.normalize(k, dim=-1)
    beta, state = torch.rand(2, 3, 9, dtype=torch.float64), torch.randn(2, 3, 6, 6, dtype=torch.float64)
    written = beta.unsqueeze(-1) * k
    for decay, equal in ((torch.zeros_like(q), True), (-torch.rand_like(q), False)):
        ours = recurrent_core(q, decay, written, v, -k, written, state)[0]
        other = delta_rule(q, k, v, decay, beta, state)[0]
        assert (relative(ours, other) < 1e-12) == equal
