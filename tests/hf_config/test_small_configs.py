"""Small random configurations of every architecture, against transformers on the meta device: exact or refused.

The defaults of a class and published files share most values. Here heads, widths, windows, biases, ties and patterns
vary together, from the fields that the class itself has, so that a reader which fits the defaults alone is found.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from attncalc import presets
from attncalc.errors import AttncalcError
from attncalc.hf_config import READERS, facts
from attncalc.hf_config.config import Facts
from attncalc.workload import Conventions

DEFAULTS = Path(__file__).parents[1] / "data" / "class_defaults.json"
VARIATIONS = 5
CONTEXTS = (11, 40)
SIZES: dict[str, tuple[int, ...]] = {
    name: sizes
    for names, sizes in {
        "hidden_size n_embd d_model": (64, 96),
        "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads": (4, 8),
        "encoder_attention_heads": (4, 8),
        "num_key_value_heads num_kv_heads": (1, 2, 4),
        "num_global_key_value_heads": (1, 2),
        "head_dim": (8, 16, 24),
        "global_head_dim": (24, 32),
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers": (2, 3, 5),
        "vocab_size": (99, 128),
        "intermediate_size n_inner ffn_dim dff decoder_ffn_dim encoder_ffn_dim": (48, 100),
        "moe_intermediate_size shared_expert_intermediate_size": (24, 32),
        "num_experts num_local_experts n_routed_experts moe_num_experts": (4, 6),
        "num_experts_per_tok moe_k": (1, 2),
        "max_position_embeddings n_positions max_seq_len n_ctx max_target_positions": (64, 80),
        "sliding_window window_size local_attention": (7, 20, 33),
        "rotary_dim": (4, 8),
        "type_vocab_size task_type_vocab_size": (1, 3),
        "pronunciation_vocab_size shape_vocab_size pronunciation_embed_dim shape_embed_dim": (5, 7),
        "hidden_size_per_layer_input laurel_rank": (8, 12),
        "vocab_size_per_layer_input": (70,),
        "altup_num_inputs": (2, 4),
        "num_kv_shared_layers": (0, 1),
        "linear_key_head_dim linear_value_head_dim": (8, 16),
        "linear_num_key_heads": (2,),
        "linear_num_value_heads": (2, 4),
    }.items()
    for name in names.split()
}
OFTEN_NULL = ("sliding_window", "num_key_value_heads", "head_dim", "n_inner")
RARELY_TRUE = ("add_cross_attention", "use_prompt", "is_moe")
COUNTED = {"mha", "gqa", "mqa", "mla"}
"""Attention whose FLOPs torch's counter sees whole: products alone."""
DENSE = Conventions(count="dense")
CAUSAL = json.loads(DEFAULTS.read_text(encoding="utf-8"))["types"]
"""The causal language model types of transformers."""
TYPES = sorted(k for k in READERS if k in CAUSAL and "text_config" not in facts(k).defaults)
NEVER_EXACT = """aria_text axk1 bamba cwm dbrx deepseek_v2 deepseek_v32 deepseek_v4 dots1 glm4_moe_lite glm_moe_dsa
    granitemoehybrid kimi_linear lfm2_moe mamba2 mimo_v2_flash nemotron_h qwen3_next zamba2"""
"""Types whose sizes depend on each other, so that random ones are refused, or cannot be built: `test_variations` varies
most of them from a base that fits, and published files and the defaults of the class stand for all."""


