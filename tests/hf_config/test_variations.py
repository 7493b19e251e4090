"""Small configurations of each type, one or a few fields changed: exact as transformers builds and runs them, or refused.

A reader that fits the defaults alone fails here. What transformers itself refuses or cannot build or run says nothing.
"""

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

import pytest

from attncalc import presets
from attncalc.errors import AttncalcError
from attncalc.hf_config import READERS
from attncalc.hf_config.ignored import without_effect
from attncalc.model import Model
from attncalc.workload import Conventions

CONTEXT = 24
DENSE = Conventions(count="dense")
COUNTED = {"mha", "gqa", "mqa", "mla"}
MIXED = ["linear_attention", "full_attention"] * 2
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_intermediate_size": 40,
    "shared_expert_intermediate_size": 40,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    "sliding_window": 9,
    "pad_token_id": 0,  # the defaults lie beyond a small vocabulary
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
    "num_heads": 8,
    "n_groups": 2,
    "state_size": 16,
    "chunk_size": 8,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
"""Where a type has the field; the rest keeps its default."""

OWN: dict[str, dict[str, Any]] = {
    "afmoe": {},
    "aria_text": {},
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere2_moe": {},
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 4,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {},
    "exaone_moe": {},
    "falcon_h1": {"mamba_d_ssm": 128},
    "falcon_mamba": {},
    "flex_olmo": {},
    "granitemoe": {},
    "granitemoe_swa": {},
    "granitemoehybrid": {"layer_types": MIXED},
    "granitemoeshared": {},
    "hy_v3": {},
    "mamba": {},
    "mamba2": {"head_dim": 16},
    "olmo_hybrid": {"linear_num_value_heads": 2},
    "olmoe": {},
    "phimoe": {},
    "qwen2_moe": {},
    "sarvam_moe": {},
}
"""The types varied here, and what their small configuration needs beside SMALL."""

KINDS = ("full_attention", "sliding_attention", "linear_attention", "mamba", "attention", "conv", "hybrid", "moe")
UNVARIED = ("model_type", "vocab_size")
EVERY_TYPE = ("head_dim", "layer_types", "sliding_window", "num_key_value_heads", "partial_rotary_factor")
"""Fields that are tried even where the class has none such: the code may read them all the same."""


def base(name: str, declared: Mapping[str, Any]) -> dict[str, Any]:
    return {"model_type": name} | {k: v for k, v in SMALL.items() if k in declared} | OWN[name]


def values(field: str, old: Any, layers: int, rng: random.Random) -> Iterator[Any]:
    """What a field is changed to."""
    yield None
    if field == "layer_types":
        for _ in range(3):
            two = rng.sample(KINDS, 2)
            yield [rng.choice(two) for _ in range(layers)]
        yield from (["full_attention"] * layers, MIXED, ["sliding_attention", "full_attention"] * 2)
    elif field == "mlp_layer_types":
        yield [rng.choice(("dense", "sparse")) for _ in range(layers)]
    elif field == "layer_rope_theta":
        yield from ([0, 1e4] * 2, [1e4, None] * 2)
    elif field == "rope_parameters":
        for more in ({}, {"partial_rotary_factor": 0.5}, {"rope_type": "linear", "factor": 2.0}):
            yield {"rope_type": "default", "rope_theta": 5e3, **more}
    elif isinstance(old, bool):
        yield not old
    elif isinstance(old, int):
        yield from (n for n in (0, 1, 3, 2 * old) if n != old)
    elif isinstance(old, float):
        yield from (0.5, 1.0)
    elif isinstance(old, list):
        yield from ([], [0], [1, 2], old[:-1], [1] * layers)
    elif old is None:
        yield from (0, 2, 16, True)
    elif isinstance(old, str):
        yield from ("none", "rope")


def compare(config: dict[str, Any], name: str) -> str:
    """What transformers says of it; a difference fails.

    One of: exact, built (it runs on no meta device, so parameters alone are compared), refused, silent (transformers
    refuses it too).
    """
    from attncalc.measure.reference import built, configured

    try:
        model = presets.build(config, "config.json", name)
    except AttncalcError:
        return "refused"
    try:
        reference = built(configured(config, name), name)
    except AttncalcError:
        return "silent"
    assert model.parameters() == reference.parameters, config
    try:
        run = reference.run(CONTEXT)
    except AttncalcError:
        return "built"
    kept = run.prefill.cache_bytes
    assert _said(lambda: model.cache(CONTEXT, engine="transformers").bytes_total) in (None, kept), config
    if _counted(model):
        for step in run:
            if step.total is not None:
                ours = _said(partial(_flops, model, step.context, step.new_tokens))
                assert ours in (None, step.total), config
    return "exact"


def _counted(model: Model) -> bool:
    return all(g.variant in COUNTED for g in model.groups if g.attention)


def _flops(model: Model, context: int, new_tokens: int) -> int:
    return model.flops(context, new_tokens, engine="transformers", conventions=DENSE).flops_attention


def _said(number: Any) -> int | None:
    """The number, or None where it is refused."""
    try:
        made: int = number()
    except AttncalcError:
        return None
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_a_changed_field_is_read_as_transformers_does_or_refused(name: str) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    cls, rng = CONFIG_MAPPING[name], random.Random(name)
    declared = {f.name: getattr(cls(), f.name, None) for f in fields(cls)}
    start = base(name, declared)
    best = compare(start, name)
    assert best == ("built" if name == "dbrx" else "exact")
    seen, good = Counter[str](), list[tuple[str, Any]]()
    tried = [n for n in {**declared, **dict.fromkeys(EVERY_TYPE)} if not without_effect(n) and n not in UNVARIED]
    changes = [(n, v) for n in tried for v in values(n, start.get(n, declared.get(n)), 4, rng)]
    for field, value in rng.sample(changes, min(len(changes), 40)):
        said = compare(start | {field: value}, name)
        seen[said] += 1
        if said == best:
            good.append((field, value))
    for _ in range(10):
        seen[compare(start | dict(rng.sample(good, 3)), name)] += 1
    assert seen[best] > 10, seen


def test_every_varied_type_is_read() -> None:
    assert set(OWN) <= set(READERS)
