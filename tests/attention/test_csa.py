"""Compressed attention of DeepSeek-V4: golden values, counts against loops, the layer against definition and source."""

import math
import warnings
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # tiny tensors: two threads wait for each other longer than they compute

import attncalc  # noqa: E402
from attncalc.allocation import baselines  # noqa: E402
from attncalc.attention.base import Step  # noqa: E402
from attncalc.attention.csa import CSA  # noqa: E402
from attncalc.attention.csa_torch import Layer  # noqa: E402
from attncalc.attention.gqa import GQA  # noqa: E402
from attncalc.attention.rotary import Rotary  # noqa: E402
from attncalc.attention.torch_base import Cache, CountOperations  # noqa: E402
from attncalc.dtypes import Formats  # noqa: E402
from attncalc.engines.transformers_v4 import LastBlock, Pending, layout  # noqa: E402
from attncalc.errors import AttncalcError  # noqa: E402
from attncalc.model import LayerGroup, Model  # noqa: E402
from attncalc.ops import Contraction  # noqa: E402
from attncalc.reach import FULL, Count, Reach  # noqa: E402
from attncalc.workload import Conventions, Workload  # noqa: E402

W8, W128 = Reach("window", 8), Reach("window", 128)
SLIDING = CSA(64, 4, 32, 8, 24, 2, 16, 0)
SPARSE = CSA(64, 4, 32, 8, 24, 2, 16, 4, 4, 16, 3)
HEAVY = CSA(64, 4, 32, 8, 24, 2, 16, 8)
TINY = {"tied-mqa": SLIDING, "csa": SPARSE, "hca": HEAVY}
EVERY = replace(SPARSE, index_topk=1000)
PRO_CSA = CSA(7168, 128, 512, 64, 1536, 16, 1024, 4, 64, 128, 1024)
PRO_HCA = CSA(7168, 128, 512, 64, 1536, 16, 1024, 128)
FLASH_SLIDING = CSA(4096, 64, 512, 64, 1024, 8, 1024, 0)
FULL_SIZE = {"csa": PRO_CSA, "hca": PRO_HCA, "tied-mqa": FLASH_SLIDING}
BF16, RECORD = Formats(), Formats(kv="fp8_ds_mla")
tiny = pytest.mark.parametrize("spec", TINY.values(), ids=TINY)


def products(
    spec: CSA, context: int, new: int = 1, batch: int = 1, count: Count = "causal", reach: Reach = W8
) -> list[Contraction]:
    step = Step(Workload(context, new, batch), reach, count)
    return list(spec.ops(step, "direct", cached="direct").contractions)


def by_name(ops: list[Contraction]) -> Counter[str]:
    return Counter({op.name: op.flops for op in ops})


def flops(spec: CSA, context: int, new: int = 1, count: Count = "causal") -> int:
    return sum(op.flops for op in products(spec, context, new, count=count))


def moved(ops: list[Contraction], role: Any, formats: Formats = RECORD) -> int:
    return sum(op.bytes(formats)[role] for op in ops)


# The specification


@pytest.mark.parametrize(
    ("spec", "parameters", "decode"), [(SLIDING, 10_812, 25_600), (EVERY, 25_324, 60_160), (HEAVY, 15_196, 36_352)]
)
def test_a_tiny_model_as_transformers_has_it(spec: CSA, parameters: int, decode: int) -> None:
    """D 64, H 4, c 32, Q 24, 2 groups of rank 16, window 8, m 4 or 8, indexer 4 x 16; one token at S = 41."""
    assert sum(w.elements for w in spec.weights("direct")) == parameters
    assert flops(spec, 41) == flops(spec, 41, count="dense") == decode


def test_parameters_of_flash() -> None:
    """D 4096, H 64, c 512, Q 1024, g 8, R 1024: q_b, o_a and o_b 33,554,432 each."""
    sizes = {w.name: w.elements for w in FLASH_SLIDING.weights("direct")}
    assert sizes["q_b_proj.weight"] == sizes["o_a_proj.weight"] == sizes["o_b_proj.weight"] == 33_554_432
    assert sum(sizes.values()) == 3 * 33_554_432 + 4096 * 1024 + 4096 * 512 + 1024 + 512 + 64


