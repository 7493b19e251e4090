"""Multi-matrix factorisation attention: the figures of Step-3, and the layer against its definition."""

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from attncalc.attention.gqa import GQA  # noqa: E402
from attncalc.attention.mfa import MFA  # noqa: E402
from attncalc.attention.mfa_torch import Layer  # noqa: E402
from attncalc.errors import AttncalcError  # noqa: E402
from attncalc.reach import FULL, Reach  # noqa: E402
from attncalc.verify.figures import intensity_limit  # noqa: E402
from tests.attention.common import (  # noqa: E402
    REACHES,
    check_contract,
    check_definition,
    check_steps,
    core_flops,
    elements,
    rms,
    rotated,
)

STEP3 = MFA(7168, 64, 2048, 256, 256)
BASE = MFA(24, 3, 10, 8, 8)
SPECS = {
    "mfa": BASE,
    "partial RoPE": replace(BASE, rope_dim=4),
    "no RoPE": replace(BASE, rope_dim=0),
    "no norm": replace(BASE, q_norm=False),
}
specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
reaches = pytest.mark.parametrize("reach", REACHES, ids=lambda r: r.text)


def test_step_3() -> None:
    D, q, d, H = 7168, 2048, 256, 64
    assert elements(STEP3) == 2 * d == 512
    assert sum(w.elements for w in STEP3.weights("direct")) == D * (q + 2 * d) + q + q * H * d + H * d * D
    assert core_flops(STEP3, "direct", 4096) == 4 * H * d * 4096
    assert intensity_limit(STEP3, "direct") == 64
    assert STEP3.heads("direct") == (64, 1, 256, 256)


def test_one_key_value_head_is_replicated() -> None:
    for tp in (1, 2, 64):
        assert elements(STEP3.shard(tp)) == 512
        assert STEP3.shard(tp).num_heads == 64 // tp
    with pytest.raises(AttncalcError, match="--tp"):
        STEP3.shard(3)
    assert STEP3.with_kv_heads(64) == GQA(7168, 64, 64, 256, 256, 256)
    for wrong in ({"rope_dim": 7}, {"rope_dim": 258}, {"q_lora_rank": 0}):
        with pytest.raises(AttncalcError):
            replace(STEP3, **wrong)  # type: ignore[arg-type]


@specs
@reaches
def test_equals_the_definition(spec: MFA, reach: Reach) -> None:
    d = spec.head_dim

    def heads(w: Any, token: Any, t: int) -> Any:
        low = w["q_a_proj.weight"] @ token
        low = rms(1e-6, low, w["q_a_layernorm.weight"]) if spec.q_norm else low
        q = [rotated(h, t, 0, spec.rope_dim) for h in (w["q_b_proj.weight"] @ low).split(d)]
        k = rotated(w["k_proj.weight"] @ token, t, 0, spec.rope_dim)
        return q, [k] * spec.num_heads, [w["v_proj.weight"] @ token] * spec.num_heads, d**-0.5

    check_definition(Layer, spec, reach, heads)


@specs
@reaches
def test_steps_equal_one_prompt(spec: MFA, reach: Reach) -> None:
    check_steps(Layer, spec, reach)


@pytest.mark.parametrize("reach", [FULL, Reach("window", 64), Reach("chunk", 64)], ids=lambda r: r.text)
@pytest.mark.parametrize("spec", [STEP3, MFA(2048, 16, 512, 128, 0, q_norm=False)], ids=["step-3", "no norm"])
def test_contract(spec: MFA, reach: Reach) -> None:
    check_contract(Layer, spec, reach)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="only the form"):
        Layer(BASE, form="absorbed")
    with pytest.raises(ValueError, match="no such path"):
        Layer(BASE, path="quick")  # type: ignore[arg-type]