def variation(kind: str, rng: random.Random) -> dict[str, Any]:
    """A configuration of small sizes."""
    pytest.importorskip("transformers", reason="needs transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known, data = facts(kind), {"model_type": kind, "bos_token_id": 0, "eos_token_id": 0}
    if (getattr(CONFIG_MAPPING[kind], "pad_token_id", None) or 0) >= min(SIZES["vocab_size"]):
        data["pad_token_id"] = 1
    for name, default in known.defaults.items():
        if name in SIZES:
            value: int | None = rng.choice(SIZES[name])
            if default is None and rng.random() < 0.3:
                continue
            data[name] = None if name in OFTEN_NULL and rng.random() < 0.15 else value
        elif isinstance(default, bool) and rng.random() < 0.5:
            data[name] = rng.random() < (0.1 if name in RARELY_TRUE else 0.5)
    if hasattr(CONFIG_MAPPING[kind], "is_decoder"):
        data["is_decoder"] = rng.random() < 0.9
    if "rope_parameters" in known.defaults and rng.random() < 0.1:
        data["partial_rotary_factor"] = rng.choice((0.25, 0.5, 1.0))
    return data | _patterns(known, data, rng)


def _patterns(known: Facts, data: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Lists with an entry for each layer."""
    counts = [data[n] for n in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if n in data]
    if not counts or counts[0] is None:
        return {}
    total, out = counts[0], {}
    choices = {
        "layer_types": ("full_attention", "sliding_attention"),
        "layer_rope_theta": (0, 10000.0),
        "no_rope_layers": (0, 1),
        "mlp_layer_types": ("dense", "sparse"),
    }
    for name, values in choices.items():
        if name in known.defaults and rng.random() < 0.5:
            out[name] = [rng.choice(values) for _ in range(total)]
    if "attention_types" in known.defaults:
        out["attention_types"] = [[["global", "local"], total // 2], [["local"], total % 2]]
    return out


def theirs(data: dict[str, Any]) -> dict[str, int | None]:
    """What transformers has, keeps and computes."""
    pytest.importorskip("torch", reason="needs torch")
    pytest.importorskip("transformers", reason="needs transformers")
    from attncalc.measure.reference import built, configured

    made = built(configured(data, "config.json"), "config.json")
    out: dict[str, int | None] = {"parameters": made.parameters}
    for n in CONTEXTS:
        run = made.run(n)
        out |= {f"cache {n}": run.prefill.cache_bytes, f"prefill {n}": run.prefill.total}
        out[f"decode {n}"] = run.decode.total
    return out


def ours(data: dict[str, Any]) -> dict[str, int | None]:
    """The same by the reader; nothing where torch does not count the whole."""
    model = presets.build(data, "config.json", "x")
    counted = all(g.variant in COUNTED for g in model.groups if g.attention)
    out: dict[str, int | None] = {"parameters": model.parameters()}
    for n in CONTEXTS:
        out[f"cache {n}"] = model.cache(n, engine="transformers").bytes_total
        for phase, new, context in (("prefill", n, n), ("decode", 1, n + 1)):
            cost = model.flops(context, new, engine="transformers", conventions=DENSE)
            out[f"{phase} {n}"] = cost.flops_attention if counted else None
    return out


def outcome(data: dict[str, Any]) -> str:
    """exact, refused, or of unknown truth; a difference fails."""
    try:
        got = ours(data)
    except AttncalcError:
        return "refused"
    try:
        expected = theirs(data)
    except AttncalcError:
        return "unknown"
    wrong = {k: (v, expected[k]) for k, v in got.items() if v is not None and expected[k] not in (None, v)}
    assert not wrong, f"{data}: (ours, transformers) {wrong}"
    return "exact"


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
def test_variations_are_exact_or_refused(kind: str) -> None:
    rng = random.Random(kind)
    seen = [outcome(variation(kind, rng)) for _ in range(VARIATIONS)]
    assert ("exact" in seen) is (kind not in NEVER_EXACT.split()), seen


@pytest.mark.parametrize("activation", ["prelu", "xielu", "gelu"])
@pytest.mark.parametrize(("kind", "counted"), [("llama", ""), ("apertus", "xielu")])
def test_an_activation_with_weights_is_counted_or_refused(kind: str, counted: str, activation: str) -> None:
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "vocab_size": 99,
    }
    expected = "exact" if activation in ("gelu", counted) else "refused"
    assert outcome({"model_type": kind, "pad_token_id": 1, "hidden_act": activation, **sizes}) == expected


def test_the_older_name_of_a_size_of_bloom_prevails() -> None:
    sizes = {"model_type": "bloom", "n_layer": 2, "n_head": 4, "vocab_size": 99}
    assert outcome(sizes | {"n_embed": 96}) == outcome(sizes | {"n_embed": 96, "hidden_size": 64}) == "exact"
    assert ours(sizes | {"n_embed": 96}) == ours(sizes | {"hidden_size": 96})


@pytest.mark.parametrize("kind", ["granite_swa"])
def test_a_variation_is_exact(kind: str) -> None:
    rng = random.Random(0)
    assert "exact" in (outcome(variation(kind, rng)) for _ in range(8))
