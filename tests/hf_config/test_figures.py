"""The fifteen models on which calculators of 2026 were compared, from their published config.json, counted by hand.

One sequence of 131,072 tokens in bf16: layers * values of a token * 2 bytes; states in fp32, their convolutions in bf16.
"""

from typing import Any

import pytest

from attncalc import presets
from tests.hf_config.test_configs import FILES

S = 131_072

CACHE = {
    "llama-3.1-8b": 32 * (2 * 8 * 128) * 2 * S,
    "qwen3-32b": 64 * (2 * 8 * 128) * 2 * S,
    "deepseek-v3": 61 * (512 + 64) * 2 * S,
    "deepseek-v3.2": 61 * (512 + 64 + 128) * 2 * S,
    # 43 windows of 128 rows; entries of 512 values each 4 tokens, with an index key of 128, or each 128 tokens; states
    # of 8 rows of 2560 values and of 128 rows of 1024.
    "deepseek-v4-flash": 43 * 128 * 512 * 2
    + 21 * (S // 4 * (512 + 128) * 2 + 8 * 2560 * 4)
    + 20 * (S // 128 * 512 * 2 + 128 * 1024 * 4),
    "kimi-k2.5": 61 * (512 + 64) * 2 * S,
    # 24 of latents; 69 states of 96 heads 128 x 128, and 3 rows of 3 * 96 * 128 channels.
    "kimi-k3": 24 * (512 + 64) * 2 * S + 69 * (96 * 128 * 128 * 4 + 3 * 3 * 96 * 128 * 2),
    # 10 of softmax attention; 30 states of 32 heads 128 x 128, and 3 rows of 2 * 16 * 128 + 32 * 128 channels.
    "qwen3.5-35b-a3b": 10 * (2 * 2 * 256) * 2 * S + 30 * (32 * 128 * 128 * 4 + 3 * (2 * 16 + 32) * 128 * 2),
    "gpt-oss-120b": 18 * (2 * 8 * 64) * 2 * (S + 128),
    "gemma-4-26b-a4b": 5 * (2 * 2 * 512) * 2 * S + 25 * (2 * 8 * 256) * 2 * 1024,
    "mimo-v2-flash": 9 * 4 * (192 + 128) * 2 * S + 39 * 8 * (192 + 128) * 2 * 128,
    # 10 of softmax attention; 54 states of 256 heads 64 x 256, and 3 rows of 256 * 64 + 2 * 8 * 256 channels.
    "nemotron-h-56b": 10 * (2 * 8 * 128) * 2 * S + 54 * (256 * 64 * 256 * 4 + 3 * 20_480 * 2),
    "glm-5.2": (78 * (512 + 64) + 21 * 128) * 2 * S,
    "llama-4-scout": 12 * (2 * 8 * 128) * 2 * S + 36 * (2 * 8 * 128) * 2 * 8192,
    "minimax-m3": (60 * (2 * 4 * 128) + 57 * 128) * 2 * S,
}


@pytest.mark.parametrize(("name", "kept"), CACHE.items())
def test_fifteen_of_fifteen(name: str, kept: int) -> None:
    assert len(CACHE) == 15
    assert presets.load(FILES[name]).cache(S).bytes_total == kept


# params.json of mistral-inference, as published beside the weights.
MISTRAL = {"dim": 4096, "n_layers": 32, "head_dim": 128, "hidden_dim": 14336, "n_heads": 32, "n_kv_heads": 8}
EXPERTS = {"moe": {"num_experts_per_tok": 2, "num_experts": 8}}


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("mistral-7b-v0.1", MISTRAL | {"norm_eps": 1e-05, "sliding_window": 4096, "vocab_size": 32000}),
        ("mistral-7b-v0.3", MISTRAL | {"norm_eps": 1e-05, "vocab_size": 32768, "rope_theta": 1000000.0}),
        ("mixtral-8x7b", MISTRAL | {"norm_eps": 1e-05, "vocab_size": 32000, "rope_theta": 1e6} | EXPERTS),
    ],
)
def test_params_of_mistral_are_those_of_config_json(name: str, data: dict[str, Any]) -> None:
    model, other = presets.build(data, "params.json", "x"), presets.load(FILES[name])
    assert (model.groups, model.parameters(), model.model_type) == (other.groups, other.parameters(), other.model_type)


def test_reference_configuration_of_deepseek_v2_lite() -> None:
    """The same layers as its config.json, whose parameters transformers counts; V2's router has no correction."""
    reference, other = presets.load(FILES["deepseek-v3-inference-16b"]), presets.load(FILES["deepseek-v2-lite"])
    assert reference.groups == other.groups
    assert reference.parameters() == other.parameters()
