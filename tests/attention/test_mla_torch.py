"""The layers over latents in float64: all forms are one function, that of the definition."""

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # tiny tensors: two threads wait for each other longer than they compute

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from attncalc.attention import mla_split_torch, mla_torch  # noqa: E402
from attncalc.attention.mla import MLA  # noqa: E402
from attncalc.attention.mla_split import MLASplit  # noqa: E402
from attncalc.attention.rotary import Rotary  # noqa: E402
from attncalc.attention.torch_base import Cache  # noqa: E402
from attncalc.reach import FULL, Reach  # noqa: E402

BASE = MLA(24, 3, 10, 12, 6, 4, 5)
SPLIT = MLASplit(24, 3, 6, 5, 7, 9)
ROPE: dict[str, Any] = {"rope": {}, "unrotated": {"rotated": False}, "no rope key": {"qk_rope_head_dim": 0}}
FEATURES: dict[str, Any] = {
    f"{'no ' * (q is None)}q-lora, {rope}, gate {gate}": replace(BASE, q_lora_rank=q, gate=gate, **options)
    for q, (rope, options), gate in product((10, None), ROPE.items(), ("none", "full"))
}
FEATURES |= {
    "biases": replace(BASE, bias=True),
    "biases and gate": replace(BASE, bias=True, gate="full", q_lora_rank=None),
    "no latent norm": replace(BASE, latent_norm=False),
    "split": SPLIT,
    "split with biases": replace(SPLIT, bias=True),
}
REACHES = [FULL, Reach("window", 5), Reach("chunk", 5)]
FORMS = MLA.forms
TOKENS = 13

# These run always with every reach, the others with full reach.
EVERY_TIME = ("q-lora, rope, gate none", "no q-lora, unrotated, gate full", "split with biases")
layers = pytest.mark.parametrize(
    ("spec", "reach"),
    [
        pytest.param(
            spec,
            reach,
            id=f"{name}-{reach.text}",
            marks=() if name in EVERY_TIME or reach == FULL else pytest.mark.slow,
        )
        for name, spec in FEATURES.items()
        for reach in REACHES
    ],
)
features = pytest.mark.parametrize("spec", FEATURES.values(), ids=FEATURES)


def make(spec: Any, reach: Reach = FULL, form: str = "expanded", **options: Any) -> Any:
    """A layer whose parameters are all random, norms and biases too; other forms are converted from it."""
    torch.manual_seed(0)
    cached = options.pop("cached", None)
    module = mla_split_torch if isinstance(spec, MLASplit) else mla_torch
    layer: Any = module.Layer(spec, reach, "expanded", dtype=torch.float64, **options)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if p.ndim == 1:
                p.normal_(mean=float("norm" in name), std=0.5)
    return module.convert(layer, form, cached=cached)


def sequence(spec: Any, tokens: int = TOKENS, batch: int = 2) -> Any:
    torch.manual_seed(1)
    return torch.randn(batch, tokens, spec.hidden_size, dtype=torch.float64)


def run(layer: Any, x: Any, *splits: int, cache: Cache | None = None) -> Any:
    cache = cache or Cache()
    with torch.inference_mode():
        out = [layer(part, cache) for part in x.split(splits or x.shape[1], dim=1)]
    return torch.cat(out, dim=1)


def assert_equal(got: Any, expected: Any) -> None:
    assert got.shape == expected.shape
    assert (got - expected).abs().max() < 1e-12 * expected.abs().max()


