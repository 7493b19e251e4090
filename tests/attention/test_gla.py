"""Grouped latent attention: published cache sizes, and the layer against its definition and its specification."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attncalc.attention import mla_torch  # noqa: E402
from attncalc.attention.base import Step  # noqa: E402
from attncalc.attention.gla import GLA  # noqa: E402
from attncalc.attention.gla_torch import Layer  # noqa: E402
from attncalc.attention.mla import MLA  # noqa: E402
from attncalc.attention.torch_base import Cache  # noqa: E402
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
    rms,
    rotated,
    run,
    sequence,
)

BASE = GLA(24, 6, 2, 10, 12, 6, 4, 5)
SPECS = {
    "gla": BASE,
    "no q-lora": replace(BASE, q_lora_rank=None),
    "no RoPE key": replace(BASE, qk_rope_head_dim=0),
    "no norms": replace(BASE, latent_norm=False),
    "a latent for each head": replace(BASE, num_latents=6),
}
TWO = GLA(7168, 128, 2, 1536, 256, 128, 64, 128)
specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
reaches = pytest.mark.parametrize("reach", REACHES, ids=lambda r: r.text)


# Bytes per token and layer in bf16 on one GPU of TP 1, 2 and 4: arXiv 2505.21487, XL (16 heads of 128), medium (of 64).
@pytest.mark.parametrize(
    ("spec", "by_tp"),
    [
        (GLA(2048, 16, 2, 1024, 256, 128, 64, 128), [1152, 640, 640]),  # 2 (2 x 256 + 64), 2 (256 + 64)
        (GLA(1024, 16, 2, 512, 128, 64, 32, 64), [576, 320, 320]),
    ],
)
def test_published_bytes_per_token(spec: GLA, by_tp: list[int]) -> None:
    assert [2 * elements(spec.shard(tp)) for tp in (1, 2, 4)] == by_tp


def test_sizes() -> None:
    D, H, Q, L, P, R, V = 7168, 128, 1536, 256, 128, 64, 128
    down = D * Q + Q + D * (2 * L + R) + 2 * L
    assert sum(w.elements for w in TWO.weights("absorbed")) == down + Q * H * (P + R) + L * H * (P + V) + H * V * D
    assert core_flops(TWO, "absorbed", 4096) == 2 * H * 4096 * (L + R + L)
    assert core_flops(TWO, "expanded", 4096) == 2 * H * 4096 * (P + R + V)
    assert elements(TWO) == 576
    assert elements(TWO, "decompressed") == H * (P + R + V)
    assert TWO.heads("absorbed") == (128, 2, 320, 256)
    assert TWO.heads("expanded") == (128, 128, 192, 128)
    assert TWO.shard(8) == replace(TWO, num_heads=16, num_latents=1)
    with pytest.raises(AttncalcError, match="2 latents"):
        replace(TWO, num_heads=126).shard(3)
    for wrong in ({"num_latents": 3}, {"qk_rope_head_dim": 3}, {"kv_lora_rank": 0}, {"q_lora_rank": 0}):
        with pytest.raises(AttncalcError):
            replace(TWO, **wrong)  # type: ignore[arg-type]


def test_intensity_limits() -> None:
    assert intensity_limit(TWO, "absorbed") == 128
    one = replace(TWO, num_latents=1, kv_lora_rank=512)
    v3 = MLA(7168, 128, 1536, 512, 128, 64, 128)
    assert intensity_limit(one, "absorbed") == intensity_limit(v3, "absorbed") == Fraction(128 * 1088, 576)
    assert round(float(intensity_limit(one, "absorbed")), 1) == 241.8
    for latents in (2, 4, 8):
        spec = replace(TWO, num_latents=latents, qk_rope_head_dim=0)
        assert intensity_limit(spec, "absorbed") == 2 * 128 // latents


def test_ops_of_one_latent_are_those_of_mla() -> None:
    spec, mla = replace(TWO, num_latents=1), MLA(7168, 128, 1536, 256, 128, 64, 128)
    for form in GLA.forms:
        cached = "decompressed" if form == "decompressed" else "absorbed"
        for workload in (Workload(100), Workload(100, 100, 3)):
            a, b = (x.ops(Step(workload), form, cached=cached).contractions for x in (spec, mla))
            assert sum(op.flops for op in a) == sum(op.flops for op in b)
            assert {op.name: op.flops for op in a if op.name in ("score", "value", "kv_b_proj", "absorb_q")} == {
                op.name: op.flops for op in b if op.name in ("score", "value", "kv_b_proj", "absorb_q")
            }


@specs
@reaches
def test_equals_the_definition(spec: GLA, reach: Reach) -> None:
    P, R, eps = spec.qk_nope_head_dim, spec.qk_rope_head_dim, 1e-6

    def normed(w: Any, name: str, row: Any, index: Any = slice(None)) -> Any:
        return rms(eps, row, w[f"{name}.weight"][index]) if spec.latent_norm else row

    def heads(w: Any, token: Any, t: int) -> Any:
        if spec.q_lora_rank is None:
            q = w["q_proj.weight"] @ token
        else:
            q = w["q_b_proj.weight"] @ normed(w, "q_a_layernorm", w["q_a_proj.weight"] @ token)
        latents = (w["kv_a_proj.weight"] @ token).split(spec.kv_lora_rank)
        k_pe = rotated(w["k_pe_proj.weight"] @ token, t, 0, R) if R else token[:0]
        k, v = [], []
        for h, up in enumerate(w["kv_b_proj.weight"].split(P + spec.v_head_dim)):
            c = h // (spec.num_heads // spec.num_latents)
            made = up @ normed(w, "kv_a_layernorm", latents[c], c)
            k.append(torch.cat((made[:P], k_pe)))
            v.append(made[P:])
        return [rotated(h, t, P, R) for h in q.split(P + R)], k, v, (P + R) ** -0.5

    check_definition(Layer, spec, reach, heads)


@specs
@reaches
def test_steps_equal_one_prompt(spec: GLA, reach: Reach) -> None:
    check_steps(Layer, spec, reach)


@pytest.mark.parametrize("reach", [FULL, Reach("window", 64), Reach("chunk", 64)], ids=lambda r: r.text)
@pytest.mark.parametrize(
    "spec",
    [TWO, GLA(2048, 16, 4, None, 128, 128, 0, 64, latent_norm=False)],
    ids=["full size", "no RoPE, no q-lora"],
)
def test_contract(spec: GLA, reach: Reach) -> None:
    check_contract(Layer, spec, reach)


def test_one_latent_is_mla() -> None:
    spec = replace(BASE, num_latents=1)
    layer = make(Layer, spec)
    twin = mla_torch.Layer(MLA(24, 6, 10, 12, 6, 4, 5), dtype=torch.float64)
    state = dict(layer.state_dict())
    down = torch.cat((state.pop("kv_a_proj.weight"), state.pop("k_pe_proj.weight")))
    state["kv_a_layernorm.weight"] = state["kv_a_layernorm.weight"].flatten()
    twin.load_state_dict(state | {"kv_a_proj_with_mqa.weight": down})
    x = sequence(spec)
    assert_equal(run(layer, x, 6, 1, 6), run(twin, x, 6, 1, 6))


def test_forms_share_a_cache() -> None:
    x, cache = sequence(BASE), Cache()
    prompt = run_part(make(Layer, BASE, form="decompressed", cached="absorbed"), x[:, :9], cache)
    one = run_part(make(Layer, BASE, form="absorbed"), x[:, 9:10], cache)
    rest = run_part(make(Layer, BASE, form="expanded"), x[:, 10:], cache)
    assert_equal(torch.cat((prompt, one, rest), dim=1), run(make(Layer, BASE), x))


def run_part(layer: Any, x: Any, cache: Cache) -> Any:
    with torch.inference_mode():
        return layer(x, cache)


def test_what_cannot_be_computed_is_refused() -> None:
    with pytest.raises(ValueError, match="the forms are absorbed"):
        Layer(BASE, form="merged")
    with pytest.raises(ValueError, match="latents, which are not kept"):
        Layer(BASE, form="absorbed", cached="decompressed")
    layer, cache = make(Layer, BASE, form="decompressed", cached="absorbed"), Cache()
    run(layer, sequence(BASE), cache=cache)
    with pytest.raises(ValueError, match="use expanded"):
        run(layer, sequence(BASE), cache=cache)
    with pytest.raises(AttncalcError, match="Use expanded"):
        BASE.ops(Step(Workload(9, 3)), "decompressed", cached="absorbed")
    with pytest.raises(AttncalcError, match="not kept"):
        BASE.ops(Step(Workload(9, 3)), "absorbed", cached="decompressed")
