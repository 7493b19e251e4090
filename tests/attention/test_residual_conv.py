"""A convolution beside its input: the layer against its definition and Inkling's module."""

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # tiny tensors: two threads wait for each other longer than they compute

from attncalc.attention.residual_conv import ResidualConv  # noqa: E402
from attncalc.attention.residual_conv_torch import Layer  # noqa: E402
from attncalc.attention.torch_base import Cache  # noqa: E402
from attncalc.dtypes import Formats  # noqa: E402
from attncalc.errors import AttncalcError  # noqa: E402
from attncalc.reach import FULL, Reach  # noqa: E402
from tests.attention.common import (  # noqa: E402
    assert_equal,
    check_splits,
    check_state_bytes,
    check_state_contract,
    make,
    sequence,
)

INKLING = ResidualConv(6144, 4)
TINY = ResidualConv(10, 3)
SPECS = {"three taps": TINY, "one tap": replace(TINY, conv_kernel=1)}
specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def test_inkling() -> None:
    (kept,) = (t.at(131_072, 1, Formats()) for t in INKLING.cache(FULL, "direct"))
    assert (kept.shape, kept.bytes) == ((1, 1, 3, 6144), 36_864)
    assert sum(w.elements for w in INKLING.weights("")) == 4 * 6144
    assert replace(INKLING, conv_kernel=1).cache(FULL, "direct") == ()


def test_it_is_whole_on_every_gpu_and_what_it_refuses() -> None:
    assert INKLING.shard(7) == INKLING
    assert INKLING.with_kv_heads(8) is None
    assert INKLING.heads("direct") == (6144, None, 4, 1)
    assert INKLING.query_heads() == 6144
    with pytest.raises(AttncalcError):
        replace(INKLING, conv_kernel=0)
    with pytest.raises(ValueError, match="window 4"):
        Layer(TINY, Reach("window", 4))


@specs
def test_layer_is_the_specification(spec: ResidualConv) -> None:
    check_state_contract(Layer, spec)
    check_state_contract(Layer, INKLING)


@specs
def test_bytes_and_sums(spec: ResidualConv) -> None:
    check_state_bytes(spec, set())


@specs
def test_equals_the_definition(spec: ResidualConv) -> None:
    """One token and channel at a time: x_t + sum over j of w_j x_{t - j}."""
    layer, x = make(Layer, spec), sequence(spec)
    taps, expected = layer.get_parameter("conv1d.weight").detach(), x.clone()
    for t in range(x.shape[1]):
        for channel in range(spec.hidden_size):
            for j in range(min(spec.conv_kernel, t + 1)):
                expected[:, t, channel] += taps[channel, 0, spec.conv_kernel - 1 - j] * x[:, t - j, channel]
    with torch.no_grad():
        assert_equal(layer(x), expected)


@specs
def test_steps_equal_one_prompt(spec: ResidualConv) -> None:
    check_splits(make(Layer, spec), sequence(spec), 0, [13], [1, 2, 7, 1, 1, 1], [7, 3, 1, 2])


def test_equals_transformers() -> None:
    module = pytest.importorskip("transformers.models.inkling.modeling_inkling", reason="transformers is not installed")
    utilities = pytest.importorskip("transformers.cache_utils")
    config: Any = module.InklingTextConfig(num_hidden_layers=1)
    theirs = module.InklingShortConvolution(10, 4, layer_idx=0, conv_idx=2).eval()
    torch.manual_seed(2)
    ours, their_cache, cache = Layer(ResidualConv(10, 4)), utilities.DynamicCache(config=config), Cache()
    ours.load_state_dict(theirs.state_dict())
    for length in (9, 1, 1, 5, 1):
        x = torch.randn(2, length, 10)
        with torch.no_grad():
            got, expected = ours(x, cache), theirs(x, cache=their_cache)
        assert (got - expected).abs().max() < 1e-5 * expected.abs().max()
    kept = their_cache.layers[0].conv_states[2]
    torch.testing.assert_close(cache.buffers["conv_state"][:, 0].mT, kept[..., 1:], rtol=1e-5, atol=1e-5)
