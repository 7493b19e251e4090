"""Fields with uncommon values, alone or against each other: as transformers has them, or refused by name.

Numbers are those of the model that transformers 5.24 builds and runs on the meta device: parameters, and bytes of the
cache after 40 tokens. The slow test builds them again.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from attncalc import presets
from attncalc.errors import AttncalcError
from attncalc.hf_config import read_config

TINY = {"num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 100}
LLAMA4 = TINY | {"model_type": "llama4_text", "intermediate_size": 32, "intermediate_size_mlp": 48}
WIDE_EXPERTS = {
    "model_type": "gemma4_text",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "use_double_wide_mlp": True,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 64,
    "vocab_size": 100,
    "vocab_size_per_layer_input": 100,
    "hidden_size_per_layer_input": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SOLAR = TINY | {
    "model_type": "solar_open",
    "attention_bias": True,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
NEMOTRON = {"model_type": "nemotron_h", "layers_block_type": ["mamba", "attention", "moe"]}
NEWER_FALCON = {"model_type": "falcon", "new_decoder_architecture": True, "num_attention_heads": 8, "vocab_size": 100}
NEWER_FALCON |= {"num_hidden_layers": 2, "hidden_size": 256}

EXACT: list[tuple[str, dict[str, Any], int, int]] = [
    (
        "llama4: tied outside alone",
        {"model_type": "llama4", "tie_word_embeddings": True, "text_config": LLAMA4},
        1_796_928,
        327_680,
    ),
    (
        "llama4: tied inside",
        {
            "model_type": "llama4",
            "tie_word_embeddings": False,
            "text_config": LLAMA4 | {"tie_word_embeddings": True},
        },
        1_790_528,
        327_680,
    ),
    ("solar_open: bias of q, k and v alone", SOLAR, 2_454_848, 327_680),
    ("gemma4_text: wide feed-forward beside experts", WIDE_EXPERTS, 7_174_944, 245_760),
    ("falcon: K and V broadcast", NEWER_FALCON | {"num_kv_heads": 2}, 1_404_416, 81_920),
    (
        "got_ocr2: tied where nothing says it",
        {"model_type": "got_ocr2", "text_config": TINY | {"model_type": "qwen2", "intermediate_size": 32}},
        52_160,
        20_480,
    ),
    (
        "moss_transcribe_diarize: tied where nothing says it",
        {
            "model_type": "moss_transcribe_diarize",
            "text_config": TINY | {"model_type": "qwen3", "intermediate_size": 32},
        },
        2_116_672,
        1_310_720,
    ),
]

REFUSED: list[tuple[dict[str, Any], str]] = [
    (NEMOTRON | {"tie_word_embeddings": True}, "tie_word_embeddings: is understood only as false"),
    (NEMOTRON | {"conv_kernel": 1}, "conv_kernel: must be from 2"),
    ({"model_type": "jamba", "mamba_d_conv": 1}, "mamba_d_conv: must be from 2"),
    ({"model_type": "lara_mini", "linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim: must be from 2"),
    *(
        (
            NEMOTRON | {"n_shared_experts": n},
            "n_shared_experts: is understood only as 1",
        )
        for n in (0, 2)
    ),
    *(
        ({"model_type": kind, name: value}, f"{name}: {rule}")
        for kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
        for name, value, rule in (
            ("attention_bias", True, "is understood only as false"),
            ("linear_conv_kernel_dim", 1, "must be from 2"),
        )
    ),
    (
        {"model_type": "mllama", "tie_word_embeddings": True, "text_config": {"model_type": "mllama_text_model"}},
        "tie_word_embeddings: is understood only as false",
    ),
    (NEWER_FALCON | {"num_kv_heads": 1}, "num_kv_heads: must be above 1 where new_decoder_architecture is true"),
    *(
        ({"model_type": kind, "num_key_value_heads": None}, "num_key_value_heads: must not be null")
        for kind in ("glm", "ernie4_5_moe", "qwen2_moe")
    ),
    *(
        ({"model_type": kind, "num_key_value_heads": 4}, "num_key_value_heads: is understood only as")
        for kind in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu")
    ),
    ({"model_type": "deepseek_v3", "num_attention_heads": 64}, "num_key_value_heads: is understood only as 64"),
    ({"model_type": "deepseek_v3", "head_dim": 32}, "head_dim: is understood only as 64, got 32"),
    *(
        ({"model_type": "deepseek_v3", **groups}, line)
        for groups, line in (
            ({"n_group": None}, "n_group: must"),
            ({"n_group": 0}, "n_group: must be from 1"),
            ({"n_group": 7}, "n_group: must divide the 256 experts"),
            ({"n_group": 256}, "n_group: must divide the 256 experts into groups of 2 or more"),
            ({"n_group": 4, "topk_group": 5}, "topk_group: must be from 1 to 4"),
        )
    ),
    (
        {"model_type": "falcon", "num_ln_in_parallel_attn": 2},
        "num_ln_in_parallel_attn: is understood only as null or 1",
    ),
    ({"model_type": "falcon", "multi_query": False, "num_kv_heads": 1}, "num_kv_heads: is understood only as null"),
    ({"model_type": "ministral", "head_dim": 64, "sliding_window": None}, "sliding_window: must be given"),
    (
        {"model_type": "mimo_v2_flash", "num_hidden_layers": 3, "hybrid_layer_pattern": [0, 0, 1]},
        "hybrid_layer_pattern[1]: must say sliding_attention",
    ),
    (
        {
            "model_type": "mimo_v2_flash",
            "num_hidden_layers": 2,
            "layer_types": ["full_attention"] * 2,
            "hybrid_layer_pattern": [0, 1],
        },
        "hybrid_layer_pattern[1]: must say full_attention",
    ),
    (
        {"model_type": "mimo_v2_flash", "num_hidden_layers": 2, "moe_layer_freq": [1, 1]},
        "moe_layer_freq[0]: must say dense",
    ),
    ({"model_type": "llama", "": 1}, "is a field that the reader does not understand"),
    (
        {"model_type": "qwen3_vl_text", "architectures": ["Qwen3VLForSequenceClassification"]},
        "architectures: is understood only as Qwen3VLForConditionalGeneration",
    ),
]


@pytest.mark.parametrize(
    ("name", "config", "parameters", "cache"), EXACT, ids=lambda x: x if isinstance(x, str) else ""
)
def test_as_transformers_has_it(name: str, config: dict[str, Any], parameters: int, cache: int) -> None:
    model = presets.build(config, "config.json", name)
    assert model.parameters() == parameters
    assert model.cache(40, engine="transformers").bytes_total == cache


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "config", "parameters", "cache"), EXACT, ids=lambda x: x if isinstance(x, str) else ""
)
def test_the_numbers_are_those_of_transformers(
    name: str, config: Mapping[str, Any], parameters: int, cache: int
) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    from attncalc.measure.reference import built, configured

    reference = built(configured(config, name), name)
    assert reference.parameters == parameters
    assert reference.run(40).prefill.cache_bytes == cache


@pytest.mark.parametrize(("config", "line"), REFUSED, ids=lambda x: x[:40] if isinstance(x, str) else x["model_type"])
def test_refused_by_name(config: dict[str, Any], line: str) -> None:
    with pytest.raises(AttncalcError) as error:
        presets.build(config, "config.json", "mine")
    assert line in str(error.value)


def test_an_export_does_not_replace_the_file_that_it_reads(tmp_path: Path) -> None:
    from attncalc.cli import app

    file = tmp_path / "config.json"
    file.write_text('{"model_type": "llama"}', encoding="utf-8")
    done = CliRunner().invoke(app, ["models", str(file), "--export", "--output", str(file)])
    assert done.exit_code
    assert file.read_text(encoding="utf-8") == '{"model_type": "llama"}'


def test_a_folder_of_the_name_is_hinted_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AttncalcError, match=r"\./mine"):
        presets.find_model("mine")


ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
BY_KIND = {"full_attention": ROPE, "sliding_attention": ROPE}
LINEAR = {"rope_type": "linear", "factor": 2.0}
MIMO = {"model_type": "mimo_v2_flash", "num_hidden_layers": 2}
LAGUNA = {"model_type": "laguna", "num_hidden_layers": 2}
GEMMA4 = {"model_type": "gemma4_text", "num_hidden_layers": 6, "num_kv_shared_layers": 0}

# Widths of cos and sin that transformers computes, or of its frequencies other than 0.
ROTATED: list[tuple[dict[str, Any], set[int]]] = [
    (MIMO, {64}),
    (MIMO | {"rope_parameters": BY_KIND}, {64}),
    (MIMO | {"partial_rotary_factor": 0.334}, {64}),
    (LAGUNA | {"partial_rotary_factor": 0.25}, {64}),
    (GEMMA4 | {"partial_rotary_factor": 0.25}, {256, 128}),
    *(
        ({"model_type": kind, "rope_scaling": LINEAR, "rope_parameters": ROPE | {"partial_rotary_factor": 0.25}}, {n})
        for kind, n in (("glm", 64), ("glm4", 64), ("phi", 32), ("persimmon", 32), ("stablelm", 20))
    ),
    (
        {
            "model_type": "glm",
            "rope_scaling": LINEAR | {"partial_rotary_factor": 0.25},
            "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
        },
        {32},
    ),
]

REFUSED_ROPE: list[tuple[dict[str, Any], str]] = [
    *(
        ({"model_type": kind, "partial_rotary_factor": None}, "partial_rotary_factor: must not be null")
        for kind in ("glm", "glm4", "qwen3_next", "qwen3_5_text", "phi", "stablelm", "persimmon")
    ),
    *(
        ({"model_type": kind, "rope_parameters": BY_KIND}, "full_attention: must not be given")
        for kind in ("llama", "glm", "qwen2", "phi", "cohere2")
    ),
    *(
        ({"model_type": "llama", name: {"rope_type": value}}, f"{name}.rope_type: must name a type of RoPE")
        for name in ("rope_parameters", "rope_scaling")
        for value in (None, "")
    ),
    *(
        ({"model_type": kind, name: LINEAR}, f"{name}.full_attention: must be given")
        for kind in ("laguna", "mellum", "mimo_v2_flash")
        for name in ("rope_parameters", "rope_scaling")
    ),
    (GEMMA4 | {"rope_parameters": ROPE}, "rope_parameters.sliding_attention: must be given"),
    (MIMO | {"partial_rotary_factor": 0.5}, "partial_rotary_factor: must rotate 64 values"),
    ({"model_type": "phi3", "rope_scaling": LINEAR}, "rope_scaling.rope_type: must be one of default, longrope"),
    (
        {"model_type": "glm", "rope_parameters": ROPE | {"partial_rotary_factor": None}},
        "rope_parameters.partial_rotary_factor: must not be null",
    ),
]


@pytest.mark.parametrize(("config", "widths"), ROTATED)
def test_rotates_as_transformers_does(config: dict[str, Any], widths: set[int]) -> None:
    layers = read_config(config, "config.json", "mine").document["layers"]
    assert {row["attention"]["rope_dim"] for row in layers} == widths


@pytest.mark.parametrize(("config", "line"), REFUSED_ROPE)
def test_settings_of_rope_refused_by_name(config: dict[str, Any], line: str) -> None:
    with pytest.raises(AttncalcError) as error:
        presets.build(config, "config.json", "mine")
    assert line in str(error.value)
