"""Reading one field: typed, with the defaults of the architecture's own code, and refused where not understood."""

import json
from pathlib import Path
from typing import Any

import pytest

from attncalc import presets
from attncalc.cli import run
from attncalc.errors import AttncalcError
from attncalc.hf_config.functions import ACTIVATIONS
from attncalc.model import Model

FILE = Path(__file__).parents[1] / "data" / "configs" / "llama-3.1-8b.json"
LLAMA: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))


def read(data: dict[str, Any]) -> Model:
    return presets.build(data, "config.json", "mine")


def without(*names: str, **changes: Any) -> dict[str, Any]:
    return {k: v for k, v in LLAMA.items() if k not in names} | changes


REFUSED = [
    (without(num_key_value_head=8), "num_key_value_head: is a field that the reader does not understand, got 8"),
    (without("num_key_value_heads", num_kv_heads=8), "num_kv_heads: is a field that the reader does not understand"),
    (without(hidden_size="4096"), "hidden_size: must be a whole number, got '4096'"),
    (without(hidden_size=4096.0), "hidden_size: must be a whole number, got 4096.0"),
    (without(hidden_size=float("inf")), "hidden_size: must be a whole number, got inf"),
    (without(num_hidden_layers=float("nan")), "num_hidden_layers: must be a whole number, got nan"),
    (without(hidden_size=None), "hidden_size: must not be null: the architecture's own code refuses it"),
    (without(hidden_size=True), "hidden_size: must be a whole number, got True"),
    (without(num_attention_heads=-32), "num_attention_heads: must be from 1 to"),
    (without(vocab_size=2**40), "vocab_size: must be from 1 to 16777216"),
    (without(head_dim=128.5), "head_dim: must be a whole number"),
    (without(num_attention_heads=31), "num_attention_heads: must divide hidden_size 4096"),
    (without(num_key_value_heads=5), "num_key_value_heads: must divide num_attention_heads 32, got 5"),
    (without(tie_word_embeddings="false"), "tie_word_embeddings: must be true or false, got 'false'"),
    (without(model_type="llamma"), "is an architecture that no reader knows, got 'llamma'. Did you mean 'llama'?"),
    (without("model_type"), "model_type: is missing"),
    (without(model_type=["llama"]), "is an architecture that no reader knows, got a list"),
    (without(architectures=["LlamaForCausalLMEagle3"]), "architectures: is understood only as LlamaForCausalLM"),
    (without(is_encoder_decoder=True), "is_encoder_decoder: is understood only as false, got True"),
    (without(per_layer_config={"3": {}}), "per_layer_config: is understood only as null"),
    (without(partial_rotary_factor=0.5), "partial_rotary_factor: must be absent or 1 in this architecture"),
    *(
        (without(hidden_act=act), "hidden_act: is an activation that the reader does not know, got")
        for act in ("foo", "prelu", "xielu", "swigluoai", "geglu", 7, ["silu"], ["prelu"], {"name": "silu"}, None, "")
    ),
    (
        without(activation_function="foo"),
        "activation_function: is an activation that the reader does not know, got 'foo'",
    ),
    (without(scoring_func="foo"), "scoring_func: is a way of choosing experts that the reader does not know"),
    (
        {"model_type": "dbrx", "attn_config": {"rope_theta": 1e4}, "ffn_config": {"ffn_act_fn": {"name": "prelu"}}},
        "ffn_config.ffn_act_fn.name: is an act",
    ),
    (without(rope_scaling={"factr": 8.0}), "rope_scaling.factr: is a field that the reader does not understand"),
    (without(rope_scaling="llama3"), "rope_scaling: must be a mapping"),
]


@pytest.mark.parametrize(("data", "line"), REFUSED, ids=lambda x: x[:60] if isinstance(x, str) else "")
def test_refused_by_name_and_value(data: dict[str, Any], line: str) -> None:
    with pytest.raises(AttncalcError) as error:
        read(data)
    assert line in str(error.value)


