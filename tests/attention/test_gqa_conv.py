"""GQA with convolved K and V and a bias by distance: the layer against its definition and Inkling's module."""

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # tiny tensors: two threads wait for each other longer than they compute

from attncalc.attention.base import Step  # noqa: E402
from attncalc.attention.gqa_conv import ConvGQA  # noqa: E402
from attncalc.attention.gqa_conv_torch import Layer  # noqa: E402
from attncalc.attention.torch_base import Cache  # noqa: E402
from attncalc.dtypes import Formats  # noqa: E402
from attncalc.errors import AttncalcError  # noqa: E402
from attncalc.reach import FULL, Reach  # noqa: E402
from attncalc.workload import Workload  # noqa: E402
from tests.attention.common import (  # noqa: E402
    REACHES,
    by_name,
    check_contract,
    check_definition,
    check_steps,
    elements,
    rms,
)

FULL_LAYER = ConvGQA(6144, 64, 8, 128, 128, conv_kernel=4, rel_dim=16, rel_extent=1024)
SLIDING = replace(FULL_LAYER, num_kv_heads=16, rel_extent=512)
BASE = ConvGQA(12, 4, 2, 6, 4, conv_kernel=3, rel_dim=5, rel_extent=4)
SPECS = {
    "short profile": BASE,
    "long profile": replace(BASE, rel_extent=50),
    "one tap": replace(BASE, conv_kernel=1),
    "a KV head for each": replace(BASE, num_kv_heads=4, v_head_dim=6),
}
specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
reaches = pytest.mark.parametrize("reach", REACHES, ids=lambda r: r.text)


def test_inkling() -> None:
    D, H, G, d = 6144, 64, 8, 128
    assert elements(FULL_LAYER) == 2 * G * d
    conv = FULL_LAYER.cache(FULL, "direct")[-1].at(131_072, 1, Formats())
    assert (conv.name, conv.shape, conv.bytes) == ("conv_state", (1, 1, 3, 2 * G * d), 12_288)
    plain = 2 * D * H * d + 2 * D * G * d + 2 * d
    assert sum(w.elements for w in FULL_LAYER.weights("")) == plain + D * H * 16 + 16 * 1024 + 4 * 2 * G * d
    one = by_name(FULL_LAYER.ops(Step(Workload(4096)), "direct", cached="direct").contractions)
    assert one["conv"] == 2 * 4 * 2 * G * d
    assert one["rel_bias"] == 2 * H * 16 * 1024
    assert one["score"] == one["value"] == 2 * H * d * 4096


@pytest.mark.parametrize("new", [1, 7])
def test_bytes(new: int) -> None:
    """K, V and columns are read once; K, V of new tokens and columns are written once; every matrix is read once."""
    for spec in SPECS.values():
        ops = spec.ops(Step(Workload(9, new, 3)), "direct", cached="direct").contractions
        moved = [op.bytes(Formats()) for op in ops]
        kept = {t.name: t for t in spec.cache(FULL, "direct")}
        held = {n: t.at(9, 3, Formats()).bytes for n, t in kept.items()}
        assert sum(b["cache"] for b in moved) == sum(held.values())
        columns = held.get("conv_state", 0)
        assert sum(b["cache_write"] for b in moved) == columns + 3 * new * 2 * elements(spec)
        read = [w for w in spec.weights("") if "norm" not in w.name]
        assert sum(b["weight"] for b in moved) == 2 * sum(w.elements for w in read)


def test_splits_over_gpus_and_what_it_refuses() -> None:
    assert SLIDING.shard(32) == replace(SLIDING, num_heads=2, num_kv_heads=1)
    assert SLIDING.with_kv_heads(64) == replace(SLIDING, num_kv_heads=64)
    assert SLIDING.heads("direct") == (64, 16, 128, 128)
    for change in ("num_kv_heads", "conv_kernel", "rel_dim", "rel_extent"):
        with pytest.raises(AttncalcError, match=change):
            replace(SLIDING, **{change: 0})
    with pytest.raises(ValueError, match="no fused kernel adds the bias"):
        Layer(BASE, path="fast")


