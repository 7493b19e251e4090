"""Laws that every model, form and workload must obey, and a count from the definition."""

from dataclasses import fields, replace
from math import prod
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import attncalc
from attncalc import dtypes
from attncalc.attention.base import Attention, Step
from attncalc.attention.gla import GLA
from attncalc.attention.gqa import GQA
from attncalc.attention.gqa_concat import ConcatGQA
from attncalc.attention.gta import GTA
from attncalc.attention.mfa import MFA
from attncalc.attention.mla import MLA
from attncalc.attention.mla_split import MLASplit
from attncalc.attention.tpa import TPA
from attncalc.axes import letters
from attncalc.dtypes import Formats
from attncalc.ffn import Dense, MoE
from attncalc.ops import Contraction
from attncalc.reach import FULL, Reach
from attncalc.workload import Conventions, Workload

FORMATS = Formats()
small = st.integers(1, 6)
sizes = st.integers(1, 40)


@st.composite
def reaches(draw: st.DrawFn) -> Reach:
    kinds: list[Literal["full", "window", "chunk"]] = ["full", "window", "chunk"]
    kind = draw(st.sampled_from(kinds))
    return FULL if kind == "full" else Reach(kind, draw(st.integers(1, 30)))


@st.composite
def gqas(draw: st.DrawFn) -> GQA:
    groups, per_group = draw(small), draw(small)
    head = draw(sizes)
    return GQA(
        draw(sizes),
        groups * per_group,
        groups,
        head,
        head if draw(st.booleans()) else draw(sizes),
        rope_dim=0,
        bias=draw(st.sampled_from(["", "qkv", "qkvo", "o"])),
        qk_norm=draw(st.sampled_from(["none", "head", "full", "per_head", "unweighted"])),
        gate=draw(st.sampled_from(["none", "full", "head"])),
        sinks=draw(st.booleans()),
    )


@st.composite
def concats(draw: st.DrawFn) -> ConcatGQA:
    """The options of a GQA, over an input of another width."""
    spec = draw(gqas())
    return ConcatGQA(**{f.name: getattr(spec, f.name) for f in fields(GQA)}, input_size=draw(sizes))


@st.composite
def mlas(draw: st.DrawFn) -> MLA:
    return MLA(
        draw(sizes),
        draw(small),
        draw(st.none() | sizes),
        draw(sizes),
        draw(sizes),
        2 * draw(st.integers(0, 10)),
        draw(sizes),
        gate=draw(st.sampled_from(["none", "full"])),
        bias=draw(st.booleans()),
    )


@st.composite
def splits(draw: st.DrawFn) -> MLASplit:
    return MLASplit(draw(sizes), draw(small), draw(sizes), draw(sizes), draw(sizes), draw(sizes), draw(st.booleans()))


@st.composite
def gtas(draw: st.DrawFn) -> GTA:
    groups, rope = draw(small), 2 * draw(st.integers(0, 10))
    return GTA(draw(sizes), groups * draw(small), groups, rope + draw(sizes), rope)


@st.composite
def glas(draw: st.DrawFn) -> GLA:
    latents, rope = draw(small), 2 * draw(st.integers(0, 10))
    heads = latents * draw(small)
    low = draw(st.none() | sizes)
    return GLA(draw(sizes), heads, latents, low, draw(sizes), draw(sizes), rope, draw(sizes), draw(st.booleans()))


@st.composite
def mfas(draw: st.DrawFn) -> MFA:
    rope = 2 * draw(st.integers(0, 10))
    return MFA(draw(sizes), draw(small), draw(sizes), rope + draw(sizes), rope, draw(st.booleans()))


@st.composite
def tpas(draw: st.DrawFn) -> TPA:
    rope = 2 * draw(st.integers(0, 10))
    ranks = draw(st.none() | small), draw(small), draw(small)
    return TPA(draw(sizes), draw(small), rope + draw(sizes), *ranks, rope)


attentions = st.one_of(gqas(), concats(), mlas(), splits(), gtas(), glas(), mfas(), tpas())


@st.composite
def steps(draw: st.DrawFn) -> Step:
    context = draw(st.integers(1, 80))
    return Step(Workload(context, draw(st.integers(1, context)), draw(small)), draw(reaches()))


def kept(attention: Attention, form: str) -> str:
    return "decompressed" if form == "decompressed" else attention.forms[0]


