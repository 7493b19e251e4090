"""Gated DeltaNet, lightning attention and retention: what every layer with a recurrent state must satisfy."""

from dataclasses import replace
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # tiny tensors: two threads wait for each other longer than they compute

from attncalc.attention import gdn_torch, lightning_torch, retnet_torch  # noqa: E402
from attncalc.attention.base import Step  # noqa: E402
from attncalc.attention.gdn import GDN  # noqa: E402
from attncalc.attention.lightning import Lightning  # noqa: E402
from attncalc.attention.retnet import RetNet  # noqa: E402
from attncalc.attention.torch_base import Cache, CountOperations  # noqa: E402
from attncalc.dtypes import Formats  # noqa: E402
from attncalc.errors import AttncalcError  # noqa: E402
from attncalc.reach import FULL, Count, Reach  # noqa: E402
from attncalc.workload import Workload  # noqa: E402
from tests.attention.common import by_name  # noqa: E402

LAYERS: dict[type, Any] = {GDN: gdn_torch.Layer, Lightning: lightning_torch.Layer, RetNet: retnet_torch.Layer}

# Full size: published models; and options that none of them has.
SPECS: dict[str, Any] = {
    "qwen3-next": GDN(2048, 16, 32, 128, 128, 4),
    "qwen3.5-397b": GDN(4096, 16, 64, 128, 128, 4),
    "gdn, bare": GDN(512, 4, 8, 64, 32, 0, gate=False, chunk_size=32),
    "minimax-01": Lightning(6144, 64, 128),
    "lightning, short chunk": Lightning(256, 4, 64, chunk_size=16),
    "retnet-3b": RetNet(2560, 10, 256, 512),
    "retnet, bare": RetNet(256, 4, 64, 64, gate=False, chunk_size=16),
}
TINY: dict[str, Any] = {
    "gdn": GDN(20, 2, 6, 8, 4, 4, chunk_size=16),
    "gdn, equal heads": GDN(20, 3, 3, 8, 4, 1, chunk_size=7),
    "gdn, bare": GDN(20, 2, 4, 8, 4, 0, gate=False, chunk_size=40),
    "lightning": Lightning(20, 3, 8, chunk_size=16),
    "lightning, long chunk": Lightning(20, 2, 6, chunk_size=40),
    "retnet": RetNet(20, 3, 8, 16, chunk_size=16),
    "retnet, bare": RetNet(20, 2, 6, 5, gate=False, chunk_size=7),
}
FORMATS = Formats()


def products(spec: Any, form: str, context: int, new: int, batch: int = 1, count: Count = "causal") -> Any:
    step = Step(Workload(context, new, batch), FULL, count)
    return list(spec.ops(step, form, cached=form).contractions)


def total(spec: Any, form: str, new: int) -> int:
    return sum(op.flops for op in products(spec, form, new, new))


def made(spec: Any, form: str, like: Any = None, dtype: Any = torch.float64) -> Any:
    layer = LAYERS[type(spec)](spec, form=form, dtype=dtype)
    if like is not None:
        layer.load_state_dict(like.state_dict())
        return layer
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.5)
    return layer


def relative(got: Any, expected: Any) -> float:
    return float(((got - expected).abs().max() / expected.abs().max()).detach())


@pytest.mark.parametrize("name", SPECS)
def test_nothing_grows(name: str) -> None:
    spec = SPECS[name]
    assert sum(t.elements_per_token for t in spec.cache(FULL, "recurrent")) == 0
    assert spec.cache(FULL, "recurrent") == spec.cache(FULL, "chunked")
    assert spec.with_kv_heads(8) is None
    assert spec.heads("recurrent").kv_heads is None
    assert [spec.default_form(Workload(9, n)) for n in (1, 2, 9)] == ["recurrent", "chunked", "chunked"]
    with pytest.raises(AttncalcError):
        products(spec, "absorbed", 4, 1)
    with pytest.raises(AttncalcError):
        replace(spec, chunk_size=0)


