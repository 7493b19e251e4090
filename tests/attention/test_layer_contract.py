"""Every layer of every shipped model, at full size on the meta device, against its specification.

The specification gives parameters, cache and FLOPs in numbers; the layer must have them in real tensors and products.
"""

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # tiny tensors: two threads wait for each other longer than they compute

import attncalc  # noqa: E402
from attncalc import presets  # noqa: E402
from attncalc.attention import dsa_torch, gqa_index_torch, gqa_torch, mla_split_torch, mla_torch  # noqa: E402
from attncalc.attention.base import Step  # noqa: E402
from attncalc.attention.dsa import DSA  # noqa: E402
from attncalc.attention.gqa import GQA  # noqa: E402
from attncalc.attention.gqa_index import IndexedGQA  # noqa: E402
from attncalc.attention.mla import MLA  # noqa: E402
from attncalc.attention.mla_split import MLASplit  # noqa: E402
from attncalc.attention.torch_base import Cache, CountOperations, operation  # noqa: E402
from attncalc.reach import FULL, Reach  # noqa: E402
from attncalc.workload import Workload  # noqa: E402

LAYERS: dict[type, Any] = {
    GQA: gqa_torch.Layer,
    IndexedGQA: gqa_index_torch.Layer,
    MLA: mla_torch.Layer,
    DSA: dsa_torch.Layer,
    MLASplit: mla_split_torch.Layer,
}
BATCH = 2

# One of each kind: these run always, the rest is slow.
EVERY_TIME = (
    "llama-3.1-405b",
    "chatglm3-6b",
    "command-r-plus",
    "gemma-2-27b",
    "gemma-4-31b",
    "gpt-oss-120b",
    "llama-4-scout",
    "mimo-v2-flash",
    "minimax-m2.5",
    "minimax-m3",
    "phi-3-mini-128k",
    "deepseek-v3",
    "deepseek-v2-lite",
    "deepseek-v3.2",
    "glm-5.2",
    "seed-mla",
)


def shipped() -> dict[tuple[Any, Reach], str]:
    """Every distinct layer and the first model that has it."""
    found: dict[tuple[Any, Reach], str] = {}
    order = [i for i in EVERY_TIME if i in presets.ids("models")]
    for preset in dict.fromkeys([*order, *presets.ids("models")]):
        for group in attncalc.load(preset).groups:
            if type(group.attention) in LAYERS and not group.cache_from:
                found.setdefault((group.attention, group.reach), preset)
    return found


def borrowing() -> dict[tuple[GQA, Reach, GQA, Reach], str]:
    """Every distinct layer without K and V, with the layer whose it reads, and the first model that has the pair."""
    found: dict[tuple[GQA, Reach, GQA, Reach], str] = {}
    for preset in presets.ids("models"):
        groups = attncalc.load(preset).groups
        owners = {i: group for group in groups for i in group.indices}
        for group in groups:
            for owner in (owners[i] for i in dict.fromkeys(group.cache_from)):
                assert isinstance(group.attention, GQA)
                assert isinstance(owner.attention, GQA)
                found.setdefault((group.attention, group.reach, owner.attention, owner.reach), preset)
    return found


# What no shipped model has.
OTHER: dict[str, tuple[Any, Reach]] = {
    "gated": (GQA(2048, 16, 4, 128, 128, rope_dim=64, gate="full"), Reach("window", 64)),
    "gated by head": (GQA(2048, 16, 4, 128, 128, rope_dim=64, gate="head"), FULL),
    "gated mla": (MLA(7168, 96, 1536, 512, 128, 64, 128, rotated=False, gate="full"), FULL),
    "mla with biases": (MLA(2048, 16, None, 512, 128, 64, 128, bias=True, latent_norm=False), Reach("window", 64)),
    "mla without a rope key": (MLA(2048, 16, 768, 512, 128, 0, 128), Reach("chunk", 64)),
    "split without biases": (MLASplit(2048, 16, 128, 64, 256, 512), Reach("window", 64)),
}


def cases() -> Iterator[Any]:
    layers = [(spec, reach, name) for (spec, reach), name in shipped().items()]
    for spec, reach, name in [*layers, *((*case, name) for name, case in OTHER.items())]:
        for form in spec.forms:
            for cached in (form, "absorbed") if form == "decompressed" else (form,):
                marks = () if name in EVERY_TIME or name in OTHER else pytest.mark.slow
                yield pytest.param(spec, reach, form, cached, id=f"{name}-{reach.text}-{form}-{cached}", marks=marks)


CASES = list(cases())


def steps(reach: Reach) -> list[list[int]]:
    """New tokens of each step: up to the edge, over it with a chunk, then one by one; and over it at once."""
    edge = reach.size or 40
    return [[edge - 2, 5, 1], [edge + 3], [1, 1]]


def test_every_kind_is_covered() -> None:
    assert len(shipped()) > 60
    assert set(EVERY_TIME) <= set(presets.ids("models"))
    assert {type(spec) for spec, _ in shipped()} == set(LAYERS)


