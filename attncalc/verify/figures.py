"""Figures of the articles that README lists as documents 000 to 004, as the specifications give them. No layer runs."""

from collections.abc import Iterator
from fractions import Fraction
from math import prod

from attncalc.attention.base import Attention, Step, cached_form
from attncalc.attention.gla import GLA
from attncalc.attention.gqa import GQA
from attncalc.attention.gta import GTA
from attncalc.attention.kda import KDA
from attncalc.attention.linear_state import LinearState
from attncalc.attention.mfa import MFA
from attncalc.attention.mla import MLA
from attncalc.attention.tpa import TPA
from attncalc.compare import CORE
from attncalc.dtypes import Formats
from attncalc.presets import load
from attncalc.reach import FULL
from attncalc.verify.proof import Proof, figure
from attncalc.workload import Workload

# DeepSeek-V2 and V3: 128 heads of 128, latent 512, RoPE key 64.
MHA = GQA(7168, 128, 128, 128, 128, 128)
GQA8 = GQA(7168, 128, 8, 128, 128, 128)
MQA = GQA(7168, 128, 1, 128, 128, 128)
V3 = MLA(7168, 128, 1536, 512, 128, 64, 128)
CONTEXT = 131_072


def elements(spec: Attention, form: str | None = None) -> int | Fraction:
    """Cached elements per token and layer."""
    layout = spec.cache(FULL, cached_form(spec, form or spec.forms[0]))
    return sum(t.heads.size * t.width.size for t in layout if t.reach == FULL)


def core(spec: Attention, form: str, *names: str) -> int:
    """FLOPs of some operations of one decode step."""
    ops = spec.ops(Step(Workload(CONTEXT)), form, cached=cached_form(spec, form)).contractions
    return sum(op.flops for op in ops if op.name in names)


def figures() -> Iterator[Proof]:
    """Cache sizes, ratios and GEMM widths."""
    two, four = "document 002", "document 004"
    yield figure("MHA, 128 heads of 128: elements per token, layer", f"{two}, {four}", 32_768, elements(MHA))
    yield figure("the same in bf16, bytes", two, 65_536, 2 * elements(MHA))
    yield figure("MLA of DeepSeek-V3: elements per token, layer", f"{two}, {four}", 576, elements(V3))
    yield figure("their ratio, printed 56.9", four, 56.9, round(float(elements(MHA) / elements(V3)), 1))
    without = MLA(7168, 128, 1536, 512, 128, 0, 128)
    yield figure("the ratio that leaves out the RoPE key", two, 64, Fraction(elements(MHA), elements(without)))
    yield figure("MLA in groups of GQA", four, Fraction(9, 4), Fraction(elements(V3), elements(MQA)))
    yield figure("GQA with 8 groups", two, 2048, elements(GQA8))
    yield figure("MQA", two, 256, elements(MQA))
    layers = load("deepseek-v3").num_layers
    yield figure(
        "61 layers, bf16, 131,072 tokens: MHA bytes", four, 523_986_010_112, layers * CONTEXT * 2 * elements(MHA)
    )
    yield figure(
        "61 layers, bf16, 131,072 tokens: MLA bytes",
        four,
        9_210_691_584,
        load("deepseek-v3").cache(CONTEXT).bytes_total,
    )
    for spec, form, width in ((MHA, "direct", 128), (MQA, "direct", 128), (V3, "absorbed", 576), (V3, "expanded", 192)):
        ops = spec.ops(Step(Workload(CONTEXT)), form, cached=cached_form(spec, form)).contractions
        found = next(op.gemm["k"] for op in ops if op.name == "score")
        yield figure(f"K of the score product, {spec.variant} {form}", two, width, found)
    score = Fraction(core(V3, "absorbed", "score"), core(MQA, "direct", "score"))
    yield figure("absorbed MLA against MQA: score FLOPs", two, Fraction(9, 2), score)
    whole = Fraction(core(V3, "absorbed", "score", "value"), core(MQA, "direct", "score", "value"))
    yield figure("absorbed MLA against MQA: core FLOPs", two, Fraction(17, 4), whole)
    narrow = Fraction(core(without, "absorbed", "score"), core(MQA, "direct", "score"))
    yield figure("absorbed, without RoPE, against head_dim 128: score FLOPs", four, 4, narrow)
    toy_mla = MLA(4, 2, None, 2, 2, 0, 2)
    for text, expected, spec in (("MHA", 8, GQA(4, 2, 2, 2, 2)), ("MQA", 4, GQA(4, 2, 1, 2, 2)), ("MLA", 2, toy_mla)):
        yield figure(f"toy of 2 heads x 2, {text}: elements per token", four, expected, elements(spec))
    one = "document 001"
    seeds = {name: load(name).groups[0].attention for name in ("seed-mha", "seed-gqa", "seed-mla")}
    mha, gqa, mla = seeds["seed-mha"], seeds["seed-gqa"], seeds["seed-mla"]
    if mha and gqa and mla:
        yield figure("layers of 4,096: GQA of 4 groups against MHA", one, 8, Fraction(elements(mha), elements(gqa)))
        yield figure("layers of 4,096: two latents of 256", one, 512, elements(mla))
    state = LinearState(4096, 2048).cache(FULL, "recurrent")
    sizes = {prod((t.heads.size, t.tokens(n), t.width.size)) for t in state for n in (1, 10_000)}
    yield figure("linear state, at any length", one, 2048 * 2048, sizes.pop() if len(sizes) == 1 else -1)


