"""The recurrent block of Griffin: golden values, and the layer against its definition and RecurrentGemma's module."""

from dataclasses import replace
from math import exp, log1p, sqrt
from typing import Any

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # tiny tensors: two threads wait for each other longer than they compute

import attncalc  # noqa: E402
from attncalc.attention.base import Step  # noqa: E402
from attncalc.attention.rg_lru import RGLRU  # noqa: E402
from attncalc.attention.rg_lru_torch import Layer  # noqa: E402
from attncalc.attention.torch_base import Cache  # noqa: E402
from attncalc.dtypes import Formats  # noqa: E402
from attncalc.errors import AttncalcError  # noqa: E402
from attncalc.reach import FULL, Reach  # noqa: E402
from attncalc.workload import Workload  # noqa: E402
from tests.attention.common import (  # noqa: E402
    assert_equal,
    by_name,
    check_splits,
    check_state_bytes,
    check_state_contract,
    make_scattered,
    sequence,
)
from tests.test_sharing import document, group  # noqa: E402

GEMMA = RGLRU(2560, 2560, 10)
TINY = RGLRU(12, 20, 4, 3)
SPECS = {"four blocks": TINY, "one block": replace(TINY, num_heads=1), "one tap": replace(TINY, conv_kernel=1)}
specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def test_ten_blocks_of_256() -> None:
    conv, state = (t.at(131_072, 1, Formats()) for t in GEMMA.cache(FULL, "recurrent"))
    assert (conv.shape, conv.dtype, conv.bytes) == ((1, 1, 3, 2560), "bf16", 15_360)
    assert (state.shape, state.dtype, state.bytes) == ((1, 1, 1, 2560), "fp32", 10_240)
    D, R, gates = 2560, 2560, 10 * 256 * 256
    matrices = 3 * D * R + 2 * gates
    # Taps and their bias, the decay, two gates' biases, and those of three linears.
    assert sum(w.elements for w in GEMMA.weights("")) == matrices + 4 * R + R + R + 2 * R + 2 * R + D
    one = by_name(GEMMA.ops(Step(Workload(9)), "recurrent", cached="recurrent").contractions)
    assert one["input_gate"] == one["recurrent_gate"] == 2 * gates
    assert sum(one.values()) == 2 * matrices + 2 * 4 * R


def test_transformers_keeps_no_more_columns() -> None:
    """As `test_equals_transformers` sees; other convolutions have one more there."""
    row = {"variant": "rg-lru", "lru_width": 2560, "num_heads": 10, "conv_kernel": 4}
    model = attncalc.load(document(group("0, 1", row)) | {"num_hidden_layers": 2, "hidden_size": 2560})
    kept = [model.cache(100, engine=engine) for engine in ("logical", "transformers")]
    assert [k.bytes_total for k in kept] == [2 * (15_360 + 10_240)] * 2
    assert not kept[1].reasons
    cost = model.flops(100, 1, engine="transformers")
    assert cost.bytes_cache_read == cost.bytes_cache_write == kept[0].bytes_total


def test_splits_over_gpus_and_what_it_refuses() -> None:
    assert GEMMA.shard(5) == replace(GEMMA, lru_width=512, num_heads=2)
    assert GEMMA.with_kv_heads(8) is None
    assert GEMMA.heads("recurrent") == (2560, None, 1, 1)
    for refused in (
        lambda: GEMMA.shard(3),
        lambda: replace(GEMMA, num_heads=3),
        lambda: GEMMA.ops(Step(Workload(1)), "chunked", cached="recurrent"),
    ):
        with pytest.raises(AttncalcError):
            refused()
    with pytest.raises(ValueError, match="window 4"):
        Layer(TINY, Reach("window", 4))


@specs
def test_layer_is_the_specification(spec: RGLRU) -> None:
    check_state_contract(Layer, spec)
    check_state_contract(Layer, GEMMA)


