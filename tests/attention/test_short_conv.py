"""Gated short convolutions: golden values, and the layer against its definition and LFM's modules."""

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # tiny tensors: two threads wait for each other longer than they compute

from attncalc.attention.base import Step  # noqa: E402
from attncalc.attention.short_conv import ShortConv  # noqa: E402
from attncalc.attention.short_conv_torch import Layer  # noqa: E402
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

LFM3 = ShortConv(2048, 2048, 7)
TINY = ShortConv(12, 10, 3)
SPECS = {"three taps": TINY, "biases": replace(TINY, bias=True), "one tap": replace(TINY, conv_kernel=1)}
specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def test_lfm3() -> None:
    (kept,) = LFM3.cache(FULL, "direct")
    assert (kept.at(131_072, 1, Formats()).shape, kept.at(131_072, 1, Formats()).bytes) == ((1, 1, 6, 2048), 24_576)
    assert kept.elements_per_token == 0
    assert sum(w.elements for w in LFM3.weights("direct")) == 4 * 2048 * 2048 + 7 * 2048
    one = by_name(LFM3.ops(Step(Workload(9)), "direct", cached="direct").contractions)
    assert one == {"in_proj": 6 * 2048 * 2048, "conv": 14 * 2048, "out_proj": 2 * 2048 * 2048}
    assert replace(LFM3, conv_kernel=1).cache(FULL, "direct") == ()


def test_splits_over_gpus_and_what_it_refuses() -> None:
    assert LFM3.shard(8) == replace(LFM3, inner_size=256)
    assert LFM3.with_kv_heads(8) is None
    assert LFM3.heads("direct") == (2048, None, 7, 1)
    for refused in (
        lambda: LFM3.shard(3),
        lambda: replace(LFM3, conv_kernel=0),
        lambda: LFM3.ops(Step(Workload(1)), "chunked", cached="direct"),
    ):
        with pytest.raises(AttncalcError):
            refused()
    with pytest.raises(ValueError, match="window 4"):
        Layer(TINY, Reach("window", 4))


@specs
def test_layer_is_the_specification(spec: ShortConv) -> None:
    check_state_contract(Layer, spec)
    check_state_contract(Layer, LFM3)


@specs
def test_bytes_and_sums(spec: ShortConv) -> None:
    check_state_bytes(spec, {w.name for w in spec.weights("") if w.name.endswith("bias")})


def definition(layer: Any, x: Any) -> Any:
    """One token and channel at a time: y = W_out (C * sum over j of w_j (B * x)_{t - j})."""
    spec, w = layer.spec, dict(layer.named_parameters())
    out = torch.zeros_like(x)
    for n, rows in enumerate(x):
        made = [w["in_proj.weight"] @ row + w.get("in_proj.bias", 0) for row in rows]
        parts = [m.split(spec.inner_size) for m in made]
        for t, (_, c, _) in enumerate(parts):
            mixed = torch.zeros(spec.inner_size, dtype=x.dtype)
            for channel in range(spec.inner_size):
                for j in range(min(spec.conv_kernel, t + 1)):
                    b, _, values = parts[t - j]
                    mixed[channel] += (
                        w["conv.weight"][channel, 0, spec.conv_kernel - 1 - j] * b[channel] * values[channel]
                    )
            mixed = mixed + w.get("conv.bias", 0)
            out[n, t] = w["out_proj.weight"] @ (c * mixed) + w.get("out_proj.bias", 0)
    return out


@specs
def test_equals_the_definition(spec: ShortConv) -> None:
    layer, x = make_scattered(Layer, spec), sequence(spec)
    with torch.no_grad():
        assert_equal(layer(x), definition(layer, x))


@specs
def test_steps_equal_one_prompt(spec: ShortConv) -> None:
    layer, x = make_scattered(Layer, spec), sequence(spec)
    check_splits(layer, x, 0, [13], [1, 2, 7, 1, 1, 1], [7, 3, 1, 2])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("which", ["Lfm2", "Lfm2Moe", "Lfm3"])
def test_equals_transformers(which: str, bias: bool) -> None:
    """A prompt, tokens one by one and a later part with the same weights, in float32."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    name = {"Lfm2": "lfm2", "Lfm2Moe": "lfm2_moe", "Lfm3": "lfm3"}[which]
    module = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    kinds = ["conv", "full_attention"]
    config = getattr(transformers, f"{which}Config")(
        hidden_size=24, num_hidden_layers=2, layer_types=kinds, conv_L_cache=4, conv_bias=bias
    )
    theirs = getattr(module, f"{which}ShortConv")(config, 0).eval()
    torch.manual_seed(2)
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_(std=0.3)
    ours = Layer(ShortConv(24, 24, 4, bias=bias))
    ours.load_state_dict(theirs.state_dict())
    their_cache, our_cache = transformers.DynamicCache(config=config), Cache()
    for length in (9, 1, 1, 5, 1):
        x = torch.randn(2, length, 24)
        with torch.no_grad():
            got, expected = ours(x, our_cache), theirs(x, cache=their_cache)
        assert (got - expected).abs().max() < 1e-5 * expected.abs().max()
    # Theirs has a column more, and channels before columns.
    kept = their_cache.layers[0].conv_states[0]
    torch.testing.assert_close(our_cache.buffers["conv_state"][:, 0].mT, kept[..., 1:], rtol=1e-5, atol=1e-5)
