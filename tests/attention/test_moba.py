"""Mixture of Block Attention: its numbers, the layer against its specification and against its definition."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # tiny tensors: two threads wait for each other longer than they compute

from attncalc.attention import gqa_torch  # noqa: E402
from attncalc.attention.base import Step  # noqa: E402
from attncalc.attention.gqa import GQA  # noqa: E402
from attncalc.attention.moba import MoBA  # noqa: E402
from attncalc.attention.moba_torch import Layer  # noqa: E402
from attncalc.compare import layers_of, measure_layer  # noqa: E402
from attncalc.dimensions import Dimensions  # noqa: E402
from attncalc.dtypes import Formats  # noqa: E402
from attncalc.errors import AttncalcError  # noqa: E402
from attncalc.reach import FULL, Reach  # noqa: E402
from attncalc.workload import Conventions, Workload  # noqa: E402
from tests.attention.common import check_masked_contract, check_splits, close, make_scattered, sequence  # noqa: E402

V3_SIZE = MoBA(7168, 128, 8, 128, 128, 128)
TINY = MoBA(20, 4, 2, 8, 6, 4, 5, 3)
SPECS = {
    "three blocks": TINY,
    "own block alone": replace(TINY, blocks=1),
    "one token blocks": replace(TINY, block_size=1, blocks=4),
    "a head each, no RoPE": replace(TINY, num_kv_heads=4, rope_dim=0, blocks=2),
}
FORMATS = Formats()


def products(spec: Any, context: int, new: int = 1, batch: int = 1, count: Any = "causal") -> dict[str, Any]:
    ops = spec.ops(Step(Workload(context, new, batch), FULL, count), "direct", cached="direct").contractions
    return {op.name: op for op in ops}


def flops(spec: Any, context: int, new: int = 1) -> int:
    return sum(op.flops for op in products(spec, context, new).values())


@pytest.mark.parametrize("context", [1, 255, 256, 257, 1023, 1024, 1025, 5000, 131_072])
def test_core_and_gate_of_a_decode_step(context: int) -> None:
    """All tokens up to 4 blocks, then 3 whole ones and the own one so far; a gate score for each earlier block."""
    blocks = -(-context // 256)
    tokens = context if blocks <= 4 else 3 * 256 + (context - 1) % 256 + 1
    ops = products(V3_SIZE, context)
    assert ops["score"].flops == ops["value"].flops == 2 * 128 * 128 * tokens
    # Implementations that score the own block too count `blocks`.
    assert ops["gate_score"].flops == 2 * 128 * 128 * (blocks - 1)
    read = {n: ops[n].bytes(FORMATS)["cache"] for n in ("score", "value", "gate_score")}
    assert read == {"score": 2 * 8 * 128 * tokens, "value": 2 * 8 * 128 * tokens, "gate_score": 2048 * (blocks - 1)}


def test_stored_is_all_tokens_and_the_means() -> None:
    tensors = {t.name: t.at(5000, 1, FORMATS) for t in V3_SIZE.cache(FULL, "direct")}
    assert {n: t.shape for n, t in tensors.items()} == {
        "k": (1, 8, 5000, 128),
        "v": (1, 8, 5000, 128),
        "mean_k": (1, 8, 19, 128),
    }
    # A mean adds G * d / 256 for each token.
    assert sum(t.elements_per_token for t in V3_SIZE.cache(FULL, "direct")) == 2 * 8 * 128 + 4
    assert sum(t.elements_per_token for t in TINY.cache(FULL, "direct")) * 5 == 5 * 2 * 14 + 16
    gqa = GQA(7168, 128, 8, 128, 128, 128)
    assert [(w.name, w.sizes) for w in V3_SIZE.weights("")] == [(w.name, w.sizes) for w in gqa.weights("")]


@given(context=st.integers(1, 60), blocks=st.integers(1, 5), data=st.data())
def test_pairs_equal_a_loop_over_queries_and_keys(context: int, blocks: int, data: st.DataObject) -> None:
    new, spec = data.draw(st.integers(1, context)), replace(TINY, blocks=blocks)
    queries = range(context - new, context)
    tokens = sum(i % 5 + 1 + 5 * min(i // 5, blocks - 1) for i in queries)
    ops = products(spec, context, new)
    assert ops["score"].flops == 2 * 4 * 8 * tokens
    assert ops["value"].flops == 2 * 4 * 6 * tokens
    assert ops["gate_score"].flops == 2 * 4 * 8 * sum(i // 5 for i in queries)
    if new > 1:
        first = data.draw(st.integers(1, new - 1))
        assert flops(spec, context, new) == flops(spec, context - first, new - first) + flops(spec, context, first)


def test_sparse_costs_less_than_dense_from_here_on() -> None:
    for spec in (V3_SIZE, TINY, replace(TINY, blocks=1)):
        dense = spec.with_kv_heads(spec.num_kv_heads)
        first = spec.sparse_from_context()
        assert flops(spec, first) < flops(dense, first)
        assert all(flops(spec, c) >= flops(dense, c) for c in range(1, first))
        assert all(flops(spec, c) < flops(dense, c) for c in range(first, 3 * first))
    # The fifth block begins: 256 rows fewer, four gate scores more.
    assert V3_SIZE.sparse_from_context() == 4 * 256 + 1


@pytest.mark.parametrize("spec", [V3_SIZE, MoBA(2048, 32, 8, 64, 64, 64, 64, 3)])
def test_layer_is_the_specification(spec: MoBA) -> None:
    check_masked_contract(Layer, spec, [200, 56, 1, 300], [1, 1], [1024, 1])


def definition(layer: Any, x: Any) -> Any:
    """One query and one head at a time."""
    spec, w = layer.spec, dict(layer.named_parameters())
    H, G, C = spec.num_heads, spec.num_kv_heads, spec.block_size
    table = layer.rotary.table(0, x.shape[1], spec.rope_dim, x.device)
    out = torch.zeros_like(x)
    for b, row in enumerate(x):
        q = (row @ w["q_proj.weight"].T).view(-1, H, spec.head_dim).transpose(0, 1)
        k = (row @ w["k_proj.weight"].T).view(-1, G, spec.head_dim).transpose(0, 1)
        v = (row @ w["v_proj.weight"].T).view(-1, G, spec.v_head_dim).transpose(0, 1)
        q, k = layer.rotary.rotate(q, table), layer.rotary.rotate(k, table)
        for t in range(len(row)):
            heads = []
            for h in range(H):
                g, own = h // (H // G), t // C
                gate = {i: float(q[h, t] @ k[g, i * C : (i + 1) * C].mean(0)) for i in range(own)}
                chosen = {own, *sorted(gate, key=gate.__getitem__, reverse=True)[: spec.blocks - 1]}
                keys = [s for s in range(t + 1) if s // C in chosen]
                weights = (k[g, keys] @ q[h, t] * spec.head_dim**-0.5).softmax(0)
                heads.append(weights @ v[g, keys])
            out[b, t] = w["o_proj.weight"] @ torch.cat(heads)
    return out


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_equals_the_definition(spec: MoBA) -> None:
    layer, x = make_scattered(Layer, spec), sequence(spec, 33)
    with torch.no_grad():
        assert close(layer(x), definition(layer, x))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("capacity", [0, 60])
def test_steps_equal_one_prefill(spec: MoBA, capacity: int) -> None:
    layer, x = make_scattered(Layer, spec), sequence(spec, 44)
    check_splits(layer, x, capacity, [44], [1, 2, 21, 17, 1, 1, 1], [31, *[1] * 13])


@pytest.mark.parametrize("change", [{"block_size": 50}, {"blocks": 10}, {"block_size": 49, "blocks": 2}])
def test_as_many_blocks_as_the_context_has_is_full_attention(change: dict[str, int]) -> None:
    layer, x = make_scattered(Layer, replace(TINY, **change)), sequence(TINY, 50)
    plain = gqa_torch.Layer(GQA(20, 4, 2, 8, 6, 4), dtype=torch.float64)
    plain.load_state_dict(layer.state_dict())
    fewer = make_scattered(Layer, replace(TINY, blocks=9))
    fewer.load_state_dict(layer.state_dict())
    with torch.no_grad():
        assert close(layer(x), plain(x))
        assert (fewer(x) - plain(x)).abs().max() > 1e-6


def test_splits_over_gpus_and_what_it_refuses() -> None:
    assert V3_SIZE.shard(16) == replace(V3_SIZE, num_heads=8, num_kv_heads=1)
    assert V3_SIZE.with_kv_heads(128) == GQA(7168, 128, 128, 128, 128, 128)
    for name, value in {"num_kv_heads": 3, "rope_dim": 7, "block_size": 0, "blocks": 0}.items():
        with pytest.raises(AttncalcError):
            replace(V3_SIZE, **{name: value})
    with pytest.raises(AttncalcError, match="reach"):
        V3_SIZE.ops(Step(Workload(8), Reach("window", 4)), "direct", cached="direct")
    with pytest.raises(ValueError, match="chunk 8"):
        Layer(TINY, Reach("chunk", 8))


def test_compared_at_the_size_of_deepseek_v3() -> None:
    (layer,) = layers_of("moba", Dimensions(), None)
    assert layer.attention == V3_SIZE
    f = measure_layer(layer, Workload(131_072), Conventions())
    assert f.core_flops == 2 * 128 * (256 * 4 * 256 + 128 * 511)
    assert f.score
    assert f.score.gemm == {"gemm_batch": 8, "m": 16, "n": 1024, "k": 128}
    assert f.cache_elements == 2 * 8 * 128 + 4