@pytest.mark.slow
def test_known_activations_are_those_of_transformers_without_weights() -> None:
    pytest.importorskip("torch", reason="needs torch")
    table = pytest.importorskip("transformers.activations", reason="needs transformers").ACT2FN
    weights = {name: sum(p.numel() for p in table[name].parameters()) for name in table}
    assert {name for name, count in weights.items() if count} == {"prelu", "xielu"}
    assert {name for name, count in weights.items() if not count} == ACTIVATIONS


# What LlamaConfig of transformers 5.24 does with the same fields.
DEFAULTED = [
    (without("num_key_value_heads"), "num_key_value_heads = 32", 32, 128, 32),
    (without(num_key_value_heads=None), "num_key_value_heads = 32", 32, 128, 32),
    (without(head_dim=None), "head_dim = 128", 8, 128, 32),
    (without("num_hidden_layers"), "num_hidden_layers = 32", 8, 128, 32),
    (without("num_attention_heads", "num_hidden_layers"), "num_attention_heads = 32", 8, 128, 32),
    (without("hidden_size", num_attention_heads=64), "hidden_size = 4096", 8, 64, 32),
]


@pytest.mark.parametrize(("data", "listed", "kv_heads", "head_dim", "layers"), DEFAULTED)
def test_defaults_of_the_architecture_are_listed(
    data: dict[str, Any], listed: str, kv_heads: int, head_dim: int, layers: int
) -> None:
    model = read(data)
    assert model.reading
    assert listed in model.reading.defaulted
    assert model.cache(1000).bytes_total == 1000 * layers * 2 * kv_heads * head_dim * 2