@pytest.mark.parametrize("name", SPECS)
def test_tensor_parallel(name: str) -> None:
    """Heads split state, channels and projections; of the parameters only a norm of one head's width is replicated."""
    spec = SPECS[name]
    part = spec.shard(2)
    whole, half = (sum(t.at(1, 1, FORMATS).bytes for t in s.cache(FULL, "recurrent")) for s in (spec, part))
    assert 2 * half == whole
    for form in spec.forms:
        assert 2 * total(part, form, 70) == total(spec, form, 70)
    sizes = {w.name: w.sizes for w in part.weights("")}
    replicated = {w.name for w in spec.weights("") if sizes[w.name] == w.sizes}
    assert replicated == (set() if isinstance(spec, Lightning) else {n for n in sizes if "norm" in n})
    with pytest.raises(AttncalcError):
        spec.shard(3)


@pytest.mark.parametrize("name", TINY)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4))
def test_a_prompt_costs_the_sum_of_its_parts(name: str, lengths: list[int]) -> None:
    spec, whole = TINY[name], sum(lengths)
    decode = sum(op.flops for i in range(whole) for op in products(spec, "recurrent", i + 1, 1))
    assert total(spec, "recurrent", whole) == sum(total(spec, "recurrent", n) for n in lengths) == decode
    # Chunks begin at a step's first token: parts of whole chunks cost what the prompt costs.
    aligned = [n * spec.chunk_size for n in lengths]
    assert total(spec, "chunked", sum(aligned)) == sum(total(spec, "chunked", n) for n in aligned)


@pytest.mark.parametrize("name", TINY)
@given(new=st.integers(1, 50), size=st.integers(1, 20))
def test_chunked_core_equals_a_loop(name: str, new: int, size: int) -> None:
    """Causal counts the entries of the lower triangles that are not zero by definition, dense whole squares."""
    spec = replace(TINY[name], chunk_size=size)
    chunks = [min(size, new - start) for start in range(0, new, size)]
    strict = sum(1 for n in chunks for c in range(n) for i in range(n) if i < c)
    lower = sum(1 for n in chunks for c in range(n) for i in range(n) if i <= c)
    state = spec.cache(FULL, "chunked")[-1]
    heads, K, V = state.heads.size, state.rows, state.width.size
    square, rows = size * size * len(chunks), size * len(chunks)
    for count, below, inclusive, tokens in (("causal", strict, lower, new), ("dense", square, square, rows)):
        expected = {"chunk_qk": inclusive * K, "chunk_value": inclusive * V, "state_update": 2 * tokens * K * V}
        if isinstance(spec, GDN):
            expected |= {"chunk_kk": below * K, "chunk_w": inclusive * K, "chunk_u": inclusive * V}
            expected["state_update"] = 3 * tokens * K * V
        found = by_name(products(spec, "chunked", new, new, count=count))  # type: ignore[arg-type]
        assert {n: found[n] for n in expected} == {n: 2 * heads * f for n, f in expected.items()}
        assert {n for n in found if n.startswith("chunk")} == {n for n in expected if n.startswith("chunk")}