@specs
@reaches
def test_equals_the_definition(spec: ConvGQA, reach: Reach) -> None:
    """The bias is made part of a query and a key: one more value for each distance."""
    H, G, d, e, W = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim, spec.conv_kernel
    seen: dict[int, list[Any]] = {"k": [], "v": []}  # type: ignore[dict-item]
    tokens = 8

    def convolved(w: Any, side: str, made: Any, t: int) -> Any:
        rows = seen[side]  # type: ignore[index]
        del rows[t:]
        rows.append(made)
        taps = w[f"{side}_sconv.conv1d.weight"]
        return made + sum(taps[:, 0, W - 1 - j] * rows[t - j] for j in range(min(W, t + 1)))

    def heads(w: Any, token: Any, t: int) -> Any:
        k = convolved(w, "k", w["k_proj.weight"] @ token, t).split(d)
        v = convolved(w, "v", w["v_proj.weight"] @ token, t).split(e)
        queries, keys = [], []
        for h, (q, relative) in enumerate(
            zip((w["q_proj.weight"] @ token).split(d), (w["r_proj.weight"] @ token).split(spec.rel_dim), strict=True)
        ):
            profile = relative @ w["rel_logits_proj.proj"]
            # Of key position s the value at distance t - s, where there is one.
            bias = torch.zeros(tokens, dtype=token.dtype)
            for s in range(max(0, t - spec.rel_extent + 1), t + 1):
                bias[s] = profile[t - s]
            queries.append(torch.cat((rms(1e-6, q, w["q_norm.weight"]) / d, bias)))
            place = torch.eye(tokens, dtype=token.dtype)[t]
            keys.append(torch.cat((rms(1e-6, k[h // (H // G)], w["k_norm.weight"]), place)))
        return queries, keys, [v[h // (H // G)] for h in range(H)], 1.0

    check_definition(Layer, spec, reach, heads)


@specs
@reaches
def test_steps_equal_one_prompt(spec: ConvGQA, reach: Reach) -> None:
    check_steps(Layer, spec, reach)


@pytest.mark.parametrize("reach", [FULL, Reach("window", 64)], ids=lambda r: r.text)
@pytest.mark.parametrize("spec", [FULL_LAYER, SLIDING, SPECS["one tap"]], ids=["full", "sliding", "one tap"])
def test_contract(spec: ConvGQA, reach: Reach) -> None:
    check_contract(Layer, spec, reach)


@pytest.mark.parametrize(("layer", "reach"), [(0, Reach("window", 6)), (1, FULL)], ids=["window", "full"])
def test_equals_transformers(layer: int, reach: Reach) -> None:
    """With the model's own masks and cache, in float32: a prompt and single tokens."""
    module = pytest.importorskip("transformers.models.inkling.modeling_inkling", reason="transformers is not installed")
    utilities = pytest.importorskip("transformers.cache_utils")
    config = module.InklingTextConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        layer_types=["hybrid_sliding", "hybrid"],
        mlp_layer_types=["dense", "dense"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=4,
        swa_head_dim=8,
        sliding_window_size=6,
        d_rel=5,
        rel_extent=7,
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = module.InklingTextModel(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(mean=float(p.ndim == 1), std=p.shape[-1] ** -0.5 if p.ndim > 1 else 0.3)
    attention = model.layers[layer].self_attn
    spec = ConvGQA(16, 4, 2 if layer else 4, 8, 8, conv_kernel=4, rel_dim=5, rel_extent=7 if layer else 6)
    ours, cache, seen = Layer(spec, reach), Cache(), dict[str, Any]()
    ours.load_state_dict(attention.state_dict())

    def look(_: Any, args: Any, kwargs: Any, out: Any) -> None:
        seen["x"], seen["out"] = args[0] if args else kwargs["hidden_states"], out[0]

    hook = attention.register_forward_hook(look, with_kwargs=True)
    theirs = utilities.DynamicCache(config=config)
    for length in (9, 1, 1, 1, 1):
        with torch.no_grad():
            model(inputs_embeds=torch.randn(2, length, 16), cache=theirs, use_cache=True)
            got = ours(seen["x"], cache)
        assert (got - seen["out"]).abs().max() < 1e-5 * seen["out"].abs().max()
    hook.remove()
    # Theirs has a column more, and channels before columns; k and v apart.
    states = theirs.layers[layer].conv_states
    kept = torch.cat((states[0], states[1]), dim=1)
    torch.testing.assert_close(cache.buffers["conv_state"][:, 0].mT, kept[..., 1:], rtol=1e-5, atol=1e-5)