def test_what_a_null_means_is_the_business_of_each_architecture() -> None:
    """Mistral's default is a window of 4096; null switches it off, and so does nothing else."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
    mistral = {"model_type": "mistral", "vocab_size": 100, "num_hidden_layers": 2, **sizes}
    for change, kept in (({}, 4096), ({"sliding_window": None}, 10_000), ({"sliding_window": 512}, 512)):
        assert read(mistral | change).cache(10_000).bytes_total == kept * 2 * 2 * 2 * 16 * 2


QWEN = {
    "model_type": "qwen2",
    "vocab_size": 100,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "sliding_window": 512,
    "max_window_layers": 3,
}


def test_a_window_that_is_switched_off_is_none() -> None:
    row = 2 * 2 * 16 * 2
    assert read(QWEN | {"use_sliding_window": False}).cache(10_000).bytes_total == 4 * 10_000 * row
    assert read(QWEN | {"use_sliding_window": True}).cache(10_000).bytes_total == (3 * 10_000 + 512) * row


@pytest.mark.parametrize(
    ("declared", "kept"),
    [
        ({"quant_method": "fp8", "fmt": "e4m3"}, "bf16"),  # weights alone
        ({"kv_cache_scheme": None, "quant_method": "compressed-tensors"}, "bf16"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}}, "fp8"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int", "dynamic": False}}, "int8"),
        ({"kv_cache_quant_algo": "FP8"}, "fp8"),
        ({"kv_cache_quant_algo": "NVFP4"}, "nvfp4"),
        ({"quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8"),
        ({"quantized_layers": {"model.layers.0.self_attn.k_proj": {"quant_algo": "FP8"}}}, "bf16"),
        ({"config_groups": {"g": {"targets": ["Linear"], "output_activations": None}}}, "bf16"),
        ({"ignore": ["re:.*self_attn.*", "model.layers.0.self_attn.kv_b_proj"]}, "bf16"),
        ({"export": {"kv_cache_group": [], "min_kv_scale": 0.0}, "layer_quant_config": {}}, "bf16"),
    ],
)
def test_the_cache_has_the_format_that_the_checkpoint_declares(declared: dict[str, Any], kept: str) -> None:
    model = read(without(quantization_config=declared))
    assert (model.kv_cache_dtype or "bf16") == kept


def test_modelopt_declares_the_cache_beside_the_configuration(tmp_path: Path) -> None:
    beside, file = tmp_path / "hf_quant_config.json", tmp_path / "config.json"
    file.write_text(FILE.read_text(encoding="utf-8"), encoding="utf-8")
    for algorithm, kept in ((None, None), ("FP8", "fp8"), ("NVFP4", "nvfp4")):
        stated = {
            "producer": {"name": "modelopt"},
            "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": algorithm},
        }
        beside.write_text(json.dumps(stated), encoding="utf-8")
        assert presets.load(tmp_path).kv_cache_dtype == presets.load(file).kv_cache_dtype == kept
    unknown: tuple[Any, ...] = ({"quantization": {"kv_cache_quant_algo": "FP9"}}, {"quantization": "FP8"}, [])
    for spoilt in unknown:
        beside.write_text(json.dumps(spoilt), encoding="utf-8")
        with pytest.raises(AttncalcError, match="quant_config"):
            presets.load(tmp_path)
    beside.unlink()
    beside.symlink_to(tmp_path / "nowhere")
    with pytest.raises(AttncalcError, match=r"hf_quant_config.json: is a link to nothing"):
        presets.load(tmp_path)


FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor"}


@pytest.mark.parametrize(
    ("inside", "beside", "kept"),
    [
        (None, {"kv_cache_quant_algo": "FP8"}, "fp8"),
        ({}, {"kv_cache_quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt"}, {"kv_cache_quant_algo": "FP8"}, "fp8"),
        ({"kv_cache_scheme": FP8}, {"kv_cache_quant_algo": "FP8"}, "fp8"),
        ({"kv_cache_scheme": FP8}, {"quant_algo": "FP8"}, "fp8"),
        ({"kv_cache_scheme": FP8}, {"kv_cache_quant_algo": None}, "refused"),
        ({"kv_cache_scheme": FP8}, {"kv_cache_quant_algo": "NVFP4"}, "refused"),
        ({"kv_cache_scheme": None}, {"kv_cache_quant_algo": "FP8"}, "refused"),
        ({"kv_cache_scheme": None}, {"kv_cache_quant_algo": None}, None),
        ({}, {"layers": {"*k_proj": {"output_tensors": {"dtype": "fp8_e4m3"}}}}, "refused"),
    ],
)
def test_the_two_files_must_agree(inside: Any, beside: dict[str, Any], kept: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(without(quantization_config=inside)))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": beside}))
    if kept == "refused":
        with pytest.raises(AttncalcError, match=r"hf_quant_config.json: quantization\.") as error:
            presets.load(tmp_path)
        assert error.value.rule
        return
    for path in (tmp_path, tmp_path / "config.json"):
        assert presets.load(path).kv_cache_dtype == presets.load(str(path)).kv_cache_dtype == kept
        assert presets.document(path).get("kv_cache_dtype") == kept


def test_the_mappings_of_one_file_must_agree() -> None:
    algorithm = {"kv_cache_quant_algo": "NVFP4"}
    for spoilt in (
        without(quantization_config={"kv_cache_scheme": FP8} | algorithm),
        without(quantization_config={"kv_cache_scheme": FP8}, compression_config=algorithm),
        {
            "model_type": "gemma3",
            "text_config": {"quantization_config": algorithm},
            "quantization_config": {"kv_cache_scheme": FP8},
        },
    ):
        with pytest.raises(AttncalcError, match="for the cache, got"):
            read(spoilt)


@pytest.mark.parametrize(
    ("declared", "line"),
    [
        ({"kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "kv_cache_scheme.num_bits: is understood only as 8"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "channel"}}, "kv_cache_scheme.strategy"),
        ({"kv_cache_quant_algo": "FP9"}, "kv_cache_quant_algo: must be one of FP8, NVFP4, INT8"),
        ({"kv_cache_shceme": {"num_bits": 8}}, "kv_cache_shceme: says something of the cache"),
        ({"kv_cache_quant_config": {"bits": 8}}, "kv_cache_quant_config: says something of the cache"),
        (
            {"layer_quant_config": {"*k_proj": {"output_tensors": {"dtype": "fp8_e4m3"}}}},
            "*k_proj.output_tensors: says",
        ),
        ({"export": {"kv_cache_group": ["*k_proj", "*v_proj"]}}, "export.kv_cache_group: says something of the cache"),
        ({"config_groups": {"g": {"targets": ["LlamaAttention"]}}}, "g.targets[0]: says something of the cache"),
        ({"config_groups": {"g": {"output_activations": {"num_bits": 8}}}}, "g.output_activations: says something"),
        ({"quantization": {"quantization": {"kv_cache_quant_algo": "FP9"}}}, "kv_cache_quant_algo: must be one of FP8"),
        ({"a": [{"b": {"kv_cache.bits": 8}}]}, "a[0].b.kv_cache.bits: says something of the cache"),
        ({"method": "weights+kv_cache"}, "method: says something of the cache"),
    ],
)
def test_a_cache_scheme_that_is_not_known_is_refused(declared: dict[str, Any], line: str) -> None:
    with pytest.raises(AttncalcError) as error:
        read(without(quantization_config=declared))
    assert line in str(error.value)


def test_models_lists_what_was_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", str(FILE), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (result,) = report["results"]
    fields = {f["field"]: (f["value"], f["how"]) for f in result["fields"]}
    assert fields["num_key_value_heads"] == (8, "read")
    assert fields["head_dim"] == (128, "derived")
    assert fields["rms_norm_eps"] == (1e-05, "ignored")
    assert "head_dim = 128" in result["defaulted"]
    assert set(LLAMA) <= set(fields)
    assert result["read_by"] == "attncalc.hf_config.llama"
    assert run(["cache", str(FILE), "--json"]) == 0
    (named,) = json.loads(capsys.readouterr().out)["inputs"]["models"]
    assert named["read_by"] == "attncalc.hf_config.llama"


def test_sizes_that_are_defaulted_are_in_the_notes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cache", str(FILE.with_name("gemma-3-27b.json")), "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert any("own code: " in n and "text_config.vocab_size = 262208" in n for n in notes)
    assert run(["cache", str(FILE), "--json"]) == 0
    assert not any("own code: " in n for n in json.loads(capsys.readouterr().out)["notes"])


def test_a_report_of_infinity_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", str(FILE.with_name("nemotron-h-56b.json")), "--json"]) == 0

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    (result,) = json.loads(capsys.readouterr().out, parse_constant=refuse)["results"]
    fields = {f["field"]: f["value"] for f in result["fields"]}
    assert fields["time_step_limit"] == [0.0, "inf"]


def test_export_writes_a_model_file_of_equal_numbers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    assert run(["models", "--export", str(FILE), "-o", str(file)]) == 0
    assert capsys.readouterr().out == ""
    assert presets.load(file) == presets.load(FILE)
    assert run(["models", "--export", str(FILE)]) == 0
    assert capsys.readouterr().out == file.read_text(encoding="utf-8")
    assert run(["models", "--export", str(FILE), "--json"]) == 2
    assert run(["models", "--export"]) == 2


def test_infinity_elsewhere_is_read() -> None:
    """As Nemotron-H publishes it, bare, in time_step_limit."""
    file = FILE.with_name("nemotron-h-56b.json")
    assert "Infinity" in file.read_text(encoding="utf-8")
    assert presets.load(file).num_layers == 118


def test_other_names_of_a_field_must_agree() -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12}
    assert read(gpt2).hidden_size == read({**gpt2, "hidden_size": 768}).hidden_size == 768
    with pytest.raises(AttncalcError, match="hidden_size: is another name of n_embd and must equal it, got 1024"):
        read({**gpt2, "hidden_size": 1024})
