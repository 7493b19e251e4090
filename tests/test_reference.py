"""What transformers keeps and computes on the meta device, by `measure.reference`, against the stored traces.

The traces were made by another program: what agrees with both is what transformers does.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from attncalc.errors import AttncalcError

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from attncalc.measure.reference import Kept, Reference, built, configured

DATA = Path(__file__).parent / "data"
TRACES: dict[str, Any] = json.loads((DATA / "traces.json").read_text(encoding="utf-8"))["models"]
SAMPLE = (
    "llama-3.2-1b", "gemma-3-1b", "gpt-oss-20b", "deepseek-v2-lite", "qwen3-30b-a3b", "nemotron-3-nano", "gpt2",
    "falcon-7b", "kimi-linear-48b-a3b", "mimo-v2-flash", "minicpm3-4b",
)  # fmt: skip
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100, "tie_word_embeddings": True,
}  # fmt: skip


def reference(data: dict[str, Any]) -> Reference:
    return built(configured(data, "config.json"), "config.json")


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_equals_the_trace(name: str) -> None:
    trace = TRACES[name]
    made = reference(json.loads((DATA / "configs" / f"{name}.json").read_text(encoding="utf-8")))
    assert made.parameters == trace["parameters"]
    for expected in trace["runs"]:
        run = made.run(expected["context"])
        assert run.cache_bytes == expected["cache_bytes"]
        assert run.prefill
        assert run.decode
        for phase, step in (("prefill", run.prefill), ("decode", run.decode)):
            if f"{phase}_attention_flops" in expected:
                assert step.total == expected[f"{phase}_attention_flops"]


def test_a_small_model_by_hand() -> None:
    made = reference(LLAMA)
    attention, ffn, norms = 64 * 64 * 2 + 64 * 32 * 2, 3 * 64 * 96, 2 * 64
    assert made.parameters == 100 * 64 + 3 * (attention + ffn + norms) + 64
    run = made.run(10)
    assert run.cache == (
        Kept("keys", (1, 2, 10, 16), "bfloat16", 3, 1920),
        Kept("values", (1, 2, 10, 16), "bfloat16", 3, 1920),
    )
    assert run.prefill
    assert run.decode
    products = 2 * 10 * attention + 2 * 2 * 4 * 16 * 10 * 10
    assert run.prefill.flops == {0: products, 1: products, 2: products}
    assert run.decode.total == 3 * (2 * attention + 2 * 2 * 4 * 16 * 11)


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({}, "model_type: transformers has no such type, got None"),
        (
            {"model_type": "chatglm", "auto_map": {"AutoConfig": "x.Y"}},
            "names code of the checkpoint, which is never run",
        ),
        ({"model_type": "vit"}, "no causal language model of this type, got 'vit'"),
        (LLAMA | {"num_hidden_layers": 10**9}, "num_hidden_layers: must be at most 10000"),
        (LLAMA | {"hidden_size": "64"}, "transformers refuses this configuration"),
        (LLAMA | {"num_attention_heads": 0}, "transformers refuses this configuration"),
        (LLAMA | {"hidden_act": "none"}, "transformers cannot build this model, got KeyError"),
    ],
)
def test_what_transformers_cannot_build_is_one_line(data: dict[str, Any], line: str) -> None:
    with pytest.raises(AttncalcError, match=r"config\.json") as raised:
        reference(data)
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)
