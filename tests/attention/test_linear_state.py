"""The linear-state layer: golden values, and the layer against its definition."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch
from torch import Tensor

from attncalc.attention.base import Step
from attncalc.attention.linear_state import LinearState
from attncalc.attention.linear_state_torch import Layer
from attncalc.attention.torch_base import Cache, CountOperations
from attncalc.dtypes import Formats
from attncalc.errors import AttncalcError
from attncalc.ops import Contraction
from attncalc.reach import FULL, Reach
from attncalc.workload import Workload
from tests.attention.common import by_name

FULL_SIZE = LinearState(4096, 2048)
TINY = LinearState(12, 7)
FORMATS = Formats()


def products(spec: LinearState, context: int, new: int, batch: int = 1) -> list[Contraction]:
    step = Step(Workload(context, new, batch))
    return list(spec.ops(step, "recurrent", cached="recurrent").contractions)


def layer(spec: LinearState) -> Layer:
    made = Layer(spec, dtype=torch.float64)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.5)
    return made


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


def test_one_state_of_2048_by_2048() -> None:
    (state,) = (t.at(1_000_000, 1, FORMATS) for t in FULL_SIZE.cache(FULL, "recurrent"))
    assert (state.shape, state.bytes) == ((1, 1, 2048, 2048), 16_777_216)
    assert sum(w.elements for w in FULL_SIZE.weights("recurrent")) == 5 * 4096 * 2048 + 4 * 2048 + 4096
    assert sum(w.elements for w in LinearState(4096, 2048, bias=False).weights("")) == 5 * 4096 * 2048
    decode = by_name(products(FULL_SIZE, 1_000_000, 1))
    assert decode.pop("state_update") == 4 * 2048 * 2048
    assert set(decode.values()) == {2 * 4096 * 2048}
    assert len(decode) == 5


def test_nothing_grows_and_nothing_splits() -> None:
    assert sum(t.elements_per_token for t in TINY.cache(FULL, "recurrent")) == 0
    assert TINY.with_kv_heads(1) is None
    assert TINY.shard(1) == TINY
    with pytest.raises(AttncalcError):
        TINY.shard(2)
    with pytest.raises(AttncalcError):
        TINY.ops(Step(Workload(1)), "chunked", cached="recurrent")
    with pytest.raises(AttncalcError):
        LinearState(12, 0)


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5), batch=st.integers(1, 3))
def test_a_prompt_costs_the_sum_of_its_parts(lengths: list[int], batch: int) -> None:
    whole = sum(lengths)
    cost = sum(op.flops for op in products(TINY, whole, whole, batch))
    assert cost == sum(op.flops for n in lengths for op in products(TINY, whole, n, batch))
    assert cost == whole * sum(op.flops for op in products(TINY, whole, 1, batch))
    ops = products(TINY, whole, whole, batch)
    held = TINY.cache(FULL, "recurrent")[0].at(whole, batch, FORMATS).bytes
    assert sum(op.bytes(FORMATS)["cache"] for op in ops) == held
    assert sum(op.bytes(FORMATS)["cache_write"] for op in ops) == held


@pytest.mark.parametrize("bias", [True, False])
def test_layer_is_the_specification(bias: bool) -> None:
    spec = LinearState(4096, 2048, bias=bias)
    made = Layer(spec, device="meta", dtype=torch.bfloat16)
    assert {n: tuple(p.shape) for n, p in made.named_parameters()} == {w.name: w.sizes for w in spec.weights("")}
    cache = Cache()
    for new in (6, 1):
        with CountOperations() as counter:
            made(torch.empty(2, new, 4096, device="meta", dtype=torch.bfloat16), cache)
        assert counter.flops == by_name(products(spec, cache.length, new, 2))
        assert counter.total == sum(op.flops for op in products(spec, cache.length, new, 2))
        (kept,) = (t.at(cache.length, 2, FORMATS) for t in spec.cache(FULL, "recurrent"))
        (held,) = cache.tensors.values()
        assert (tuple(held.shape), held.nbytes, held.dtype) == (kept.shape, kept.bytes, torch.float32)


def from_definition(made: Layer, x: Tensor) -> Tensor:
    """y_t = W_o sum_i (q_t . D k_i) v_i + b_o, D the product of the decays of the tokens after i."""
    w = dict(made.named_parameters())
    q, k, v, decay = (x @ w[f"{n}_proj.weight"].T + w[f"{n}_proj.bias"] for n in ("q", "k", "v", "decay"))
    decay = torch.sigmoid(decay)
    rows = []
    for t in range(x.shape[1]):
        o = torch.zeros_like(v[:, 0])
        for i in range(t + 1):
            faded = k[:, i] * decay[:, i + 1 : t + 1].prod(dim=1)
            o = o + (q[:, t] * faded).sum(-1, keepdim=True) * v[:, i]
        rows.append(o @ w["o_proj.weight"].T + w["o_proj.bias"])
    return torch.stack(rows, dim=1)


def test_the_state_is_read_by_the_key() -> None:
    torch.manual_seed(0)
    made, x = layer(TINY), torch.randn(2, 11, 12, dtype=torch.float64)
    with torch.no_grad():
        assert relative(made(x), from_definition(made, x)) < 1e-12
        # Reading by the value's index gives (q . v) k instead: the same as exchanging k and v.
        wrong = layer(TINY)
        swapped = made.state_dict()
        for part in ("weight", "bias"):
            k, v = swapped[f"k_proj.{part}"], swapped[f"v_proj.{part}"]
            swapped |= {f"k_proj.{part}": v, f"v_proj.{part}": k}
        wrong.load_state_dict(swapped)
        assert relative(wrong(x), from_definition(made, x)) > 1e-2


def test_steps_from_the_cache_equal_one_prefill() -> None:
    torch.manual_seed(1)
    made, x, cache = layer(TINY), torch.randn(2, 14, 12, dtype=torch.float64), Cache()
    with torch.no_grad():
        parts = [made(part, cache) for part in torch.split(x, [6, 5, 1, 1, 1], dim=1)]
        assert relative(torch.cat(parts, dim=1), made(x)) < 1e-12
    assert cache.length == 14
    assert cache.storage_bytes == 2 * 7 * 7 * 8


def test_a_reach_does_not_apply() -> None:
    with pytest.raises(ValueError, match="window 4"):
        Layer(TINY, Reach("window", 4))