def intensity_limit(spec: Attention, form: str) -> Fraction:
    """FLOPs per byte of the core, one new token, 16-bit cache, as the context grows without bound.

    Both are a constant plus a slope times the context, so the limit is the quotient of the slopes.
    """

    def totals(context: int) -> tuple[int, int]:
        ops = spec.ops(Step(Workload(context)), form, cached=cached_form(spec, form)).contractions
        core_ops = [op for op in ops if op.name in CORE]
        moved = sum(sum(op.bytes(Formats()).values()) for op in core_ops)
        return sum(op.flops for op in core_ops), moved

    (flops, moved), (more_flops, more_moved) = totals(1024), totals(2048)
    return Fraction(more_flops - flops, more_moved - moved)


def intensity() -> Iterator[Proof]:
    """Limits of the arithmetic intensity: as published, without the RoPE slice, and exact."""
    H, g, d = 128, 16, 128
    source = "arXiv 2505.21487 table 1"
    gta, gla = GTA(7168, H, H // g, d, 0), GLA(7168, H, H // g, None, 2 * d, d, 0, d)
    two = GLA(7168, H, 2, None, 2 * d, d, 0, d)
    published: tuple[tuple[str, Attention, str, int], ...] = (
        ("MHA: 1", MHA, "direct", 1),
        ("MQA: H", MQA, "direct", H),
        ("GQA: g", GQA(7168, H, H // g, d, d, d), "direct", g),
        ("GTA: 2 g", gta, "direct", 2 * g),
        ("MLA: 2 H", MLA(7168, H, None, 4 * d, d, 0, d), "absorbed", 2 * H),
        ("GLA: 2 g", gla, "absorbed", 2 * g),
        ("GLA-2: H", two, "absorbed", H),
    )
    for text, spec, form, expected in published:
        found = intensity_limit(spec, form)
        yield figure(f"without RoPE slices, H = 128, g = 16, {text}", source, expected, found)
    R, L = 64, 2 * d
    rope_gta, rope_two = GTA(7168, H, H // g, d, R), GLA(7168, H, 2, None, L, d, R, d)
    exact: tuple[tuple[str, Attention, str, Fraction], ...] = (
        ("MLA: H (2 L + R) / (L + R)", V3, "absorbed", Fraction(H * (2 * 512 + R), 512 + R)),
        ("GLA-2: H (2 L + R) / (2 L + R)", rope_two, "absorbed", Fraction(H * (2 * L + R), 2 * L + R)),
        ("GTA: 2 H d / (G d + R)", rope_gta, "direct", Fraction(2 * H * d, H // g * d + R)),
        ("MFA of Step-3: H", MFA(7168, 64, 2048, 256, 256), "direct", Fraction(64)),
        (
            "TPA 6/2/2: (r_k r_q (d + H) + r_v H d) / ((r_k + r_v)(d + H))",
            TPA(7168, H, d, 6, 2, 2, d),
            "factored",
            Fraction(12 * (d + H) + 2 * H * d, 4 * (d + H)),
        ),
    )
    for text, spec, form, limit in exact:
        yield figure(
            f"exact, H = {spec.query_heads()}, {text} = {limit}",
            "the specification",
            limit,
            intensity_limit(spec, form),
        )
    yield figure("MLA of 128 heads, printed 241.8", "the specification", 241.8, round(float(exact[0][3]), 1))
    for tp in (2, 4):
        latents = max(1, 2 // tp)
        on_one = Fraction(H // tp * (2 * L + R), latents * L + R)
        found = intensity_limit(rope_two.shard(tp), "absorbed")
        yield figure(f"GLA-2 on one of {tp} GPUs, the RoPE key whole", "the specification", on_one, found)


def shapes() -> Iterator[Proof]:
    """Heads and widths of the two forms, and weight shapes of Gated MLA and of KDA with GVA."""
    yield _shape("absorbed MLA is an MQA: KV heads, K, V", "document 002", (1, 576, 512), V3.heads("absorbed")[1:])
    yield _shape("expanded MLA is an MHA: KV heads, K, V", "document 002", (128, 192, 128), V3.heads("expanded")[1:])
    D, H, d, v, r, rq = 96, 4, 16, 24, 32, 40
    gated = MLA(D, H, rq, r, d, 0, v, rotated=False, gate="full")
    # kv_b_proj holds d rows, then v rows, of each head; the document stacks all K rows before all V rows.
    expected = {
        "kv_a_proj_with_mqa": (r, D),
        "kv_b_proj": (H * (d + v), r),
        "q_a_proj": (rq, D),
        "q_b_proj": (H * d, rq),
        "gate_proj": (H * v, D),
        "o_proj": (D, H * v),
    }
    found = {w.name: w.sizes for w in gated.weights("absorbed")}
    for name, shape in expected.items():
        yield _shape(f"Gated MLA: {name}", "document 000", shape, found[f"{name}.weight"])
    HK, HV, K, V = 4, 8, 16, 24
    kda = KDA(D, HK, HV, K, V, conv_kernel=0)
    expected = {
        "q_proj": (HK * K, D),
        "k_proj": (HK * K, D),
        "v_proj": (HV * V, D),
        "f_proj": (HV * K, D),
        "b_proj": (HV, D),
        "o_proj": (D, HV * V),
    }
    found = {w.name: w.sizes for w in kda.weights("recurrent")}
    for name, shape in expected.items():
        yield _shape(f"KDA with GVA: {name}", "document 003", shape, found[f"{name}.weight"])
    (state,) = kda.cache(FULL, "recurrent")
    yield _shape("KDA with GVA: state", "document 003", (HV, K, V), (state.heads.size, state.rows, state.width.size))


def _shape(text: str, source: str, expected: tuple[int | None, ...], observed: tuple[int | None, ...]) -> Proof:
    def words(shape: tuple[int | None, ...]) -> str:
        return " x ".join(map(str, shape))

    return Proof(text, source, words(expected), words(observed), float(expected != observed))