@pytest.mark.parametrize(("spec", "reach", "form", "cached"), CASES)
def test_parameters(spec: Any, reach: Reach, form: str, cached: str) -> None:
    layer = LAYERS[type(spec)](spec, reach, form, cached=cached, device="meta")
    tensors = {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
    assert tensors == {w.name: w.sizes for w in spec.weights(form)}
    assert sum(p.numel() for p in layer.parameters()) == sum(w.elements for w in spec.weights(form))


@pytest.mark.parametrize(("spec", "reach", "form", "cached"), CASES)
def test_cache_and_flops(spec: Any, reach: Reach, form: str, cached: str) -> None:
    for path in LAYERS[type(spec)].paths(spec):
        layer = LAYERS[type(spec)](spec, reach, form, cached=cached, path=path, device="meta", dtype=torch.bfloat16)
        for run in steps(reach):
            cache, context = Cache(), 0
            # Earlier K and V are gone where only latents are kept; one token is a decode step to the specification.
            whole_prompt_only = form == "decompressed" and cached != "decompressed"
            for new_tokens in [n for n in run[:1] if n > 1] if whole_prompt_only else run:
                context += new_tokens
                x = torch.empty(BATCH, new_tokens, spec.hidden_size, dtype=torch.bfloat16, device="meta")
                with CountOperations() as counted, torch.inference_mode():
                    out = layer(x, cache)
                assert out.shape == x.shape
                assert out.dtype == x.dtype
                assert cache.length == context
                check_cache(cache, spec.cache(reach, cached), context)
                step = Step(Workload(context, new_tokens, BATCH), reach, "dense")
                expected = {c.name: c.flops for c in spec.ops(step, form, cached=cached).contractions}
                if path == "reference":
                    assert dict(counted.flops) == expected
                assert counted.total == sum(expected.values())


def check_cache(cache: Cache, expected: Any, context: int) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in cache.tensors.items()}
    assert shapes == {t.name: (BATCH, t.heads.size, t.tokens(context), t.width.size) for t in expected}
    assert all(tensor.dtype == torch.bfloat16 for tensor in cache.tensors.values())
    elements = sum(BATCH * t.heads.size * t.tokens(context) * t.width.size for t in expected)
    assert cache.storage_bytes == 2 * elements


BORROWING = [pytest.param(*pair, id=f"{name}-{pair[1].text}") for pair, name in borrowing().items()]


@pytest.mark.parametrize(("spec", "reach", "owner_spec", "owner_reach"), BORROWING)
def test_a_layer_that_borrows_its_cache(spec: GQA, reach: Reach, owner_spec: GQA, owner_reach: Reach) -> None:
    """No K and V among its parameters, nothing kept, and the FLOPs of a layer that makes none."""
    assert spec.cache(reach, "direct") == ()
    for path in gqa_torch.Layer.paths(spec):
        options: dict[str, Any] = {"path": path, "device": "meta", "dtype": torch.bfloat16}
        owner, layer = gqa_torch.Layer(owner_spec, owner_reach, **options), gqa_torch.Layer(spec, reach, **options)
        tensors = {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
        assert tensors == {w.name: w.sizes for w in spec.weights("direct")}
        assert not any(name[0] in "kv" for name in tensors)
        for run in steps(reach):
            cache, context = Cache(lends=True), 0
            for new_tokens in run:
                context += new_tokens
                x = torch.empty(BATCH, new_tokens, spec.hidden_size, dtype=torch.bfloat16, device="meta")
                with torch.inference_mode():
                    owner(x, cache)
                    with CountOperations() as counted:
                        out = layer(x, cache)
                assert out.shape == x.shape
                check_cache(cache, owner_spec.cache(owner_reach, "direct"), context)
                step = Step(Workload(context, new_tokens, BATCH), reach, "dense")
                expected = {c.name: c.flops for c in spec.ops(step, "direct", cached="direct").contractions}
                if path == "reference":
                    assert dict(counted.flops) == expected
                assert counted.total == sum(expected.values())


def test_borrowing_layers_ship() -> None:
    assert set(borrowing().values()) >= {"gemma-4-e2b", "gemma-4-e4b"}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("path", ["fast", "reference"])
@pytest.mark.parametrize("tokens", [1, 24])
def test_the_counter_sees_the_core(path: Any, device: str, tokens: int) -> None:
    # torch's own counter knows no CPU kernel of SDPA: all that it finds there are the projections.
    layer = gqa_torch.Layer(GQA(32, 4, 2, 16, 16, rope_dim=16), path=path, device=device)
    with CountOperations() as counted, torch.inference_mode():
        layer(torch.ones(1, tokens, 32, device=device))
    projections = 2 * tokens * 32 * 16 * (4 + 2 + 2 + 4)
    assert counted.total - projections == 2 * 4 * tokens * tokens * (16 + 16)


def test_a_product_without_a_name_is_in_the_total() -> None:
    a = torch.ones(3, 4)
    with CountOperations() as counted:
        with operation("named"):
            a @ a.T
        a @ a.T
    assert counted.flops == {"named": 2 * 3 * 4 * 3}
    assert counted.total == 2 * counted.flops["named"]


def test_room_for_later_tokens_changes_no_shape() -> None:
    spec = GQA(32, 4, 2, 16, 16)
    layer, cache = gqa_torch.Layer(spec), Cache(capacity=64)
    with torch.inference_mode():
        layer(torch.ones(1, 5, 32), cache)
        held = cache.storage_bytes
        layer(torch.ones(1, 1, 32), cache)
    assert held == cache.storage_bytes == 2 * 2 * 64 * 16 * 4
    assert {name: tuple(t.shape) for name, t in cache.tensors.items()} == {"k": (1, 2, 6, 16), "v": (1, 2, 6, 16)}


@pytest.mark.parametrize("option", [{"sinks": True}, {"logit_softcap": True}])
def test_no_fast_path_is_an_error_and_never_another_path(option: dict[str, bool]) -> None:
    spec = GQA(32, 4, 2, 16, 16, **option)  # type: ignore[arg-type]
    assert gqa_torch.Layer.paths(spec) == ("reference",)
    assert gqa_torch.Layer(spec).path == "reference"
    with pytest.raises(ValueError, match=r"no fused kernel has sinks or a logit softcap"):
        gqa_torch.Layer(spec, path="fast")
