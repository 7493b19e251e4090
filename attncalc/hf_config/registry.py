"""Which module reads an architecture, and what that architecture's own code says of absent fields."""

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from attncalc.errors import AttncalcError, shown, suggestion
from attncalc.hf_config.config import NO_FACTS, Access, Config, Facts
from attncalc.hf_config.functions import check_functions
from attncalc.hf_config.quantization import Declared, agreed, declared_format

Row = dict[str, Any]
Reader = Callable[[Config], Row]

_MODULES = {
    "llama": """cohere cohere2 cwm ernie4_5 exaone exaone4 glm4 llama ministral3 mistral olmo2 olmo3 phi3 smollm3
        starcoder2""",
    "qwen": """qwen2 qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe
        qwen3_vl_moe_text qwen3_vl_text""",
    "gemma": "gemma gemma2 gemma3 gemma3_text gemma4 gemma4_text gemma4_unified gemma4_unified_text",
    "gemma3n": "gemma3n gemma3n_text",
    "bert": """bert bert-generation camembert data2vec-text ernie modernbert-decoder roberta roberta-prelayernorm
        roc_bert xlm-roberta xlm-roberta-xl""",
    "seq2seq": "bart bigbird_pegasus blenderbot blenderbot-small mbart mvp pegasus plbart trocr whisper",
    "sparse": "flint kolibri1 lara_mini mellum",
    "gpt": "falcon gpt-sw3 gpt2 gptj phi phi-msft",
    "gpt_others": """biogpt bloom codegen ctrl gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese mpt opt persimmon xglm""",
    "dense": """apertus apertus1p5_text arcee bitnet emu3 emu3_text_model fuyu glm got_ocr2 granite granite_swa helium
        hunyuan_v1_dense hyperclovax internlm3 iquestcoder jais2 ministral moss_transcribe_diarize nanochat nemotron
        olmo seed_oss stablelm vaultgemma""",
    "moe": """ernie4_5_moe glm4_moe glm4_shared_moe gpt_oss laguna minimax_m2 minimax_m3_vl minimax_m3_vl_text
        mixtral solar_open""",
    "experts": """afmoe aria_text cohere2_moe dbrx dots1 exaone_moe flex_olmo granitemoe granitemoe_swa granitemoeshared
        hunyuan_v1_moe hy_v3 olmoe phimoe qwen2_moe sarvam_moe""",
    "state_space": "bamba falcon_h1 falcon_mamba granitemoehybrid mamba mamba2 minimax olmo_hybrid",
    "zamba2": "zamba2",
    "short_conv": "lfm2 lfm2_moe lfm3",
    "deepseek": """axk1 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa kimi_k2 kimi_k25 minicpm3
        mistral3 mistral4 sarvam_mla youtu""",
    "deepseek_v4": "deepseek_v4",
    "kimi": "kimi_k3 kimi_k3_text kimi_linear",
    "llama4": "llama4 llama4_text mllama mllama_text_model",
    "hybrid": "jamba nemotron_h",
    "mimo": "mimo mimo_v2_flash",
    "remote": "baichuan chatglm hunyuan internlm internlm2 minicpm nemotron-nas",
    "rwkv": "rwkv7",
    "reference": "deepseek-inference mistral-inference",
}
EVERYWHERE: tuple[tuple[str, Any], ...] = (
    ("add_cross_attention", False),
    ("cross_attention_hidden_size", None),
    ("is_encoder_decoder", False),
    ("per_layer_config", None),
    ("pruned_heads", {}),
)
"""Fields that any configuration may have, and the one value that leaves a decoder as its reader knows it."""

OTHER_CLASSES = {
    "emu3_text_model": ("Emu3ForCausalLM",),
    "exaone": ("ExaoneForCausalLM",),
    "glm4_shared_moe": ("Glm4SharedMoeForCausalLM",),
    "internlm3": ("InternLM3ForCausalLM",),
    "iquestcoder": ("IQuestCoderForCausalLM",),
    "kimi_k25": ("KimiK25ForConditionalGeneration",),
    "minimax_m3_vl_text": ("MiniMaxM3SparseForCausalLM",),
    "mllama_text_model": ("MllamaForCausalLM",),
    "mpt": ("MPTForCausalLM",),
    "qwen3_vl_moe_text": ("Qwen3VLMoeForConditionalGeneration",),
    "qwen3_vl_text": ("Qwen3VLForConditionalGeneration",),
}
"""Names that model classes have in the repositories of the models, beside those of transformers."""

SAME_CODE = {"glm4_shared_moe": "glm4_moe"}
"""Another model_type for an architecture of transformers."""

READERS = {kind: module for module, kinds in _MODULES.items() for kind in kinds.split()}
"""model_type -> the module here whose `READERS` has it."""


def read_as(kind: str, data: object, where: str, log: list[Access], *, tie: bool | None = None) -> Row:
    """The document of a mapping of this architecture, every field of which its reader understands.

    `tie`: whether embedding and head are one weight, where the mapping around this one says it. `kv_cache_dtype` is a
    `Declared`, or None where nothing is said of it: what is said elsewhere must agree.
    """
    c = Config(data, where, facts(kind), log, tie=tie)
    c.ignore("model_type", *(("tie_word_embeddings",) if tie is not None else ()))
    _check_architectures(c, c.facts.architectures + OTHER_CLASSES.get(kind, ()))
    for name, value in EVERYWHERE:
        if c.has(name) and name not in getattr(_module(kind), "OWN_FIELDS", ()):
            c.only(name, value)
    check_functions(c, getattr(_module(kind), "OWN_ACTIVATIONS", {}).get(kind, ()))
    declared = declared_format(c)
    reader: Reader = _module(kind).READERS[kind]
    document = {"model_type": kind, **reader(c)}
    c.finish()
    inner: Declared | None = document["kv_cache_dtype"]  # of the text model inside
    document["kv_cache_dtype"] = agreed(declared, inner)
    return document


def model_type(c: Config) -> str:
    """The architecture of a mapping, of which there is a reader."""
    kind = c.value("model_type")
    if not isinstance(kind, str) or kind not in READERS:
        hint = suggestion(kind, READERS) if isinstance(kind, str) else ""
        raise AttncalcError(c.path("model_type"), "is an architecture that no reader knows", got=shown(kind), hint=hint)
    return kind


def _module(kind: str) -> Any:
    return import_module(f"attncalc.hf_config.{READERS[kind]}")


def _check_architectures(c: Config, known: tuple[str, ...]) -> None:
    """Refuse a model class that is not the whole decoder: classifiers and draft models have the same model_type."""
    if c.null("architectures"):
        return
    for name in c.listed("architectures"):
        if name not in known:
            rule = f"is understood only as {' or '.join(known) or 'null'}"
            raise AttncalcError(c.path("architectures"), rule, got=shown(name))


def facts(kind: str) -> Facts:
    """What the architecture's own code says: of transformers, or of the module of its reader for other code."""
    own: Mapping[str, Facts] = getattr(_module(kind), "FACTS", {})
    if kind in own:
        return own[kind]
    data = _published().get(SAME_CODE.get(kind, kind))
    if data is None:
        return NO_FACTS
    return Facts(data["defaults"], frozenset(data["nullable"]), data["names"], tuple(data["architectures"]))


@cache
def _published() -> Row:
    import json

    text = (Path(__file__).parent / "defaults.json").read_text(encoding="utf-8")
    data: Row = json.loads(text)["architectures"]
    return data
