"""Grouped-tied attention: published cache sizes, and the layer against its definition and its specification."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attncalc.attention.gqa import GQA  # noqa: E402
from attncalc.attention.gta import GTA  # noqa: E402
from attncalc.attention.gta_torch import Layer  # noqa: E402
from attncalc.attention.mla import MLA  # noqa: E402
from attncalc.attention.torch_base import Cache  # noqa: E402
from attncalc.dtypes import Formats  # noqa: E402
from attncalc.errors import AttncalcError  # noqa: E402
from attncalc.reach import FULL, Reach  # noqa: E402
from attncalc.verify.figures import intensity_limit  # noqa: E402
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

BASE = GTA(24, 6, 2, 8, 4)
SPECS = {
    "gta": BASE,
    "a group for each head": replace(BASE, num_kv_heads=6),
    "one group": replace(BASE, num_kv_heads=1),
    "no RoPE key": replace(BASE, rope_dim=0),
    "only the RoPE key": replace(BASE, rope_dim=8),
}
specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
reaches = pytest.mark.parametrize("reach", REACHES, ids=lambda r: r.text)


# Bytes per token and layer in bf16 on one GPU of TP 1 and 2: arXiv 2505.21487, XL (16 heads of 128), medium (of 64).
@pytest.mark.parametrize(
    ("spec", "tp1", "tp2"),
    [
        (GTA(2048, 16, 4, 128, 64), 1152, 640),  # 2 (4 x 128 + 64), 2 (2 x 128 + 64)
        (GTA(1024, 16, 4, 64, 32), 576, 320),
        (GQA(2048, 16, 16, 128, 128), 8192, 4096),
        (GQA(2048, 16, 4, 128, 128), 2048, 1024),
        (MLA(2048, 16, None, 512, 128, 64, 128), 1152, 1152),
        (GQA(1024, 16, 16, 64, 64), 4096, 2048),
        (GQA(1024, 16, 1, 64, 64), 256, 256),
        (GQA(1024, 16, 4, 64, 64), 1024, 512),
        (MLA(1024, 16, None, 256, 64, 32, 64), 576, 576),
    ],
    ids=lambda v: v.variant if hasattr(v, "variant") else "",
)
def test_published_bytes_per_token(spec: Any, tp1: int, tp2: int) -> None:
    assert [2 * elements(spec.shard(tp)) for tp in (1, 2)] == [tp1, tp2]


def test_sizes() -> None:
    D, H, G, d, R = 7168, 128, 8, 128, 64
    spec = GTA(D, H, G, d, R)
    assert sum(w.elements for w in spec.weights("direct")) == D * H * d + D * G * d + D * R + H * d * D
    assert core_flops(spec, "direct", 4096) == core_flops(GQA(D, H, G, d, d), "direct", 4096) == 4 * H * d * 4096
    assert elements(spec) == G * d + R == 1088
    assert spec.shard(16) == GTA(D, 8, 1, d, R)  # the tied state is replicated beyond G
    assert spec.with_kv_heads(128) == GQA(D, H, 128, d, d, R)
    for tp in (3, 256):
        with pytest.raises(AttncalcError, match="--tp"):
            spec.shard(tp)
    for wrong in ({"rope_dim": 7}, {"rope_dim": 130}, {"num_kv_heads": 7}, {"head_dim": 0}):
        with pytest.raises(AttncalcError):
            replace(spec, **wrong)


def test_intensity_limits() -> None:
    spec = GTA(7168, 128, 8, 128, 64)
    assert intensity_limit(spec, "direct") == Fraction(2 * 128 * 128, 8 * 128 + 64)
    assert intensity_limit(replace(spec, rope_dim=0), "direct") == 2 * 16


def test_one_format_for_what_is_k_and_v() -> None:
    (state, _) = BASE.cache(FULL, "direct")
    assert state.row_bits(Formats(kv="fp8")) == 2 * 8 * 8
    with pytest.raises(AttncalcError, match="no separate V"):
        state.row_bits(Formats(kv="fp8/int4"))


@specs
@reaches
def test_equals_the_definition(spec: GTA, reach: Reach) -> None:
    d, R = spec.head_dim, spec.rope_dim

    def heads(w: Any, token: Any, t: int) -> Any:
        q = [rotated(h, t, d - R, R) for h in (w["q_proj.weight"] @ token).split(d)]
        states = (w["kv_proj.weight"] @ token).split(d)
        k_pe = rotated(w["k_pe_proj.weight"] @ token, t, 0, R) if R else token[:0]
        groups = [states[h // (spec.num_heads // spec.num_kv_heads)] for h in range(spec.num_heads)]
        return q, [torch.cat((state[: d - R], k_pe)) for state in groups], groups, d**-0.5

    check_definition(Layer, spec, reach, heads)


@specs
@reaches
def test_steps_equal_one_prompt(spec: GTA, reach: Reach) -> None:
    check_steps(Layer, spec, reach)


@pytest.mark.parametrize("reach", [FULL, Reach("window", 64), Reach("chunk", 64)], ids=lambda r: r.text)
@pytest.mark.parametrize("spec", [GTA(7168, 128, 8, 128, 64), GTA(2048, 16, 4, 128, 0)], ids=["full size", "no RoPE"])
def test_contract(spec: GTA, reach: Reach) -> None:
    check_contract(Layer, spec, reach)


def test_the_rope_key_is_stored_once() -> None:
    cache = Cache()
    run(make(Layer, BASE), sequence(BASE), cache=cache)
    assert {n: tuple(t.shape) for n, t in cache.tensors.items()} == {"kv": (2, 2, 13, 8), "k_pe": (2, 1, 13, 4)}


def test_without_a_rope_key_it_is_a_gqa_whose_k_is_v() -> None:
    from attncalc.attention import gqa_torch

    spec = replace(BASE, rope_dim=0)
    layer = make(Layer, spec)
    twin = gqa_torch.Layer(GQA(24, 6, 2, 8, 8, shared_kv_weight=True), dtype=torch.float64)
    state = layer.state_dict()
    twin.load_state_dict({n.replace("kv_proj", "k_proj"): p for n, p in state.items()})
    assert_equal(run(layer, sequence(spec)), run(twin, sequence(spec)))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="only the form"):
        Layer(BASE, form="absorbed")
    with pytest.raises(ValueError, match="no such path"):
        Layer(BASE, path="quick")  # type: ignore[arg-type]
