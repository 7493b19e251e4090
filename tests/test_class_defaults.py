"""Every causal language model type of transformers with its default values: read exactly, or refused.

`data/class_defaults.json` has the configuration of each type, all fields written out, and what the model did with it on
the meta device: parameters, and where it runs there cache bytes at two contexts and FLOPs in its attention modules.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from attncalc import presets
from attncalc.errors import AttncalcError
from attncalc.workload import Conventions

DATA = Path(__file__).parent / "data"
TYPES: dict[str, dict[str, Any]] = json.loads((DATA / "class_defaults.json").read_text(encoding="utf-8"))["types"]
RAN = [name for name, made in TYPES.items() if "runs" in made]
BUILT = [name for name, made in TYPES.items() if "parameters" in made]
NO_READER = """axk2 bailing_hybrid beam big_bird blt cpmant diffllama doge dory dots3_note dots3_note_text electra
    gemma4_unified_assistant git hrm_text hy_v4 inkling2_loop_text inkling2_text inkling_text jetmoe longcat_flash
    megatron-bert moshi openai-gpt phi4_multimodal prophetnet recurrent_gemma rembert roformer rwkv xlm xlnet xlstm xmod
    zamba zaya"""
FIELDS = {
    "bamba": "attn_layer_indices: must give at least one layer attention",
    "deepseek_v2": "num_experts_per_tok: must be a whole number, got None",
    "deepseek_v4": "compress_rates: is understood only as null",
    "gemma4": "per_layer_config: is understood only as null",
    "gemma4_text": "per_layer_config: is understood only as null",
    "gemma4_unified": "per_layer_config: is understood only as null",
    "gemma4_unified_text": "per_layer_config: is understood only as null",
    "glm4_moe": "num_attention_heads: must divide hidden_size 4096",
    "granitemoehybrid": "layer_types: must give at least one layer attention",
    "kimi_linear": "layer_types: is understood only as null",
    "mimo_v2_flash": "sliding_window_size: must be given",
    "moss_transcribe_diarize": "text_config.tie_word_embeddings: is understood only as true",
}
REFUSED = dict.fromkeys(NO_READER.split(), "is an architecture that no reader knows") | FIELDS
"""What is refused as transformers writes it out, and why; every other type is exact."""

_INNER = "fuyu gemma3 gemma3n gemma4 gemma4_unified got_ocr2 llama4 mllama moss_transcribe_diarize qwen3_5 qwen3_5_moe"
ALONE = {
    **dict.fromkeys(_INNER.split(), "text_config: must be a mapping, got None"),
    **dict.fromkeys(("deepseek_v4", "gemma4_text", "gemma4_unified_text", "mimo_v2_flash"), "exact"),
    "kimi_linear": "linear_attn_config: is missing",
    "nemotron_h": "layers_block_type: or hybrid_override_pattern must be given",
}
"""Where a file of what differs from the defaults says less, or what is refused does not stand in it."""

COUNTED_VARIANTS = {"mha", "gqa", "mqa", "mla"}
"""Attention whose FLOPs torch's counter sees whole: products alone."""
DENSE = Conventions(count="dense")


def differences(name: str, config: dict[str, Any]) -> list[str]:
    """What a reader makes of the configuration that transformers does not.

    Raises:
        AttncalcError: the reader refuses it.
    """
    made, model, out = TYPES[name], presets.build(config, "config.json", name), []

    def compare(what: str, ours: int, theirs: int) -> None:
        if ours != theirs:
            out.append(f"{name}: {what} {ours}, transformers {theirs}")

    compare("parameters", model.parameters(), made["parameters"])
    counted = made["flops_comparable"] and all(g.variant in COUNTED_VARIANTS for g in model.groups if g.attention)
    for run in made.get("runs", ()):
        n = run["context"]
        compare(f"cache of {n}", model.cache(n, engine="transformers").bytes_total, run["cache_bytes"])
        for phase, new, context in (("prefill", n, n), ("decode", 1, n + 1)):
            theirs = run[f"{phase}_attention_flops"]
            if counted and theirs is not None:
                cost = model.flops(context=context, new_tokens=new, engine="transformers", conventions=DENSE)
                compare(f"FLOPs of {phase} {n}", cost.flops_attention, theirs)
    return out


def verdict(name: str, config: dict[str, Any]) -> str:
    """`exact`, or the line that refuses it; a difference fails."""
    try:
        wrong = differences(name, config)
    except AttncalcError as error:
        return str(error)
    assert not wrong, wrong
    return "exact"


@pytest.mark.parametrize("name", BUILT[::8])
def test_a_type_is_exact_or_refused(name: str) -> None:
    assert REFUSED.get(name, "exact") in verdict(name, TYPES[name]["config"])


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT)
def test_every_type_is_exact_or_refused(name: str) -> None:
    assert REFUSED.get(name, "exact") in verdict(name, TYPES[name]["config"])


@pytest.mark.slow
@pytest.mark.parametrize("name", RAN)
def test_a_type_alone_is_exact_or_refused(name: str) -> None:
    """A file as `save_pretrained` writes it: only what differs from the defaults."""
    decoder = {"is_decoder": True} if TYPES[name]["config"].get("is_decoder") else {}
    said = verdict(name, {"model_type": name} | decoder)
    assert ALONE.get(name, REFUSED.get(name, "exact")) in said


def test_how_many_types_are_exact() -> None:
    """The numbers that the README has."""
    readme = (DATA.parents[1] / "README.md").read_text(encoding="utf-8")
    exact, without_runs = len(set(RAN) - set(REFUSED)), set(BUILT) - set(RAN)
    assert without_runs <= set(REFUSED)
    counts = f"{exact} of the {len(RAN)} that run are exact, {len(RAN) - exact} are refused"
    assert counts in readme
    assert f"{len(TYPES)} causal language model types" in readme
    assert set(REFUSED) <= set(BUILT)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3", "mamba", "jamba", "bert", "gpt_neo", "mllama"])
def test_what_is_stored_is_what_transformers_does(name: str) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    spec = importlib.util.spec_from_file_location("class_defaults", DATA / "class_defaults.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert json.loads(json.dumps(module.derive(name))) == TYPES[name]


def test_the_comparison_can_fail() -> None:
    wrong = TYPES["llama"]["config"] | {"num_key_value_heads": 8}
    assert len(differences("llama", wrong)) == 1 + 2 * 3