def test_the_cache_of_a_layer() -> None:
    S = 1_048_576
    window, entries, keys, state = (t.at(S, 1, RECORD) for t in PRO_CSA.cache(W128, "direct"))
    assert (window.name, window.shape, window.bytes) == ("window_kv", (1, 1, 128, 512), 128 * 584)
    assert (entries.name, entries.shape, entries.bytes) == ("compressed_kv", (1, 1, S // 4, 512), S // 4 * 584)
    assert (keys.name, keys.shape, keys.bytes) == ("index_k", (1, 1, S // 4, 128), S // 4 * 132)
    # Of c and z, both halves: 8 tokens of 8,192 B, and of the indexer 2,048 B.
    assert (state.name, state.dtype, state.bytes) == ("compressor_state", "fp32", 8 * 8_192 + 8 * 2_048)
    window, entries, state = (t.at(S, 1, RECORD) for t in PRO_HCA.cache(W128, "direct"))
    assert (entries.shape, entries.bytes) == ((1, 1, S // 128, 512), S // 128 * 584)
    assert (state.shape, state.bytes) == ((1, 1, 128, 1024), 128 * 4_096)
    (window,) = (t.at(S, 1, RECORD) for t in FLASH_SLIDING.cache(W128, "direct"))
    assert window.bytes == 128 * 584


def test_a_token_s_share_of_an_entry() -> None:
    """584 + 132 B for 4 tokens, 584 B for 128; the window is full."""
    for spec, share, elements in ((PRO_CSA, 179, 160), (PRO_HCA, 584 / 128, 4)):
        tensors = spec.cache(W128, "direct")
        assert sum(t.growth_bits(1000, RECORD) for t in tensors) == 8 * share
        assert sum(t.elements_per_token for t in tensors if t.grows(1000)) == elements
        # The first tokens add a row to the window, too.
        assert sum(t.growth_bits(100, RECORD) for t in tensors) == 8 * (share + 584)
    assert sum(t.growth_bits(1000, RECORD) for t in FLASH_SLIDING.cache(W128, "direct")) == 0


def test_a_whole_model() -> None:
    """DeepSeek-V4-Pro at 1,048,576 tokens in bf16: 9.62 GiB, without the compressor state."""
    pro = attncalc.load("deepseek-v4-pro")
    kept = pro.cache(1_048_576)
    window = 61 * 128 * 1024
    entries = 30 * 262_144 * (1024 + 256) + 31 * 8_192 * 1024
    assert kept.bytes_total - kept.bytes_fixed == window + entries == 10_334_371_840
    assert kept.bytes_fixed == 30 * 81_920 + 31 * 524_288 == 18_710_528
    assert kept.bytes_per_token == 30 * 320 + 31 * 8
    assert kept.elements_per_token == sum(x.layers * x.elements_per_token for x in kept.layers) == 30 * 160 + 31 * 4
    assert kept.elements_per_token_per_layer is None
    # Bytes of a token in all layers with fp8 and with fp4 index keys, and what pages of V3.2 would be: 48,068.
    for model, fp8, fp4 in (("deepseek-v4-pro", 5511.4375, 5031.4375), ("deepseek-v4-flash", 3850.25, 3514.25)):
        loaded = attncalc.load(model)
        for index, expected in ((None, fp8), ("fp4", fp4)):
            assert loaded.cache(100_000, formats=Formats(kv="fp8_ds_mla", index=index)).bytes_per_token == expected


def test_baselines_attend_to_the_whole_context() -> None:
    """The same heads with K and V apart: entries stand for the whole context, a sliding layer keeps its window."""
    flash, S = attncalc.load("deepseek-v4-flash"), 10_000
    mha = baselines(flash.cache(S))[0].allocation
    assert mha is not None
    assert mha.bytes_total == (41 * S + 2 * 128) * 2 * 64 * 512 * 2
    assert PRO_CSA.with_kv_heads(8) == GQA(7168, 128, 8, 512, 512, 64)


def test_keys_of_a_query() -> None:
    """DeepSeek-V4-Flash: 160 and 640 keys at 4,096 tokens, 7,940 at 1,000,000 with m = 128."""
    heavy, sparse = replace(FLASH_SLIDING, compress_ratio=128), replace(PRO_CSA, index_topk=512)
    for spec, context, keys in ((heavy, 4096, 160), (sparse, 4096, 640), (heavy, 1_000_000, 7_940)):
        score = next(op for op in products(spec, context, reach=W128) if op.name == "score")
        assert score.gemm == {"gemm_batch": 1, "m": spec.num_heads, "n": keys, "k": 512}


def test_what_a_decode_step_reads_and_writes() -> None:
    """S not a multiple of m: nothing but the rows of window, chosen entries and index keys, and a row of each."""
    S = 100_001
    for spec, entries, keys in ((PRO_CSA, 1024, S // 4), (PRO_HCA, S // 128, 0)):
        ops = products(spec, S, batch=3, reach=W128)
        assert moved(ops, "cache") == 3 * ((128 + entries) * 584 + keys * 132)
        row = 4 * 2 * spec.blocks_pooled * (512 + spec.index_head_dim)
        assert moved(ops, "cache_write") == 3 * (584 + row)
    (sliding,) = [moved(products(FLASH_SLIDING, S, reach=W128), role) for role in ("cache",)]
    assert sliding == 128 * 584


def test_tensor_parallel() -> None:
    part = PRO_CSA.shard(8)
    assert (part.num_heads, part.o_groups, part.index_heads) == (16, 2, 64)
    assert part.cache(W128, "direct") == PRO_CSA.cache(W128, "direct")
    whole, one = ({w.name: w.elements for w in s.weights("direct")} for s in (PRO_CSA, part))
    split = {name for name in whole if one[name] * 8 == whole[name]}
    assert split == {"q_b_proj.weight", "o_a_proj.weight", "o_b_proj.weight", "sinks"}
    assert all(one[name] == whole[name] for name in whole if name not in split)
    for tp in (3, 32):
        with pytest.raises(AttncalcError):
            PRO_CSA.shard(tp)


@pytest.mark.parametrize(
    ("spec", "change", "where"),
    [
        (SPARSE, {"o_groups": 3}, "o_groups"),
        (SPARSE, {"rope_dim": 3}, "rope_dim"),
        (SPARSE, {"rope_dim": 18}, "rope_dim"),
        (SPARSE, {"index_topk": 0}, "index_topk"),
        (HEAVY, {"index_head_dim": 8}, "index_head_dim"),
        (SPARSE, {"compress_ratio": 0}, "index_heads"),
        (HEAVY, {"compress_ratio": -1}, "compress_ratio"),
        (HEAVY, {"q_lora_rank": None}, "q_lora_rank"),
    ],
)
def test_dimensions_that_contradict_each_other(spec: CSA, change: dict[str, Any], where: str) -> None:
    with pytest.raises(AttncalcError) as caught:
        replace(spec, **change)
    assert caught.value.where == where


reaches = st.builds(lambda m, k: Reach("compressed", k, m), st.integers(1, 9), st.integers(0, 7))


@given(reach=reaches, context=st.integers(1, 90), data=st.data())
def test_pairs_equal_a_loop(reach: Reach, context: int, data: st.DataObject) -> None:
    new, m = data.draw(st.integers(1, context)), reach.block
    seen = [i // m for i in range(context - new + 1, context + 1)]
    chosen = [min(n, reach.size) if reach.size else n for n in seen]
    assert reach.pairs(new, context, "causal") == sum(chosen)
    assert reach.pairs(new, context, "dense") == new * (context // m)
    assert reach.keys(new, context, "causal") == min(context // m, sum(chosen)) <= reach.stored(context)
    assert reach.keys(new, context, "dense") == reach.stored(context) == context // m
    # A row comes once in a period, and is shared by its tokens before.
    period = range(context, context + m)
    assert sum(reach.growth(n) for n in period) == reach.stored(context + m) - reach.stored(context) == 1


@settings(max_examples=40)
@given(lengths=st.lists(st.integers(1, 15), min_size=1, max_size=4), spec=st.sampled_from([*TINY.values(), EVERY]))
def test_a_prompt_costs_the_sum_of_its_parts(lengths: list[int], spec: CSA) -> None:
    whole = sum(lengths)
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    steps = [Workload(end, n) for end, n in zip(ends, lengths, strict=True)]

    def total(*workloads: Workload) -> tuple[Counter[str], Counter[str]]:
        made = [spec.ops(Step(w, W8), "direct", cached="direct") for w in workloads]
        return (
            sum((Counter({op.name: op.flops for op in ops.contractions}) for ops in made), Counter()),
            sum((Counter({op.name: op.flops for op in ops.rowwise}) for ops in made), Counter()),
        )

    assert total(*steps) == total(Workload(whole, whole)) == total(*(Workload(i) for i in range(1, whole + 1)))


@given(
    spec=st.sampled_from([*TINY.values(), EVERY]), context=st.integers(1, 70), batch=st.integers(1, 3), data=st.data()
)
def test_the_count_equals_a_loop(spec: CSA, context: int, batch: int, data: st.DataObject) -> None:
    new, m = data.draw(st.integers(1, context)), spec.compress_ratio
    core = index = made = earlier = 0
    for i in range(context - new + 1, context + 1):
        entries = i // m if m else 0
        core += min(i, 8) + (min(entries, spec.index_topk) if spec.sparse else entries)
        index += entries if spec.sparse else 0
        made += bool(m and i % m == 0)
    if made:
        first = (context - new) // m * m - (m if spec.sparse else 0)
        earlier = len([t for t in range(context - new) if t >= first])
    ops = products(spec, context, new, batch)
    found = by_name(ops)
    assert found["score"] == found["value"] == 2 * batch * 4 * 32 * core
    assert found["index_score"] == 2 * batch * 4 * 16 * index
    row = 2 * spec.blocks_pooled * (32 + spec.index_head_dim)
    rows = min(new, spec.blocks_pooled * m)
    written = new * 32 + made * (32 + spec.index_head_dim) * bool(m)
    assert moved(ops, "cache_write", BF16) == batch * (2 * written + 4 * row * rows)
    state = sum(op.bytes(BF16)["cache"] for op in ops if op.name.endswith(("kv_proj", "gate_proj", "index_k_proj")))
    assert state == batch * 4 * row * earlier
    pooled = {op.name: op for op in spec.ops(Step(Workload(context, new, batch), W8), "direct", cached="").rowwise}
    if m:
        assert pooled["compressor_pool"].flops == batch * made * spec.blocks_pooled * m * 32 * 8


@tiny
def test_weights_of_the_operations_are_the_weights_of_the_layer(spec: CSA) -> None:
    matrices = [w for w in spec.weights("direct") if w.name.endswith("proj.weight")]
    assert moved(products(spec, 30, 7), "weight", BF16) == 2 * sum(w.elements for w in matrices)


# What transformers keeps


def test_rows_that_only_an_engine_keeps() -> None:
    pending, last = Pending(4), LastBlock(4)
    assert [pending.stored(n) for n in range(9)] == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert [last.stored(n) for n in range(9)] == [0, 0, 0, 0, 4, 4, 4, 4, 4]
    assert sum(pending.growth(n) for n in range(4)) == pending.stored(4) == 0
    assert sum(last.growth(n) for n in range(9)) == last.stored(9)


def test_reasons_name_the_difference() -> None:
    made = attncalc.load("deepseek-v4-flash").cache(5000, engine="transformers")
    assert len(made.reasons) == 2
    logical = attncalc.load("deepseek-v4-flash").cache(5000)
    assert made.bytes_total - logical.bytes_total == sum(r.bytes for r in made.reasons)
    assert made.bytes_per_token == logical.bytes_per_token


# The layer


def make(spec: CSA, reach: Reach = W8, **options: Any) -> Layer:
    torch.manual_seed(0)
    layer = Layer(spec, reach, **({"dtype": torch.float64} | options))
    with torch.no_grad():
        for name, p in layer.named_parameters():
            p.normal_(mean=float("norm" in name), std=0.5 if p.ndim == 1 or "bias" in name else p.shape[-1] ** -0.5)
    return layer


def sequence(tokens: int, batch: int = 2, width: int = 64) -> Any:
    torch.manual_seed(1)
    return torch.randn(batch, tokens, width, dtype=torch.float64)


def run(layer: Layer, x: Any, *splits: int, cache: Cache | None = None) -> Any:
    cache = cache or Cache()
    with torch.inference_mode():
        return torch.cat([layer(part, cache) for part in x.split(splits or x.shape[1], dim=1)], dim=1)


def assert_equal(got: Any, expected: Any, tolerance: float = 1e-12) -> None:
    assert got.shape == expected.shape
    assert (got - expected).abs().max() < tolerance * expected.abs().max()


def definition(layer: Layer, x: Any) -> Any:
    """One sequence; one token, head, key and entry at a time."""
    spec, w = layer.spec, dict(layer.named_parameters())
    R, m, W = spec.rope_dim, spec.compress_ratio, layer.reach.size

    def normed(row: Any, weight: Any = 1.0) -> Any:
        return row / (row.square().mean() + layer.eps).sqrt() * weight

    def rotated(row: Any, position: int) -> Any:
        out = row.clone()
        for i in range(R // 2):
            a, b = len(row) - R + 2 * i, len(row) - R + 2 * i + 1  # neighbours among the last R values
            angle = position * 10000 ** (-2 * i / R)
            z = complex(row[a], row[b]) * complex(math.cos(angle), math.sin(angle))
            out[a], out[b] = z.real, z.imag
        return out

    def entries(place: str, width: int) -> list[Any]:
        c = [w[f"{place}.kv_proj.weight"] @ token for token in x]
        z = [w[f"{place}.gate_proj.weight"] @ token + w[f"{place}.position_bias"][t % m] for t, token in enumerate(x)]
        out = []
        for i in range(len(x) // m):
            slots = [(c[t][-width:], z[t][-width:]) for t in range(i * m, i * m + m)]
            if spec.sparse and i:
                slots += [(c[t][:width], z[t][:width]) for t in range(i * m - m, i * m)]
            total = sum(gate.exp() for _, gate in slots)
            pooled = sum(gate.exp() / total * value for value, gate in slots)
            out.append(rotated(normed(pooled, w[f"{place}.kv_norm.weight"]), i * m))
        return out

    kept = entries("compressor", spec.head_dim) if m else []
    keys = entries("compressor.indexer", spec.index_head_dim) if spec.sparse else []
    rows = [rotated(normed(w["kv_proj.weight"] @ token, w["kv_norm.weight"]), t) for t, token in enumerate(x)]
    out = []
    for t, token in enumerate(x):
        q_a = normed(w["q_a_proj.weight"] @ token, w["q_a_norm.weight"])
        visible = list(range((t + 1) // m)) if m else []
        if spec.sparse:
            index = "compressor.indexer"
            q = (w[f"{index}.q_b_proj.weight"] @ q_a).view(spec.index_heads, -1)
            head_weights = w[f"{index}.scorer.weights_proj.weight"] @ token
            scores = {
                e: sum(
                    float(head_weights[h] * (rotated(q[h], t) @ keys[e]).clamp(min=0)) for h in range(spec.index_heads)
                )
                for e in visible
            }
            visible = sorted(visible, key=lambda e: -scores[e])[: spec.index_topk]
        attended = rows[max(0, t - W + 1) : t + 1] + [kept[e] for e in visible]
        heads = []
        for h, q in enumerate((w["q_b_proj.weight"] @ q_a).view(spec.num_heads, -1)):
            query = rotated(normed(q), t)
            weights = [(query @ row * spec.head_dim**-0.5).exp() for row in attended]
            total = sum(weights) + w["sinks"][h].exp()
            heads.append(rotated(sum(a / total * row for a, row in zip(weights, attended, strict=True)), -t))
        joined, low = torch.cat(heads), []
        wide = len(joined) // spec.o_groups
        for g in range(spec.o_groups):
            matrix = w["o_a_proj.weight"][g * spec.o_lora_rank : (g + 1) * spec.o_lora_rank]
            low.append(matrix @ joined[g * wide : (g + 1) * wide])
        out.append(w["o_b_proj.weight"] @ torch.cat(low))
    return torch.stack(out)


@tiny
def test_the_layer_equals_the_definition(spec: CSA) -> None:
    layer, x = make(spec), sequence(26, 1)
    with torch.no_grad():
        assert_equal(run(layer, x)[0], definition(layer, x[0]))


@tiny
def test_steps_equal_one_prefill(spec: CSA) -> None:
    x = sequence(41)
    for reach in (W8, FULL, Reach("chunk", 5), Reach("window", 1)):
        layer = make(spec, reach)
        whole = run(layer, x)
        assert_equal(run(layer, x, *[1] * 41), whole)
        assert_equal(run(layer, x, 3, 2, 11, 1, 1, 23, cache=Cache(capacity=41)), whole)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_split_of_any_shape(data: st.DataObject) -> None:
    size, m = st.integers(1, 6), data.draw(st.integers(0, 5))
    groups, rope = data.draw(st.integers(1, 2)), data.draw(st.integers(0, 2)) * 2
    # All entries are chosen: scores of 0 are equal, and which of equals comes first is nobody's promise.
    index = (data.draw(size), data.draw(st.integers(max(1, rope), 6)), 1000)
    spec = CSA(
        data.draw(size),
        groups * data.draw(st.integers(1, 2)),
        data.draw(st.integers(max(1, rope), 6)),
        rope,
        data.draw(size),
        groups,
        data.draw(size),
        m,
        *(index if m and data.draw(st.booleans()) else ()),
    )
    reach = Reach("window", data.draw(st.integers(1, 9)))
    splits = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=5))
    layer, x = make(spec, reach), sequence(sum(splits), 2, spec.hidden_size)
    cache = Cache()
    assert_equal(run(layer, x, *splits, cache=cache), run(layer, x), 1e-11)
    expected = {t.name: (2, 1, t.tokens(cache.length), t.width.size) for t in spec.cache(reach, "direct")}
    assert {name: tuple(t.shape) for name, t in cache.tensors.items()} == expected


def test_queries_in_blocks_are_those_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x = sequence(41)
    for spec in TINY.values():
        layer = make(spec)
        whole = run(layer, x)
        monkeypatch.setattr(CSA, "score_block", 7)
        assert_equal(run(layer, x), whole)
        assert_equal(run(layer, x, 20, 21), whole)
        monkeypatch.undo()


def test_what_there_is_not_is_refused() -> None:
    assert Layer.paths(SPARSE) == ("reference",)
    with pytest.raises(ValueError, match="no fused kernel"):
        Layer(SPARSE, path="fast")
    with pytest.raises(ValueError, match="only the form"):
        Layer(SPARSE, form="absorbed")


@pytest.mark.parametrize("spec", FULL_SIZE.values(), ids=FULL_SIZE)
def test_contract_at_full_size(spec: CSA) -> None:
    """On the meta device: parameters, cache tensors and counted FLOPs are those of the specification."""
    layer = Layer(spec, W128, device="meta", dtype=torch.bfloat16)
    assert {n: tuple(p.shape) for n, p in layer.state_dict().items()} == {w.name: w.sizes for w in spec.weights("")}
    for steps in ([126, 5, 1, 130], [1, 1]):
        cache, context = Cache(), 0
        for new in steps:
            context += new
            x = torch.empty(2, new, spec.hidden_size, dtype=torch.bfloat16, device="meta")
            with CountOperations() as counted, torch.inference_mode():
                out = layer(x, cache)
            assert (out.shape, out.dtype, cache.length) == (x.shape, x.dtype, context)
            expected = {t.name: t.at(context, 2, BF16) for t in spec.cache(W128, "direct")}
            assert {n: tuple(t.shape) for n, t in cache.tensors.items()} == {n: t.shape for n, t in expected.items()}
            assert cache.storage_bytes == sum(t.bytes for t in expected.values())
            found = by_name(products(spec, context, new, 2, "dense", W128))
            assert dict(counted.flops) == {k: v for k, v in found.items() if v or k in counted.flops}
            assert counted.total == sum(found.values())


# Against transformers


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "beta_slow": 1.0}
COMPRESS = Rotary(160000.0, interleaved=True, factor=4, original_max_position=16, beta_fast=4, attention_factor=1.0)
KINDS = {"tied-mqa": "sliding", "csa": "compressed_sparse", "hca": "heavily_compressed"}


@pytest.fixture(scope="module")
def theirs() -> Any:
    """A tiny DeepSeek-V4 whose three layers are one of each kind, every weight random."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.DeepseekV4Config(
        vocab_size=32,
        hidden_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        head_dim=32,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        n_routed_experts=2,
        num_experts_per_tok=1,
        layer_types=[f"{kind}_attention" for kind in KINDS.values()],
        mlp_layer_types=["moe"] * 3,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        rope_parameters=dict(YARN),
        max_position_embeddings=64,
        sliding_window=8,
        o_groups=2,
        o_lora_rank=16,
        index_n_heads=4,
        index_head_dim=16,
        index_topk=3,
        hc_mult=2,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = transformers.DeepseekV4Model(config).eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "self_attn" in key:
                small = 0.5 if p.ndim == 1 or "bias" in key else p.shape[-1] ** -0.5
                p.normal_(mean=float("norm" in key), std=small)
    return model, transformers.DynamicCache, config


def compute(model: Any, cache: Any, splits: tuple[int, ...]) -> list[tuple[Any, Any]]:
    """What goes into each attention module and what comes out, over all steps."""
    seen: list[list[tuple[Any, Any]]] = [[], [], []]

    def look(layer: int) -> Any:
        def hook(_: Any, args: Any, kwargs: Any, out: Any) -> None:
            seen[layer].append((args[0] if args else kwargs["hidden_states"], out[0]))

        return model.layers[layer].self_attn.register_forward_hook(hook, with_kwargs=True)

    hooks = [look(i) for i in range(3)]
    torch.manual_seed(2)
    x = torch.randn(2, sum(splits), 64)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for part in x.split(splits, dim=1):
            model(inputs_embeds=part, cache=cache, use_cache=True)
    for hook in hooks:
        hook.remove()
    return [(torch.cat([a for a, _ in s], dim=1), torch.cat([b for _, b in s], dim=1)) for s in seen]


@pytest.mark.parametrize("splits", [(41,), (13, 20, 1, 1, 1, 1, 1, 1, 1, 1)], ids=["prefill", "decode"])
def test_outputs_equal_transformers(theirs: Any, splits: tuple[int, ...]) -> None:
    model, dynamic, config = theirs
    for i, ((name, spec), (x, expected)) in enumerate(
        zip(TINY.items(), compute(model, dynamic(config=config), splits), strict=True)
    ):
        rotary = Rotary(interleaved=True) if name == "tied-mqa" else COMPRESS
        layer = Layer(spec, W8, rotary=rotary, eps=config.rms_norm_eps)
        layer.load_state_dict(model.layers[i].self_attn.state_dict())
        for ours in ((41,), (13, 20, *[1] * 8)):
            assert_equal(run(layer, x, *ours), expected, 1e-5)


def test_cache_equals_transformers(theirs: Any) -> None:
    """Every tensor of its cache objects, token by token."""
    model, dynamic, config = theirs
    groups = tuple(LayerGroup((i,), spec, None, 0, W8) for i, spec in enumerate(TINY.values()))
    ours = Model("tiny", 64, groups)
    for splits in ([1] * 21, [30, 1, 4]):
        cache, context = dynamic(config=config), 0
        for new in splits:
            context += new
            compute_step(model, cache, new)
            made = ours.cache(context, batch=2, engine="transformers", formats=Formats(kv="fp32"))
            for layer, kept in zip(cache.layers, made.layers, strict=True):
                # `values` of a layer with entries are its `keys`.
                held = [layer.keys] if layer.values is layer.keys else [layer.keys, layer.values]
                states = [d for d in vars(layer).values() if isinstance(d, dict)]
                held += [t for d in states for t in d.values() if torch.is_tensor(t)]
                assert sum(t.nbytes for t in held) == kept.bytes
                assert sorted(math.prod(t.shape) for t in held if t.numel()) == sorted(
                    math.prod(t.shape) for t in kept.tensors if math.prod(t.shape)
                )


def compute_step(model: Any, cache: Any, new: int) -> None:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(inputs_embeds=torch.randn(2, new, 64), cache=cache, use_cache=True)


def test_flops_equal_transformers(theirs: Any) -> None:
    model, dynamic, config = theirs
    groups = tuple(LayerGroup((i,), spec, None, 0, W8) for i, spec in enumerate(TINY.values()))
    ours, cache, context = Model("tiny", 64, groups), dynamic(config=config), 0
    totals: list[int] = []
    counters: list[CountOperations] = []

    def note(*_: Any) -> None:
        totals.append(counters[-1].total)

    modules = [layer.self_attn for layer in model.layers]
    hooks = [hook(note) for m in modules for hook in (m.register_forward_pre_hook, m.register_forward_hook)]
    for new in (30, 1, 5, 1):
        context += new
        totals.clear()
        with CountOperations() as counted:
            counters.append(counted)
            compute_step(model, cache, new)
        found = [after - before for before, after in zip(totals[::2], totals[1::2], strict=True)]
        cost = ours.flops(context, new, batch=2, engine="transformers", conventions=Conventions(count="dense"))
        assert found == [layer.flops_attention for layer in cost.layers]
    for hook in hooks:
        hook.remove()


def test_layout_of_a_sliding_layer_has_k_and_v_apart() -> None:
    assert [t.name for t in layout(SLIDING, Reach("window", 7))] == ["k", "v"]
    assert {t.name for t in layout(SPARSE, W8)} >= {"window_kv", "compressed_kv", "index_k", "pending_kv"}
