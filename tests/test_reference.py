"""What transformers keeps and computes on the meta device, by `measure.reference`, against the stored traces.

The traces were made by another program: what agrees with both is what transformers does.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attncalc import presets
from attncalc.errors import AttncalcError
from tests.conftest import Command

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from attncalc.measure.reference import Kept, Reference, built, configured

DATA = Path(__file__).parent / "data"
TRACES: dict[str, Any] = json.loads((DATA / "traces.json").read_text(encoding="utf-8"))["models"]
SAMPLE = (
    "llama-3.2-1b", "gemma-3-1b", "gpt-oss-20b", "deepseek-v2-lite", "qwen3-30b-a3b", "nemotron-3-nano", "gpt2",
    "falcon-7b", "kimi-linear-48b-a3b", "kimi-k2", "kimi-k2.5", "mimo-v2-flash", "minicpm3-4b",
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
        assert run.prefill.cache_bytes == expected["cache_bytes"]
        if trace["flops_comparable"]:
            assert run.prefill.total == expected["prefill_attention_flops"]
            assert run.decode.total == expected["decode_attention_flops"]


def test_a_small_model_by_hand() -> None:
    made = reference(LLAMA)
    attention, ffn, norms = 64 * 64 * 2 + 64 * 32 * 2, 3 * 64 * 96, 2 * 64
    assert made.parameters == 100 * 64 + 3 * (attention + ffn + norms) + 64
    run = made.run(10)
    assert run.prefill.cache == tuple(Kept(n, (1, 2, 10, 16), "bfloat16", 3, 1920) for n in ("keys", "values"))
    assert run.decode.cache_bytes == 2 * 3 * 2 * 11 * 16 * 2
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


def test_building_asks_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever code of transformers should want from one, and whoever imported its client first."""
    hub = pytest.importorskip("huggingface_hub")
    environment = dict(os.environ)
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    llama = pytest.importorskip("transformers").LlamaConfig

    def asking(*_: Any) -> None:
        hub.get_hf_file_metadata("http://127.0.0.1:9/org/name/resolve/main/config.json")

    monkeypatch.setattr(llama, "from_dict", asking)
    with pytest.raises(AttncalcError, match="got OfflineModeIsEnabled"):
        reference(LLAMA)
    assert not hub.is_offline_mode()
    assert dict(os.environ) == environment


# --------------------------------------------------------------------------------------------------------------------
# measure --against transformers

FULL = LLAMA | {"hidden_act": "silu", "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(FULL))
    return str(tmp_path / "tiny")


def test_the_estimate_stands_beside_what_transformers_does(attncalc: Command, config: str) -> None:
    made = attncalc("measure", config, "--against", "transformers", "--context", "10", "--batch", "3", "--json")
    assert made.status == 0, made.err
    prefill, decode = made.record["results"]
    assert (prefill["context"], prefill["new_tokens"], decode["context"], decode["new_tokens"]) == (10, 10, 11, 1)
    for row, tokens in ((prefill, 10), (decode, 11)):
        assert row["ok"]
        assert row["measured_cache_bytes"] == row["predicted_cache_bytes"] == 3 * 3 * 2 * 2 * 16 * tokens * 2
        assert row["measured_parameters"] == row["predicted_parameters"]
        assert row["measured_flops"] == row["predicted_flops"] > 0
        assert row["flops_layers"] == [0, 1, 2]
        assert row["not_compared"] == []
    shape = {"shape": [3, 2, 10, 16], "dtype": "bfloat16", "count": 3}
    assert prefill["cache_tensors"] == [{"tensor": "keys"} | shape, {"tensor": "values"} | shape]
    shown = attncalc("measure", config, "--against", "transformers", "--context", "10")
    assert "2 of 2 steps as predicted" in shown.out


def test_a_difference_is_exit_1_and_stands_in_the_table(
    attncalc: Command, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = presets.load(Path(config))
    wrong = replace(true, groups=(true.groups[0]._replace(indices=(0, 1)),))
    monkeypatch.setattr(presets, "load", lambda _: wrong)
    made = attncalc("measure", config, "--against", "transformers", "--context", "10", "--format", "csv")
    assert made.status == 1
    assert "2,560 predicted" in made.out  # 2 layers of K and V, 2 heads, 10 tokens, 16 wide, 2 bytes


def test_what_no_reader_knows_is_measured_and_named(
    attncalc: Command, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise AttncalcError("config.json", "is not understood")

    monkeypatch.setattr(presets, "load", refuse)
    made = attncalc("measure", config, "--against", "transformers", "--context", "10", "--json")
    assert made.status == 1  # nothing was proven
    assert made.record["results"][0]["ok"] is None
    assert made.record["results"][0]["measured_cache_bytes"] == 3 * 2 * 2 * 16 * 10 * 2
    assert "not estimated: config.json: is not understood" in made.record["notes"]


def test_what_state_layers_compute_is_named_and_left_out(attncalc: Command, tmp_path: Path) -> None:
    data = json.loads((DATA / "configs" / "qwen3-next-80b-a3b.json").read_text(encoding="utf-8"))
    small = {"num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 100}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data | small))
    made = attncalc("measure", str(path), "--against", "transformers", "--context", "10", "--json")
    row = made.record["results"][0]
    if row["ok"] is None:
        pytest.skip("no reader of this architecture yet")
    assert made.status == 0, made.err
    assert row["flops_layers"] == [3]
    assert row["measured_flops"] == row["predicted_flops"] > 0
    assert "FLOPs of 3 gdn layers" in row["not_compared"][0]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("{}", "--against", "jax"), "--against: must be transformers, got 'jax'"),
        (("--against", "transformers"), "name the models to build"),
        (("{}", "--against", "transformers", "--dtype", "fp32"), "--dtype: must be bf16 with --against"),
        (("{}", "--against", "transformers", "--device", "cuda"), "--device: must be meta with --against"),
        (("{}", "--against", "transformers", "--form", "absorbed"), "--form: is that of the model"),
        (("{}", "--against", "transformers", "-q", "2"), "--new-tokens: must be 1 with --against"),
        (("llama-3.1-8b", "--against", "transformers"), "the Hugging Face cache does not hold it"),
        (("seed-mla", "--against", "transformers"), "is a preset of no repository"),
        (("none", "--against", "transformers"), "no such preset"),
        (("{}/none.json", "--against", "transformers"), "no such file"),
    ],
)
def test_what_cannot_be_compared_is_one_line(attncalc: Command, config: str, words: tuple[str, ...], line: str) -> None:
    made = attncalc("measure", *(w.format(config) for w in words))
    assert (made.status, made.out, len(made.err.splitlines())) == (2, "", 1)
    assert line in made.err


def test_without_the_extra(attncalc: Command, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    made = attncalc("measure", config, "--against", "transformers")
    assert (made.status, made.out, len(made.err.splitlines())) == (2, "", 1)
    assert 'pip install "attncalc[reference]"' in made.err