@specs
def test_bytes_and_sums(spec: RGLRU) -> None:
    check_state_bytes(spec, {w.name for w in spec.weights("") if w.name.endswith(("bias", "recurrent_param"))})


def sigmoid(x: float) -> float:
    return 1 / (1 + exp(-x))


def definition(layer: Any, x: Any) -> Any:
    """One token and channel at a time, in plain numbers after the linears."""
    spec, w = layer.spec, dict(layer.named_parameters())
    R, k = spec.lru_width, spec.lru_width // spec.num_heads
    lasting = [log1p(exp(float(v))) for v in w["rg_lru.recurrent_param"]]
    out = torch.zeros_like(x)
    for n, rows in enumerate(x):
        raw = [w["linear_x.weight"] @ row + w["linear_x.bias"] for row in rows]
        state = [0.0] * R
        for t, row in enumerate(rows):
            mixed = w["conv_1d.bias"].clone()
            for j in range(min(spec.conv_kernel, t + 1)):
                mixed += w["conv_1d.weight"][:, 0, spec.conv_kernel - 1 - j] * raw[t - j]
            for c in range(R):
                block, inside = c // k, c % k
                part = mixed[block * k : (block + 1) * k]
                gates = [
                    float(part @ w[f"rg_lru.{g}_weight"][block, :, inside] + w[f"rg_lru.{g}_bias"][block, inside])
                    for g in ("input_gate", "recurrent_gate")
                ]
                a = exp(-8 * sigmoid(gates[1]) * lasting[c])
                scale = sqrt(1 - a * a) if t else 1.0
                state[c] = a * state[c] + scale * sigmoid(gates[0]) * float(mixed[c])
            branch = w["linear_y.weight"] @ row + w["linear_y.bias"]
            cubic = (2 / torch.pi) ** 0.5 * (branch + 0.044715 * branch**3)
            gated = 0.5 * branch * (1 + torch.tanh(cubic)) * torch.tensor(state, dtype=x.dtype)
            out[n, t] = w["linear_out.weight"] @ gated + w["linear_out.bias"]
    return out


@specs
def test_equals_the_definition(spec: RGLRU) -> None:
    layer, x = make_scattered(Layer, spec), sequence(spec)
    with torch.no_grad():
        assert_equal(layer(x), definition(layer, x))


@specs
def test_steps_equal_one_prompt(spec: RGLRU) -> None:
    layer, x = make_scattered(Layer, spec), sequence(spec)
    check_splits(layer, x, 0, [13], [1, 2, 7, 1, 1, 1], [7, 3, 1, 2])


def test_equals_transformers() -> None:
    """A prompt and tokens after it with the same weights, in float32; it keeps as many columns as the mathematics."""
    module = pytest.importorskip("transformers.models.recurrent_gemma.modeling_recurrent_gemma")
    config = module.RecurrentGemmaConfig(hidden_size=24, lru_width=24, num_attention_heads=3, conv1d_width=4)
    theirs = module.RecurrentGemmaRecurrentBlock(config, 0).eval()
    torch.manual_seed(2)
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_(std=0.3)
    ours, cache, start = Layer(RGLRU(24, 24, 3)), Cache(), 0
    ours.load_state_dict(theirs.state_dict())
    for length in (9, 1, 1, 1):
        x, positions = torch.randn(2, length, 24), torch.arange(start, start + length)[None]
        with torch.no_grad():
            got, (expected, _) = ours(x, cache), theirs(x, positions, None, use_cache=True)
        assert (got - expected).abs().max() < 1e-5 * expected.abs().max()
        start += length
    torch.testing.assert_close(cache.buffers["conv_state"][:, 0].mT, theirs.conv1d_state, rtol=1e-5, atol=1e-5)
    state = cache.buffers["recurrent_state"][:, 0, 0]
    torch.testing.assert_close(state, theirs.rg_lru.recurrent_states, rtol=1e-5, atol=1e-5)