def definition(layer: Any, x: Any) -> Any:
    """One token, one head and one key at a time, K and V of each head built from the latent."""
    spec, w = layer.spec, dict(layer.named_parameters())
    split = isinstance(spec, MLASplit)
    zero = torch.zeros(1, dtype=x.dtype)
    P, R = (spec.head_dim, 0) if split else (spec.qk_nope_head_dim, spec.qk_rope_head_dim)

    def project(name: str, row: Any) -> Any:
        return w[f"{name}.weight"] @ row + w.get(f"{name}.bias", zero)

    def normed(name: str, row: Any) -> Any:
        if f"{name}.weight" not in w:
            return row
        return row / (row.square().mean() + layer.eps).sqrt() * w[f"{name}.weight"]

    def rotated(row: Any, position: int) -> Any:
        if split or not spec.rotated:
            return row
        out = row.clone()
        for i in range(R // 2):
            angle = position * 10000 ** (-2 * i / R)
            z = complex(row[i], row[i + R // 2]) * complex(math.cos(angle), math.sin(angle))
            out[i], out[i + R // 2] = z.real, z.imag
        return out

    def sees(query: int, key: int) -> bool:
        size = layer.reach.size
        near = {"full": True, "window": query - key < size, "chunk": size and query // size == key // size}
        return key <= query and bool(near[layer.reach.kind])

    def query(token: Any, t: int) -> Any:
        source = token
        name = "q_proj"
        if not split and spec.q_lora_rank:
            source, name = normed("q_a_layernorm", project("q_a_proj", token)), "q_b_proj"
        heads = project(name, source).view(spec.num_heads, P + R)
        return [torch.cat((h[:P], rotated(h[P:], t))) for h in heads]

    def key_value(token: Any, t: int) -> Any:
        if split:
            c_k, c_v = project("kv_a_proj", token).split([spec.k_lora_rank, spec.v_lora_rank])
            k, v = (project(f"{side}_b_proj", c).view(spec.num_heads, -1) for side, c in (("k", c_k), ("v", c_v)))
            return list(zip(k, v, strict=True))
        c, k_pe = project("kv_a_proj_with_mqa", token).split([spec.kv_lora_rank, R])
        # A checkpoint interleaves: P rows of K, then the rows of V, head by head.
        heads = project("kv_b_proj", normed("kv_a_layernorm", c)).view(spec.num_heads, -1)
        return [(torch.cat((h[:P], rotated(k_pe, t))), h[P:]) for h in heads]

    out = torch.zeros_like(x)
    for b, row in enumerate(x):
        q, kv = [query(token, t) for t, token in enumerate(row)], [key_value(token, t) for t, token in enumerate(row)]
        for t, token in enumerate(row):
            heads = []
            for h in range(spec.num_heads):
                total = weighted = zero
                for s in range(len(row)):
                    if sees(t, s):
                        k, v = kv[s][h]
                        weight = (q[t][h] @ k * (P + R) ** -0.5).exp()
                        total, weighted = total + weight, weighted + weight * v
                heads.append(weighted / total)
            joined = torch.cat(heads)
            if not split and spec.gate == "full":
                joined = joined * torch.sigmoid(project("gate_proj", token))
            out[b, t] = project("o_proj", joined)
    return out


@layers
def test_every_form_equals_the_definition(spec: Any, reach: Reach) -> None:
    x = sequence(spec, 8)
    with torch.no_grad():
        expected = definition(make(spec, reach), x)
    for form, path in product(FORMS, ("fast", "reference")):
        assert_equal(run(make(spec, reach, form, path=path), x), expected)


@layers
def test_steps_equal_one_prefill(spec: Any, reach: Reach) -> None:
    x = sequence(spec)
    whole = run(make(spec, reach), x)
    for form, path in product(FORMS, ("fast", "reference")):
        layer = make(spec, reach, form, path=path)
        assert_equal(run(layer, x, 1, 2, 7, 1, 1, 1), whole)
        assert_equal(run(layer, x, 7, 3, 1, 2, cache=Cache(capacity=20)), whole)


@features
def test_forms_share_a_cache(spec: Any) -> None:
    # What an engine does: K and V of a whole prompt, without keeping them, then decode in the latent space.
    x, cache = sequence(spec), Cache()
    prompt = run(make(spec, form="decompressed", cached="absorbed"), x[:, :9], cache=cache)
    one = run(make(spec, form="absorbed"), x[:, 9:10], cache=cache)
    rest = run(make(spec, form="expanded"), x[:, 10:], cache=cache)
    assert_equal(torch.cat((prompt, one, rest), dim=1), run(make(spec), x))


@pytest.mark.parametrize("kind", ["window", "chunk"])
@pytest.mark.parametrize("form", FORMS)
def test_a_reach_of_the_whole_context_is_full(kind: Any, form: str) -> None:
    x = sequence(BASE)
    full = run(make(BASE), x)
    for size in (TOKENS, TOKENS + 3):
        assert_equal(run(make(BASE, Reach(kind, size), form), x, 9, 1, 3), full)
    assert (run(make(BASE, Reach(kind, TOKENS - 1), form), x) - full).abs().max() > 1e-6


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_split_of_any_shape(data: Any) -> None:
    size = st.integers(1, 7)
    q, rope = data.draw(st.one_of(st.none(), size)), data.draw(st.integers(0, 3)) * 2
    spec = MLA(
        data.draw(size), data.draw(st.integers(1, 3)), q, data.draw(size), data.draw(size), rope, data.draw(size)
    )
    kind = data.draw(st.sampled_from(["full", "window", "chunk"]))
    reach = FULL if kind == "full" else Reach(kind, data.draw(st.integers(1, 12)))
    splits = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    x = sequence(spec, sum(splits), data.draw(st.integers(1, 3)))
    whole = run(make(spec, reach, path="reference"), x)
    for form in FORMS:
        assert_equal(run(make(spec, reach, form), x, *splits), whole)


def test_the_scale_is_that_of_the_head_space_in_every_form() -> None:
    yarn = Rotary(factor=40, original_max_position=4096, mscale=1.0, mscale_all_dim=1.0)
    deepseek = MLA(7168, 128, 1536, 512, 128, 64, 128)
    for form in FORMS:
        assert mla_torch.Layer(deepseek, form=form, device="meta").softmax_scale == 192**-0.5
        scaled = mla_torch.Layer(deepseek, form=form, rotary=yarn, device="meta")
        assert scaled.softmax_scale == pytest.approx(0.135234, abs=1e-6)
        unrotated = mla_torch.Layer(replace(deepseek, rotated=False), form=form, rotary=yarn, device="meta")
        assert unrotated.softmax_scale == 192**-0.5
        assert mla_torch.Layer(deepseek, form=form, softmax_scale=0.5, device="meta").softmax_scale == 0.5


def test_yarn_and_interleaving_in_every_form() -> None:
    rotary = Rotary(interleaved=True, factor=4, original_max_position=8, beta_fast=4, mscale=0.7, mscale_all_dim=0.5)
    x = sequence(BASE)
    expanded = run(make(BASE, rotary=rotary), x)
    assert (expanded - run(make(BASE), x)).abs().max() > 1e-6
    for form in FORMS:
        assert_equal(run(make(BASE, form=form, rotary=rotary), x, 9, 3, 1), expanded)


class Largest(TorchDispatchMode):
    """The most elements that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # A view, such as the cache or a weight in another shape, is nothing new.
        old = {t.untyped_storage().data_ptr() for t in tree_leaves(args) if isinstance(t, torch.Tensor)}
        made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        new = [t.numel() for t in made if t.untyped_storage().data_ptr() not in old]
        self.elements = max(self.elements, *new, 0)
        return out


@pytest.mark.parametrize("path", ["fast", "reference"])
def test_absorbed_builds_no_key_or_value_of_a_head(path: Any) -> None:
    spec = MLA(16, 8, None, 12, 16, 4, 16)
    context, batch = 300, 2
    x = sequence(spec, context, batch)
    largest = {}
    for form in ("absorbed", "expanded"):
        layer, cache = make(spec, form=form, path=path), Cache(capacity=context)
        with torch.no_grad():
            layer(x[:, :-1], cache)
            with Largest() as mode:
                layer(x[:, -1:], cache)
        largest[form] = mode.elements
    assert largest["expanded"] >= batch * context * 8 * 16
    # Only the scores and, for one new token, no copy of the cache.
    assert largest["absorbed"] <= batch * context * max(8, 12 + 4)


def test_v_of_absorbed_mla_is_a_view_of_its_k() -> None:
    layer, cache = make(BASE, form="absorbed"), Cache(capacity=32)
    run(layer, sequence(BASE), cache=cache)
    c_kv, k_pe = cache.tensors["c_kv"], cache.tensors["k_pe"]
    assert c_kv.untyped_storage().data_ptr() == k_pe.untyped_storage().data_ptr()
    assert cache.storage_bytes == 2 * 32 * (12 + 4) * 8


def test_a_bias_of_the_key_changes_nothing_and_one_of_the_value_adds() -> None:
    spec = replace(SPLIT, bias=True)
    x = sequence(spec)
    layer = make(spec)
    before = run(layer, x)
    with torch.no_grad():
        layer.k_b_proj.bias.add_(3)
        assert_equal(run(layer, x), before)
        layer.v_b_proj.bias.add_(3)
        shift = layer.o_proj.weight.sum(dim=1) * 3
        assert_equal(run(layer, x), before + shift)
        assert_equal(run(mla_split_torch.convert(layer, "merged"), x), before + shift)


@pytest.mark.parametrize("spec", [BASE, SPLIT], ids=["mla", "split"])
def test_what_cannot_be_computed_is_refused(spec: Any) -> None:
    module: Any = mla_split_torch if spec is SPLIT else mla_torch
    assert module.Layer.paths(spec) == ("fast", "reference")
    with pytest.raises(ValueError, match="factors cannot be recovered"):
        module.convert(make(spec, form="merged"), "absorbed")
    with pytest.raises(ValueError, match="the forms are absorbed"):
        module.Layer(spec, FULL, "fused")
    with pytest.raises(ValueError, match="latents, which are not kept"):
        module.Layer(spec, FULL, "absorbed", cached="decompressed")
    with pytest.raises(ValueError, match="no such path"):
        module.Layer(spec, path="quick")
    layer, cache = make(spec, form="decompressed", cached="absorbed"), Cache()
    run(layer, sequence(spec), cache=cache)
    with pytest.raises(ValueError, match="use expanded"):
        run(layer, sequence(spec), cache=cache)


def test_split_is_not_rotated() -> None:
    with pytest.raises(ValueError, match="no RoPE key"):
        mla_split_torch.Layer(SPLIT, rotary=Rotary())