@pytest.mark.parametrize("name", SPECS)
@given(new=st.integers(1, 70), batch=st.integers(1, 4), count=st.sampled_from(["causal", "dense"]))
def test_bytes_and_formulas(name: str, new: int, batch: int, count: Count) -> None:
    """The state and the columns of a convolution are read and written once, every matrix is read once."""
    spec = SPECS[name]
    held = sum(t.at(new, batch, FORMATS).bytes for t in spec.cache(FULL, "recurrent"))
    matrices = [w for w in spec.weights("") if len(w.sizes) > 1]
    for form in spec.forms:
        ops = products(spec, form, new, new, batch, count)
        moved = [op.bytes(FORMATS) for op in ops]
        assert sum(b["cache"] for b in moved) == sum(b["cache_write"] for b in moved) == held
        assert sum(b["weight"] for b in moved) == 2 * sum(w.elements for w in matrices)
        # Padding is computed, not stored.
        assert moved == [op.bytes(FORMATS) for op in products(spec, form, new, new, batch)]
        for op in ops:
            assert op.pairs is not None or 2 * prod(op.gemm.values()) == op.flops


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("form", "new"), [("recurrent", 1), ("recurrent", 5), ("chunked", 1), ("chunked", 300)])
def test_layer_is_the_specification(name: str, form: str, new: int) -> None:
    """At full size on the meta device: parameters, products and cache, in numbers and in tensors."""
    spec = SPECS[name]
    layer = LAYERS[type(spec)](spec, form=form, device="meta", dtype=torch.bfloat16)
    assert {n: tuple(p.shape) for n, p in layer.named_parameters()} == {w.name: w.sizes for w in spec.weights(form)}
    assert not list(layer.buffers())
    cache = Cache()
    for length in (new, 3):
        x = torch.empty(2, length, spec.hidden_size, device="meta", dtype=torch.bfloat16)
        with CountOperations() as counter, torch.inference_mode():
            out = layer(x, cache)
        assert (out.shape, out.dtype) == (x.shape, x.dtype)
        expected = by_name(products(spec, form, cache.length, length, 2, "dense"))
        assert counter.flops == expected
        assert counter.total == sum(expected.values())
        kept = {t.name: t.at(cache.length, 2, FORMATS) for t in spec.cache(FULL, form)}
        assert {n: tuple(t.shape) for n, t in cache.tensors.items()} == {n: t.shape for n, t in kept.items()}
        assert {n: t.nbytes for n, t in cache.tensors.items()} == {n: t.bytes for n, t in kept.items()}
    assert cache.length == new + 3


@pytest.mark.parametrize("name", TINY)
def test_chunked_equals_recurrent(name: str) -> None:
    """In float64: outputs, states, and gradients of every parameter."""
    torch.manual_seed(0)
    recurrent = made(TINY[name], "recurrent")
    chunked = made(TINY[name], "chunked", recurrent)
    x = torch.randn(2, 37, 20, dtype=torch.float64)
    caches = Cache(), Cache()
    outputs = [layer(x, cache) for layer, cache in zip((recurrent, chunked), caches, strict=True)]
    assert relative(outputs[1], outputs[0]) < 1e-12
    states = [cache.tensors["recurrent_state"] for cache in caches]
    assert relative(states[1], states[0]) < 1e-12
    for out in outputs:
        out.square().sum().backward()
    for (parameter, a), b in zip(recurrent.named_parameters(), chunked.parameters(), strict=True):
        assert relative(b.grad, a.grad) < 1e-10, parameter


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("form", ["recurrent", "chunked"])
def test_steps_from_the_cache_equal_one_prefill(name: str, form: str) -> None:
    """Prefill, a longer and a shorter extension, then single tokens in the recurrent form, whatever came before."""
    torch.manual_seed(1)
    layer = made(TINY[name], form)
    step = made(TINY[name], "recurrent", layer)
    x, cache = torch.randn(2, 45, 20, dtype=torch.float64), Cache()
    with torch.no_grad():
        parts = [layer(part, cache) for part in torch.split(x[:, :40], [2, 21, 17], dim=1)]
        parts += [step(x[:, t : t + 1], cache) for t in range(40, 45)]
        assert relative(torch.cat(parts, dim=1), layer(x)) < 1e-12
    assert cache.length == 45
    assert {t.dtype for t in cache.tensors.values()} == {torch.float64}
    held = sum(t.at(45, 2, Formats(conv="fp64", state="fp64")).bytes for t in layer.spec.cache(FULL, form))
    assert cache.storage_bytes == held


@pytest.mark.parametrize("name", TINY)
def test_a_reach_does_not_apply(name: str) -> None:
    with pytest.raises(ValueError, match="window 4"):
        LAYERS[type(TINY[name])](TINY[name], Reach("window", 4))
    with pytest.raises(ValueError, match="this layer has no other"):
        LAYERS[type(TINY[name])](TINY[name], path="fast")
