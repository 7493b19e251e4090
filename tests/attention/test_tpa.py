"""Tensor-product attention: published cache sizes, and the layer against its definition and its specification."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attncalc.attention import tpa_torch  # noqa: E402
from attncalc.attention.base import Step  # noqa: E402
from attncalc.attention.gqa import GQA  # noqa: E402
from attncalc.attention.tpa import TPA  # noqa: E402
from attncalc.attention.tpa_torch import Layer  # noqa: E402
from attncalc.errors import AttncalcError  # noqa: E402
from attncalc.reach import FULL, Reach  # noqa: E402
from attncalc.verify.figures import intensity_limit  # noqa: E402
from attncalc.workload import Workload  # noqa: E402
from tests.attention.common import (  # noqa: E402
    REACHES,
    assert_equal,
    check_contract,
    check_definition,
    check_steps,
    core_flops,
    elements,
    make,
    rotated,
    run,
    sequence,
)

BASE = TPA(24, 3, 8, 4, 2, 3, 8)
SPECS = {
    "tpa": BASE,
    "plain query": replace(BASE, q_rank=None),
    "ranks of 1": replace(BASE, q_rank=1, k_rank=1, v_rank=1),
    "partial RoPE": replace(BASE, rope_dim=4),
    "no RoPE": replace(BASE, rope_dim=0),
}
PAPER = TPA(7168, 128, 128, 6, 2, 2, 128)
specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
reaches = pytest.mark.parametrize("reach", REACHES, ids=lambda r: r.text)


# Bytes per token and layer in bf16, medium models of arXiv 2505.21487: on one of two GPUs the heads are halved and
# rounded down, since 29 heads have no halves; the factors B are whole.
@pytest.mark.parametrize(("rank", "heads", "tp1", "tp2"), [(2, 29, 744, 624), (4, 26, 1440, 1232)])
def test_published_bytes_per_token(rank: int, heads: int, tp1: int, tp2: int) -> None:
    spec = TPA(1024, heads, 64, 6, rank, rank, 64)
    assert 2 * elements(spec) == 2 * 2 * rank * (heads + 64) == tp1
    assert 2 * elements(replace(spec, num_heads=heads // 2)) == tp2
    if heads % 2 == 0:
        assert 2 * elements(spec.shard(2)) == tp2
    else:
        with pytest.raises(AttncalcError, match="29 query heads"):
            spec.shard(2)


def test_sizes() -> None:
    D, H, d = 7168, 128, 128
    assert sum(w.elements for w in PAPER.weights("factored")) == D * (6 + 2 + 2) * (H + d) + H * d * D
    dense = replace(PAPER, q_rank=None)
    assert sum(w.elements for w in dense.weights("factored")) == D * H * d + D * 4 * (H + d) + H * d * D
    # FlashTPA at r_k = r_v = 1: 2 r_q d + 2 H r_q and an elementwise H for a key, an elementwise H and 2 H d for a value.
    one, S = replace(PAPER, k_rank=1, v_rank=1), 4096
    assert core_flops(one, "factored", S) == S * (2 * 6 * d + 2 * H * 6 + 2 * H * d)
    rows = {r.name: r.flops for r in one.ops(Step(Workload(S)), "factored", cached="factored").rowwise}
    assert (rows["weight_by_a_k"], rows["weight_by_a_v"]) == (S * H, S * H)
    assert "sum_over_k_rank" not in rows
    assert core_flops(dense, "factored", S) == 2 * S * H * d * (2 + 2)
    expanded = {op.name: op.flops for op in PAPER.ops(Step(Workload(S)), "expanded", cached="factored").contractions}
    assert expanded["expand_k"] + expanded["expand_v"] == 2 * (2 + 2) * H * d * S
    assert expanded["score"] == expanded["value"] == 2 * H * d * S


def test_elementwise_work_is_exact() -> None:
    # For each pair and head: r_k products and r_k - 1 sums for the score, r_v products for the value.
    step = Step(Workload(50, 7, 2))
    rows = {r.name: r.flops for r in replace(PAPER, k_rank=5).ops(step, "factored", cached="factored").rowwise}
    pairs = sum(range(44, 51))
    assert rows["weight_by_a_k"] + rows["sum_over_k_rank"] == 2 * 128 * pairs * (5 + 4)
    assert rows["weight_by_a_v"] == 2 * 128 * pairs * 2


def test_the_factored_form_reads_the_cache_once() -> None:
    from attncalc.dtypes import Formats

    for form in PAPER.forms:
        for spec in (PAPER, replace(PAPER, q_rank=None)):
            ops = spec.ops(Step(Workload(1000, 1, 3)), form, cached=form).contractions
            assert sum(op.bytes(Formats())["cache"] for op in ops) == 2 * 3 * 1000 * elements(spec)
            assert sum(op.bytes(Formats())["cache_write"] for op in ops) == 2 * 3 * elements(spec)


def test_splits() -> None:
    half = PAPER.shard(2)
    assert [t.width.size for t in half.cache(FULL, "factored")] == [64, 128, 64, 128]
    with pytest.raises(AttncalcError, match="--tp"):
        PAPER.shard(3)
    assert PAPER.with_kv_heads(128) == GQA(7168, 128, 128, 128, 128, 128)
    for wrong in ({"rope_dim": 7}, {"q_rank": 0}, {"k_rank": 0}):
        with pytest.raises(AttncalcError):
            replace(PAPER, **wrong)
    with pytest.raises(AttncalcError, match="no such form"):
        PAPER.ops(Step(Workload(1)), "absorbed", cached="factored")


def test_intensity_limit() -> None:
    # 2 (r_k r_q (d + H) + r_v H d) FLOPs over 2 (r_k + r_v)(d + H) bytes of a key
    assert intensity_limit(PAPER, "factored") == Fraction(12 * 256 + 2 * 128 * 128, 4 * 256) == 35


@specs
@reaches
def test_equals_the_definition(spec: TPA, reach: Reach) -> None:
    H, d, R = spec.num_heads, spec.head_dim, spec.rope_dim

    def built(w: Any, token: Any, side: str, rank: int, t: int | None) -> Any:
        a, b = (w[f"a_{side}_proj.weight"] @ token).view(H, rank), (w[f"b_{side}_proj.weight"] @ token).split(d)
        turned = [row if t is None else rotated(row, t, 0, R) for row in b]
        return [sum(a[h, r] * turned[r] for r in range(rank)) / rank for h in range(H)]

    def heads(w: Any, token: Any, t: int) -> Any:
        if spec.q_rank is None:
            q = [rotated(h, t, 0, R) for h in (w["q_proj.weight"] @ token).split(d)]
        else:
            q = built(w, token, "q", spec.q_rank, t)
        k, v = built(w, token, "k", spec.k_rank, t), built(w, token, "v", spec.v_rank, None)
        return q, k, v, d**-0.5

    check_definition(Layer, spec, reach, heads)


@specs
@reaches
def test_steps_equal_one_prompt(spec: TPA, reach: Reach) -> None:
    check_steps(Layer, spec, reach)


def test_a_few_queries_at_a_time_are_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    x = sequence(BASE)
    whole = run(make(Layer, BASE, Reach("window", 5), path="reference"), x)
    for size in (1, 4, 13):
        monkeypatch.setattr(tpa_torch, "QUERIES", size)
        assert_equal(run(make(Layer, BASE, Reach("window", 5), path="fast"), x), whole)


@pytest.mark.parametrize("reach", [FULL, Reach("window", 64), Reach("chunk", 64)], ids=lambda r: r.text)
@pytest.mark.parametrize("spec", [PAPER, TPA(2048, 29, 64, None, 4, 3, 0)], ids=["full size", "plain query"])
def test_contract(spec: TPA, reach: Reach) -> None:
    check_contract(Layer, spec, reach)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="the forms are factored"):
        Layer(BASE, form="absorbed")
    with pytest.raises(ValueError, match="no such path"):
        Layer(BASE, path="quick")  # type: ignore[arg-type]
