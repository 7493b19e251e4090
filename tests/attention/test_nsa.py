"""Native Sparse Attention: the paper's numbers, the layer against its specification and against its definition."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # tiny tensors: two threads wait for each other longer than they compute

from attncalc.attention.base import Step  # noqa: E402
from attncalc.attention.gqa import GQA  # noqa: E402
from attncalc.attention.nsa import BRANCHES, NSA  # noqa: E402
from attncalc.attention.nsa_torch import Layer  # noqa: E402
from attncalc.cache import total_bytes  # noqa: E402
from attncalc.compare import layers_of, measure_layer  # noqa: E402
from attncalc.dimensions import Dimensions  # noqa: E402
from attncalc.dtypes import Formats  # noqa: E402
from attncalc.errors import AttncalcError  # noqa: E402
from attncalc.reach import FULL, Reach  # noqa: E402
from attncalc.workload import Conventions, Workload  # noqa: E402
from tests.attention.common import check_masked_contract, check_splits, close, make_scattered, sequence  # noqa: E402

PAPER = NSA(2560, 64, 4, 192, 128, 192)  # section 4.1: 64 heads in 4 groups, d_k 192, d_v 128
V3_SIZE = NSA(7168, 128, 8, 128, 128, 128)
TINY = NSA(20, 4, 2, 8, 6, 4, 4, 2, 0, 8, 3, 1, 1, 5)
MLP = replace(TINY, compress_hidden=7)
SPECS = {
    "mean": TINY,
    "mlp": MLP,
    "one block each": replace(TINY, compress_size=8, compress_stride=8, compress_hidden=3),
    "all heads one group": replace(TINY, num_kv_heads=1, blocks=4, local_blocks=2),
    "a head each": replace(TINY, num_kv_heads=4, rope_dim=0, initial_blocks=0, window=1),
}
FORMATS = Formats()
SOURCE = "arXiv 2502.11089, table 4"


def products(spec: NSA, context: int, new: int = 1, batch: int = 1, count: Any = "causal") -> dict[str, Any]:
    ops = spec.ops(Step(Workload(context, new, batch), FULL, count), "direct", cached="direct").contractions
    assert len({op.name for op in ops}) == len(ops)
    return {op.name: op for op in ops}


def flops(spec: Any, context: int, new: int = 1, count: Any = "causal") -> int:
    step = Step(Workload(context, new), FULL, count)
    return sum(op.flops for op in spec.ops(step, "direct", cached="direct").contractions)


@pytest.mark.parametrize(
    ("context", "table", "speedup"), [(8192, 2048, 4.0), (16384, 2560, 6.4), (32768, 3584, 9.1), (65536, 5632, 11.6)]
)
def test_tokens_read_in_a_decode_step(context: int, table: int, speedup: float) -> None:
    """The table rounds to S / 16 + 1536; (S - 32) / 16 + 1 is one less."""
    read = V3_SIZE.tokens_read(context)
    assert read == (context - 32) // 16 + 1 + 16 * 64 + 512 == table - 1, SOURCE
    assert context / table == pytest.approx(speedup, abs=0.05)
    # Read, as bytes: K and V of so many rows for each KV head.
    core = [op for name, op in products(PAPER, context).items() if name.endswith(("_score", "_value"))]
    assert sum(op.bytes(FORMATS)["cache"] for op in core) == read * 4 * (192 + 128) * 2
    # Computed: every query head on as many rows.
    assert sum(op.flops for op in core) == 2 * 64 * (192 + 128) * read


def test_stored_is_all_tokens_and_their_entries() -> None:
    tensors = {t.name: t.at(8192, 1, FORMATS) for t in PAPER.cache(FULL, "direct")}
    assert {n: t.shape for n, t in tensors.items()} == {
        "k": (1, 4, 8192, 192),
        "v": (1, 4, 8192, 128),
        "compressed_k": (1, 4, 511, 192),
        "compressed_v": (1, 4, 511, 128),
    }
    assert total_bytes(tuple(tensors.values())) == 2 * 4 * (192 + 128) * (8192 + 511)
    # Entries add G * (d + e) / d for each token.
    per_token = sum(t.elements_per_token for t in PAPER.cache(FULL, "direct"))
    assert per_token == 4 * (192 + 128) + 4 * (192 + 128) // 16
    assert sum(t.growth_bits(31, FORMATS) for t in PAPER.cache(FULL, "direct")) == 16 * per_token


def test_parameters_are_those_of_gqa_and_three_gates_a_head() -> None:
    gqa = sum(w.elements for w in GQA(2560, 64, 4, 192, 128, 192).weights(""))
    assert sum(w.elements for w in PAPER.weights("")) == gqa + 3 * 2560 * 64
    with_mlp = replace(PAPER, compress_hidden=100)
    mlp = 32 * (192 + 128) + 100 * (32 + 1) * (192 + 128)
    assert sum(w.elements for w in with_mlp.weights("")) == gqa + 3 * 2560 * 64 + mlp


@given(context=st.integers(1, 90), data=st.data())
def test_pairs_equal_a_loop_over_queries_and_keys(context: int, data: st.DataObject) -> None:
    new, spec = data.draw(st.integers(1, context)), TINY
    counted = Counter[str]()
    for i in range(context - new, context):
        counted["compress"] += sum(c + spec.compress_size <= i + 1 for c in range(0, context, spec.compress_stride))
        own = i // spec.block_size
        # The own block up to the query, and whole earlier ones while there are any.
        counted["select"] += i % spec.block_size + 1 + min(own, spec.blocks - 1) * spec.block_size
        counted["window"] += min(i + 1, spec.window)
    ops = products(spec, context, new)
    for name in BRANCHES:
        assert spec.reaches[name].pairs(new, context, "causal") == counted[name]
        assert ops[f"{name}_score"].flops == 2 * spec.num_heads * spec.head_dim * counted[name]
        assert ops[f"{name}_value"].flops == 2 * spec.num_heads * spec.v_head_dim * counted[name]


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5))
def test_a_prompt_costs_the_sum_of_its_parts(lengths: list[int]) -> None:
    whole, parts, context, made = flops(MLP, sum(lengths), sum(lengths)), 0, 0, 0
    for n in lengths:
        context += n
        parts += flops(MLP, context, n)
        made += products(MLP, context, n)["compress_k_up"].axes["n"].size
    assert parts == whole
    assert made == MLP.reaches["compress"].stored(context)


def test_sparse_costs_less_than_dense_from_here_on() -> None:
    """Not below blocks and window together: there a step reads more rows than there are."""
    for spec in (V3_SIZE, PAPER, TINY):
        dense = spec.with_kv_heads(spec.num_kv_heads)
        first = spec.sparse_from_context()
        assert flops(spec, first) < flops(dense, first)
        assert flops(spec, first - 1) >= flops(dense, first - 1)
        assert all(flops(spec, c) >= flops(dense, c) for c in range(1, first, 7))
    assert V3_SIZE.sparse_from_context() == 1665
    assert replace(V3_SIZE, compress_hidden=128).sparse_from_context() > 1665


@pytest.mark.parametrize("spec", [PAPER, replace(PAPER, compress_hidden=64), V3_SIZE])
def test_layer_is_the_specification(spec: NSA) -> None:
    check_masked_contract(Layer, spec, [20, 20, 1, 70], [1, 1], [600, 1])


def definition(layer: Any, x: Any) -> Any:
    """One query and one head at a time, with the sums of equations 9 and 10 written out."""
    spec, w = layer.spec, dict(layer.named_parameters())
    H, G, L, d, block = spec.num_heads, spec.num_kv_heads, spec.compress_size, spec.compress_stride, spec.block_size
    table = layer.rotary.table(0, x.shape[1], spec.rope_dim, x.device)

    def entry(side: str, rows: Any) -> Any:
        if not spec.compress_hidden:
            return rows.sum(0) / L
        name = f"compress_{side}"
        mid = w[f"{name}.up.weight"] @ (rows + w[f"{name}.position"]).flatten()
        return w[f"{name}.down.weight"] @ (mid * torch.sigmoid(mid))

    def attend(query: Any, keys: list[Any], values: list[Any]) -> tuple[Any, list[Any]]:
        if not keys:
            return torch.zeros(spec.v_head_dim, dtype=x.dtype), []
        weights = torch.stack([query @ k * spec.head_dim**-0.5 for k in keys]).softmax(0)
        return sum(p * v for p, v in zip(weights, values, strict=True)), list(weights)

    out = torch.zeros_like(x)
    for b, row in enumerate(x):
        q = (row @ w["q_proj.weight"].T).view(-1, H, spec.head_dim).transpose(0, 1)
        k = (row @ w["k_proj.weight"].T).view(-1, G, spec.head_dim).transpose(0, 1)
        v = (row @ w["v_proj.weight"].T).view(-1, G, spec.v_head_dim).transpose(0, 1)
        q, k = layer.rotary.rotate(q, table), layer.rotary.rotate(k, table)
        gates = torch.sigmoid(row @ w["gate_proj.weight"].T).view(-1, H, 3)
        for t in range(len(row)):
            heads: list[Any] = [None] * H
            starts = [c for c in range(0, t + 1, d) if c + L <= t + 1]
            for g in range(G):
                group = range(g * H // G, (g + 1) * H // G)
                few_k, few_v = ([entry(s, a[g, c : c + L]) for c in starts] for s, a in (("k", k), ("v", v)))
                compressed = {h: attend(q[h, t], few_k, few_v) for h in group}
                own, score = t // block, dict[int, Any]()
                for j in range(own + 1):
                    # How many pieces of d tokens entry and block share, times what the entry gets.
                    score[j] = sum(
                        compressed[h][1][i] * max(0, min(c + L, (j + 1) * block) - max(c, j * block)) / d
                        for h in group
                        for i, c in enumerate(starts)
                    )
                forced = {j for j in score if j < spec.initial_blocks or j > own - spec.local_blocks}
                free = sorted(set(score) - forced, key=lambda j: -float(score[j]))
                chosen = forced | set(free[: spec.blocks - len(forced)])
                keys = [s for s in range(t + 1) if s // block in chosen]
                near = range(max(0, t + 1 - spec.window), t + 1)
                for h in group:
                    selected, _ = attend(q[h, t], [k[g, s] for s in keys], [v[g, s] for s in keys])
                    local, _ = attend(q[h, t], [k[g, s] for s in near], [v[g, s] for s in near])
                    parts = (compressed[h][0], selected, local)
                    heads[h] = sum(a * p for a, p in zip(gates[t, h], parts, strict=True))
            out[b, t] = w["o_proj.weight"] @ torch.cat(heads)
    return out


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_equals_the_definition(spec: NSA) -> None:
    layer, x = make_scattered(Layer, spec), sequence(spec, 41)
    with torch.no_grad():
        assert close(layer(x), definition(layer, x))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("capacity", [0, 60])
def test_steps_equal_one_prefill(spec: NSA, capacity: int) -> None:
    layer, x = make_scattered(Layer, spec), sequence(spec, 53)
    check_splits(layer, x, capacity, [53], [1, 2, 30, 17, 1, 1, 1], [40, *[1] * 13])


def test_a_branch_that_sees_everything_is_full_attention() -> None:
    """Selection of every block, and a window of the whole context, each alone behind its gate."""
    from attncalc.attention import gqa_torch

    spec = replace(TINY, blocks=9, window=60)
    layer, x = make_scattered(Layer, spec), sequence(spec, 50)
    plain = gqa_torch.Layer(GQA(20, 4, 2, 8, 6, 4), dtype=torch.float64)
    state = layer.state_dict()
    plain.load_state_dict({n: state[n] for n in plain.state_dict()})
    with torch.no_grad():
        full = plain(x)
        layer.gate_proj.weight.zero_()
        branches = layer(x)  # each of the three is halved
        layer_without = make_scattered(Layer, replace(spec, window=1))
        layer_without.load_state_dict(layer.state_dict())
        assert (layer_without(x) - branches).abs().max() > 1e-6
        # Entries of single tokens are the tokens: then all three branches are full attention.
        single = make_scattered(Layer, replace(spec, compress_size=1, compress_stride=1))
        single.load_state_dict(layer.state_dict())
        assert close(single(x), 1.5 * full)


def test_splits_over_gpus_and_what_it_refuses() -> None:
    assert PAPER.shard(2) == replace(PAPER, num_heads=32, num_kv_heads=2)
    assert PAPER.shard(8) == replace(PAPER, num_heads=8, num_kv_heads=1)
    assert PAPER.with_kv_heads(64) == GQA(2560, 64, 64, 192, 128, 192)
    for change in (
        {"num_kv_heads": 3},
        {"rope_dim": 7},
        {"compress_size": 30},
        {"block_size": 40},
        {"blocks": 2},
        {"window": 0},
    ):
        with pytest.raises(AttncalcError):
            replace(PAPER, **change)
    with pytest.raises(AttncalcError, match="reach"):
        PAPER.cache(Reach("window", 8), "direct")
    with pytest.raises(ValueError, match="window 8"):
        Layer(TINY, Reach("window", 8))


def test_compared_at_the_size_of_deepseek_v3() -> None:
    (layer,) = layers_of("nsa", Dimensions(), None)
    assert layer.attention == V3_SIZE
    f = measure_layer(layer, Workload(131_072), Conventions())
    read = (131_072 - 32) // 16 + 1 + 1024 + 512
    assert (f.core_flops, f.score) == (2 * 128 * 256 * read, None)
    assert f.cache_elements == 2 * 8 * 128 + 128
    assert f.mha_elements == 2 * 128 * 128