def flops(attention: Attention, step: Step, form: str) -> int:
    return sum(op.flops for op in attention.ops(step, form, cached=kept(attention, form)).contractions)


@given(reach=reaches(), context=st.integers(1, 120), data=st.data())
def test_reach_equals_a_loop_over_queries_and_keys(reach: Reach, context: int, data: st.DataObject) -> None:
    new = data.draw(st.integers(1, context))

    def attends(query: int, key: int) -> bool:
        if key > query:
            return False
        if reach.kind == "window":
            return query - key < reach.size
        return reach.kind == "full" or query // reach.size == key // reach.size

    queries = range(context - new, context)
    pairs = [(q, k) for q in queries for k in range(context) if attends(q, k)]
    assert reach.pairs(new, context, "causal") == len(pairs)
    assert reach.keys(new, context, "causal") == len({k for _, k in pairs})
    assert reach.pairs(new, context, "dense") >= len(pairs)
    # The keys that the next token attends to, besides itself, are stored.
    later = [k for k in range(context) if attends(context, k)]
    assert len(later) <= reach.stored(context) <= context


@given(reach=reaches(), start=st.integers(0, 60), lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_pairs_of_a_prompt_are_the_sum_of_its_chunks(reach: Reach, start: int, lengths: list[int]) -> None:
    total, position = 0, start
    for n in lengths:
        position += n
        total += reach.pairs(n, position, "causal")
    assert total == reach.pairs(sum(lengths), position, "causal")


@given(attention=attentions, step=steps())
def test_everything_but_weights_is_linear_in_the_batch(attention: Attention, step: Step) -> None:
    one = replace(step, workload=replace(step.workload, batch=1))
    batch = step.workload.batch
    for form in attention.forms:
        many_ops = attention.ops(step, form, cached=kept(attention, form))
        one_ops = attention.ops(one, form, cached=kept(attention, form))
        for many, single in zip(many_ops.contractions, one_ops.contractions, strict=True):
            assert many.flops == batch * single.flops
            a, b = many.bytes(FORMATS), single.bytes(FORMATS)
            assert a["weight"] == b["weight"]
            assert all(a[role] == batch * b[role] for role in ("cache", "cache_write", "activation"))
        for many_row, single_row in zip(many_ops.rowwise, one_ops.rowwise, strict=True):
            assert many_row.flops == batch * single_row.flops
        for tensor in attention.cache(step.reach, form):
            assert tensor.at(50, batch, FORMATS).bytes == batch * tensor.at(50, 1, FORMATS).bytes


@given(attention=attentions, reach=reaches(), lengths=st.lists(st.integers(1, 15), min_size=1, max_size=5))
def test_a_prompt_costs_the_sum_of_its_chunks(attention: Attention, reach: Reach, lengths: list[int]) -> None:
    """Exactly, for every form that rebuilds nothing; the expanded form exceeds it by the repeated expansion."""
    whole = sum(lengths)
    for form in attention.forms:
        if form == "expanded":
            continue
        total, position = 0, 0
        for n in lengths:
            position += n
            total += flops(attention, Step(Workload(position, n), reach), form)
        assert total == flops(attention, Step(Workload(whole, whole), reach), form)
        decode = sum(flops(attention, Step(Workload(i), reach), form) for i in range(1, whole + 1))
        assert decode == total


@given(attention=st.one_of(mlas(), splits(), glas()), lengths=st.lists(st.integers(1, 15), min_size=1, max_size=5))
def test_excess_of_expanding_is_the_repeated_expansion(attention: Attention, lengths: list[int]) -> None:
    whole = sum(lengths)
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    steps_ = [Step(Workload(end, n)) for end, n in zip(ends, lengths, strict=True)]
    total = sum(flops(attention, s, "expanded") for s in steps_)

    def expansion(tokens: int) -> int:
        step = Step(Workload(tokens, tokens))
        ops = attention.ops(step, "expanded", cached="absorbed").contractions
        return sum(op.flops for op in ops if op.name in ("kv_b_proj", "k_b_proj", "v_b_proj"))

    repeated = sum(expansion(end - n) for end, n in zip(ends, lengths, strict=True) if end > n)
    assert total - flops(attention, Step(Workload(whole, whole)), "expanded") == repeated


@pytest.mark.slow
@given(attention=attentions, step=steps())
def test_a_reach_beyond_the_context_is_full_attention(attention: Attention, step: Step) -> None:
    context = step.workload.context
    for form in attention.forms:
        full = attention.ops(replace(step, reach=FULL), form, cached=kept(attention, form)).contractions
        for kind in ("window", "chunk"):
            wide = attention.ops(replace(step, reach=Reach(kind, context)), form, cached=kept(attention, form))
            assert [op.flops for op in wide.contractions] == [op.flops for op in full]
            assert [op.bytes(FORMATS) for op in wide.contractions] == [op.bytes(FORMATS) for op in full]


@given(spec=gqas(), step=steps())
def test_gqa_is_mha_and_mqa_at_its_ends(spec: GQA, step: Step) -> None:
    H, e, d = spec.num_heads, spec.v_head_dim, spec.head_dim
    mha, mqa = replace(spec, num_kv_heads=H), replace(spec, num_kv_heads=1)
    assert mha.variant == "mha"
    assert mqa.variant == ("mqa" if H > 1 else "mha")
    assert sum(t.elements_per_token for t in mha.cache(FULL, "direct")) == H * (d + e)
    assert sum(t.elements_per_token for t in mqa.cache(FULL, "direct")) == d + e
    core = {"score", "value"}
    for other in (mha, mqa):
        a, b = (x.ops(step, "direct", cached="direct").contractions for x in (spec, other))
        assert [op.flops for op in a if op.name in core] == [op.flops for op in b if op.name in core]


@given(attention=attentions, reach=reaches(), context=st.integers(1, 60), batch=small)
def test_cache_is_the_sum_of_its_increments(attention: Attention, reach: Reach, context: int, batch: int) -> None:
    for form in attention.forms:
        for tensor in attention.cache(reach, form):
            bits = sum(tensor.growth_bits(n, FORMATS) for n in range(context))
            assert tensor.at(context, batch, FORMATS).bytes * 8 == batch * bits


@given(attention=attentions, step=steps())
def test_weights_of_the_operations_are_the_weights_of_the_layer(attention: Attention, step: Step) -> None:
    """Every matrix that a form has is read by exactly one product, in all its elements."""
    for form in attention.forms:
        ops = attention.ops(step, form, cached=kept(attention, form)).contractions
        read = sum(op.bytes(FORMATS)["weight"] for op in ops)
        matrices = [w for w in attention.weights(form) if w.name.endswith("proj.weight") or "with_mqa.weight" in w.name]
        assert read == 2 * sum(w.elements for w in matrices)


@given(spec=gqas(), step=steps())
def test_gqa_core_equals_a_loop_over_heads_and_pairs(spec: GQA, step: Step) -> None:
    total = 0
    w = step.workload
    for _ in range(w.batch * spec.num_heads):
        for query in range(w.context - w.new_tokens, w.context):
            first = 0 if step.reach.kind == "full" else max(0, query - step.reach.size + 1)
            if step.reach.kind == "chunk":
                first = query // step.reach.size * step.reach.size
            total += (query - first + 1) * (2 * spec.head_dim + 2 * spec.v_head_dim)
    ops = spec.ops(step, "direct", cached="direct").contractions
    assert sum(op.flops for op in ops if op.name in ("score", "value")) == total


@given(attention=attentions, step=steps())
def test_gemm_and_axes_say_the_same(attention: Attention, step: Step) -> None:
    dense = replace(step, count="dense")
    for form in attention.forms:
        for op in attention.ops(dense, form, cached=kept(attention, form)).contractions:
            assert 2 * prod(op.gemm.values()) == op.flops
            every = set(letters(f"{op.left.shape} {op.right.shape} {op.out.shape}"))
            assert prod(op.axes[a].size for a in every) * 2 == op.flops
            assert prod(op.symbols.values()) * 2 == op.flops or len(op.symbols) < len(op.free)


@given(attention=attentions, tp=st.integers(1, 6), context=st.integers(1, 50))
def test_a_split_is_refused_or_covers_the_whole(attention: Attention, tp: int, context: int) -> None:
    try:
        part = attention.shard(tp)
    except attncalc.AttncalcError:
        assert attention.query_heads() % tp or isinstance(attention, (GQA, GTA, GLA))
        return
    assert part.query_heads() * tp == attention.query_heads()
    form = attention.forms[0]
    whole, one = (sum(t.at(context, 1, FORMATS).bytes for t in x.cache(FULL, form)) for x in (attention, part))
    assert one <= whole <= one * tp


@given(experts=st.integers(1, 20), top_k=st.integers(1, 20), tokens=st.integers(1, 30), batch=small)
def test_experts_that_are_read(experts: int, top_k: int, tokens: int, batch: int) -> None:
    top_k = min(top_k, experts)
    moe = MoE(8, experts, top_k, 4, gated=True)
    workload = Workload(tokens, tokens, batch)
    ops = moe.ops(workload).contractions
    read = sum(op.bytes(FORMATS)["weight"] for op in ops if op.name.startswith("expert"))
    assert read == 2 * 3 * 8 * 4 * min(experts, batch * tokens * top_k)
    dense = Dense(8, 4, gated=True).ops(workload).contractions
    assert sum(op.flops for op in ops if op.name.startswith("expert")) == top_k * sum(op.flops for op in dense)
    assert moe.inactive_parameters == (experts - top_k) * 3 * 8 * 4


@settings(max_examples=30)
@given(
    model=st.sampled_from(["deepseek-v3", "gpt-oss-20b", "llama-4-scout", "gemma-4-26b-a4b", "gpt2", "seed-mla"]),
    context=st.integers(1, 3000),
    batch=small,
    data=st.data(),
)
def test_sums_of_a_model(model: str, context: int, batch: int, data: st.DataObject) -> None:
    loaded = attncalc.load(model)
    new = data.draw(st.integers(1, context))
    cost = loaded.flops(context, new, batch=batch)
    assert cost.total == cost.flops_attention + cost.flops_ffn + cost.flops_head
    every: list[tuple[int, Contraction]] = [(x.layers, op) for x in cost.layers for op in x.contractions]
    every += [(1, op) for op in cost.head.contractions]
    assert cost.total == sum(n * op.flops for n, op in every)
    parts = loaded.parameter_parts()
    assert loaded.parameters() == sum(v for k, v in parts.items() if k != "buffers")
    held = loaded.cache(context, batch=batch)
    assert held.bytes_total == sum(x.bytes for x in held.layers)
    assert held.bytes_per_sequence * batch == held.bytes_total
    matrices = sum(n * op.bytes(cost.conventions.formats)["weight"] for n, op in every)
    assert matrices <= cost.bytes_weights <= 2 * (loaded.parameters() + parts["buffers"]) * 2


@pytest.mark.parametrize("model", ["deepseek-v3", "llama-3.1-8b", "gpt-oss-20b", "minicpm3-4b"])
def test_decode_reads_the_whole_cache_and_writes_one_record(model: str) -> None:
    loaded = attncalc.load(model)
    cost = loaded.flops(1000, 1, batch=3)
    assert cost.bytes_cache_read == loaded.cache(1000, batch=3).bytes_total
    grown = loaded.cache(1, batch=3).bytes_total
    assert cost.bytes_cache_write == grown


@pytest.mark.parametrize("model", ["deepseek-v3", "llama-3.1-70b", "gpt-oss-120b"])
def test_one_gpu_of_eight_computes_an_eighth_of_what_is_split(model: str) -> None:
    loaded = attncalc.load(model)
    whole, part = loaded.flops(4096, 4096), loaded.flops(4096, 4096, tp=8)

    def core(cost: object) -> int:
        layers = getattr(cost, "layers")  # noqa: B009
        return sum(x.layers * op.flops for x in layers for op in x.contractions if op.name in ("score", "value"))

    assert core(part) * 8 == core(whole)
    assert part.flops_head * 8 == whole.flops_head
    assert part.total * 8 >= whole.total


def test_every_format_is_at_least_its_values() -> None:
    for row_format in dtypes.FORMATS.values():
        assert row_format.row(128) >= 128 * row_format.bits


@pytest.mark.slow
@given(context=st.integers(1, 5000), new=st.integers(1, 5000))
def test_dense_counts_at_least_causal(context: int, new: int) -> None:
    new = min(new, context)
    for model in ("gpt-oss-20b", "llama-4-scout"):
        loaded = attncalc.load(model)
        dense = loaded.flops(context, new, conventions=Conventions(count="dense"))
        assert dense.total >= loaded.flops(context, new).total
