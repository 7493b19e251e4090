"""Attention over the hidden state beside the embedding: the layer against its definition and Zamba's modules."""

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # tiny tensors: two threads wait for each other longer than they compute

from attncalc.attention.gqa import GQA  # noqa: E402
from attncalc.attention.gqa_concat import ConcatGQA  # noqa: E402
from attncalc.attention.gqa_concat_torch import Layer  # noqa: E402
from attncalc.attention.torch_base import Cache  # noqa: E402
from attncalc.errors import AttncalcError  # noqa: E402
from attncalc.reach import FULL, Reach  # noqa: E402
from tests.attention.common import (  # noqa: E402
    REACHES,
    check_contract,
    check_definition,
    check_steps,
    elements,
    rotated,
)

ZAMBA2 = ConcatGQA(2560, 32, 32, 160, 160, input_size=5120)
BASE = ConcatGQA(12, 4, 2, 6, 6, input_size=20)
SPECS = {
    "zamba": BASE,
    "RoPE": replace(BASE, rope_dim=4),
    "narrow values": replace(BASE, v_head_dim=4),
    "input as wide as the output": replace(BASE, input_size=12),
}
specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
reaches = pytest.mark.parametrize("reach", REACHES, ids=lambda r: r.text)


def test_zamba2() -> None:
    assert elements(ZAMBA2) == 2 * 32 * 160
    assert sum(w.elements for w in ZAMBA2.weights("direct")) == 3 * 5120 * 5120 + 2560 * 5120
    narrow = GQA(2560, 32, 32, 160, 160)
    assert elements(ZAMBA2) == elements(narrow)
    assert ZAMBA2.variant == replace(ZAMBA2, num_kv_heads=1).variant == "gqa-concat"


def test_splits_over_gpus_and_what_it_refuses() -> None:
    assert ZAMBA2.shard(8) == replace(ZAMBA2, num_heads=4, num_kv_heads=4)
    assert ZAMBA2.with_kv_heads(8) == replace(ZAMBA2, num_kv_heads=8)
    changes: tuple[dict[str, Any], ...] = ({"input_size": 0}, {"num_kv_heads": 3}, {"rope_dim": 7})
    for change in changes:
        with pytest.raises(AttncalcError):
            replace(ZAMBA2, **change)


@specs
@reaches
def test_equals_the_definition(spec: ConcatGQA, reach: Reach) -> None:
    H, G, d, e = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim

    def heads(w: Any, token: Any, t: int) -> Any:
        assert len(token) == spec.input_size
        q = [rotated(h, t, 0, spec.rope_dim) for h in (w["q_proj.weight"] @ token).split(d)]
        k = [rotated(h, t, 0, spec.rope_dim) for h in (w["k_proj.weight"] @ token).split(d)]
        v = (w["v_proj.weight"] @ token).split(e)
        group = [h // (H // G) for h in range(H)]
        return q, [k[g] for g in group], [v[g] for g in group], (d / 2) ** -0.5

    check_definition(Layer, spec, reach, heads)


@specs
@reaches
def test_steps_equal_one_prompt(spec: ConcatGQA, reach: Reach) -> None:
    check_steps(Layer, spec, reach)


EVERY = replace(ZAMBA2, num_kv_heads=8, bias="qkvo", qk_norm="head", gate="full", shared_kv_weight=False)


@pytest.mark.parametrize("reach", [FULL, Reach("window", 64)], ids=lambda r: r.text)
@pytest.mark.parametrize("spec", [ZAMBA2, EVERY, replace(EVERY, gate="head")], ids=["zamba2", "all", "gated by head"])
def test_contract(spec: ConcatGQA, reach: Reach) -> None:
    check_contract(Layer, spec, reach)


@pytest.mark.parametrize("path", ["fast", "reference"])
@pytest.mark.parametrize("name", ["Zamba", "Zamba2"])
def test_equals_transformers(name: str, path: Any) -> None:
    """The attention of the shared block; what it reads is the hidden state beside the embedding."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    options = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}
    options |= {"vocab_size": 32, "intermediate_size": 16, "n_mamba_heads": 2, "pad_token_id": 0}
    config = getattr(transformers, f"{name}Config")(**options, layers_block_type=["mamba", "mamba", "hybrid", "hybrid"])
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(config).eval()
    block = model.layers[2]
    module = (block.shared_transformer if name == "Zamba2" else block.shared_transf).self_attn
    seen = {}

    def look(_: Any, args: Any, kwargs: Any, out: Any) -> None:
        seen["x"], seen["out"] = args[0] if args else kwargs["hidden_states"], out[0]

    hook = module.register_forward_hook(look, with_kwargs=True)
    with torch.no_grad():
        model(input_ids=torch.randint(1, 32, (2, 19)), use_cache=False)
    hook.remove()
    spec = ConcatGQA(16, 4, 4, 8, 8, input_size=32)
    ours = Layer(spec, path=path)
    ours.load_state_dict(module.state_dict())
    assert seen["x"].shape == (2, 19, 32)
    for splits in ((19,), (10, 7, 1, 1)):
        cache = Cache()
        with torch.no_grad():
            got = torch.cat([ours(part, cache) for part in seen["x"].split(splits, dim=1)], dim=1)
        assert (got - seen["out"]).abs().max() < 1e-5 * seen["out"].abs().max()
