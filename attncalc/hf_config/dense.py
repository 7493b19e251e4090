"""Decoders like Llama with other biases, norms, feed-forwards and windows. Source: transformers 5.24 `models/`."""

from typing import Any

from attncalc.errors import AttncalcError, shown
from attncalc.hf_config.composite import text_model
from attncalc.hf_config.config import MAX_VOCABULARY, Config
from attncalc.hf_config.decoder import (
    FULL,
    SLIDING,
    Decoder,
    by_layer_types,
    every,
    flag,
    head_dim,
)
from attncalc.hf_config.layers import Row, dense, weight

ATTENTION_BIAS = flag("attention_bias", "qkvo", "")


def _ffn(*, gated: bool = True, bias: str | None = None) -> Any:
    """A feed-forward of intermediate_size; `bias`: the field that says whether its matrices have one."""

    def ffn(c: Config, total: int) -> list[Row]:
        return [dense(c.count("intermediate_size"), gated=gated, bias=bias is not None and c.flag(bias))] * total

    return ffn


def given(c: Config, *names: str) -> None:
    """Refuse a null, and an absent field whose default is null, where the architecture's own code fails on it."""
    for name in names:
        if c.null(name):
            raise AttncalcError(c.path(name), "must be given: the architecture's own code fails without it", got="null")


def square(c: Config) -> int:
    """Heads that fill the hidden size together; the code of the architecture fails where they do not."""
    heads, width, size = c.count("num_attention_heads"), head_dim(c), c.count("hidden_size")
    if heads * width != size:
        raise AttncalcError(c.path("num_attention_heads"), f"times {width} must equal hidden_size {size}", got=heads)
    return width


def _granite_swa_rope(c: Config, windows: list[int | None]) -> list[bool]:
    """`layer_rope_theta`: 0 in a layer that does not rotate; null: all do."""
    if c.null("layer_rope_theta"):
        return [True] * len(windows)
    thetas = c.listed("layer_rope_theta", len(windows))
    for i, theta in enumerate(thetas):
        if not isinstance(theta, (int, float)) or isinstance(theta, bool):
            raise AttncalcError(c.path(f"layer_rope_theta[{i}]"), "must be a number", got=shown(theta))
    return [theta != 0 for theta in thetas]


def _first_of_4(c: Config, total: int) -> list[str]:  # noqa: ARG001
    return [SLIDING if i % 4 else FULL for i in range(total)]


def _second(c: Config, total: int) -> list[str]:  # noqa: ARG001
    return every(2, total)


def _sliding(c: Config, total: int) -> list[str]:  # noqa: ARG001
    return [SLIDING] * total


def _xielu(c: Config, total: int) -> list[Row]:
    """The two learned numbers of the activation xIELU, and its two constants, in each layer."""
    if c.value("hidden_act", absent="xielu") != "xielu":
        return []
    names = {"act_fn.alpha_p": False, "act_fn.alpha_n": False, "act_fn.beta": True, "act_fn.eps": True}
    return [weight(name, (1,), range(total), total, buffer=buffer) for name, buffer in names.items()]


def _apertus1p5(c: Config, total: int) -> list[Row]:
    """A head of fewer rows than the embedding is not understood."""
    c.only("output_vocab_size", None, c.count("vocab_size", maximum=MAX_VOCABULARY))
    return _xielu(c, total)


def _bitnet_norm(c: Config, total: int) -> list[Row]:
    """A norm before the last matrix of the feed-forward; the third of the hidden size is before that of attention."""
    square(c)
    return [weight("ffn_sub_norm.weight", (c.count("intermediate_size"),), range(total), total)]


def _internlm3_bias(c: Config) -> str:
    bias = c.flag("attention_bias")
    c.only("mlp_bias", bias)
    return "qkvo" if bias else ""


def _seed_bias(c: Config) -> str:
    return ("qkv" if c.flag("attention_bias") else "") + ("o" if c.flag("attention_out_bias") else "")


def _helium_bias(c: Config) -> str:
    square(c)
    return "qkv" if c.flag("attention_bias") else ""


def _nemotron_bias(c: Config) -> str:
    given(c, "num_key_value_heads")
    return "qkvo" if c.flag("attention_bias") else ""


def _hunyuan_bias(c: Config) -> str:
    given(c, "head_dim")
    if not c.null("attention_head_dim"):
        c.only("attention_head_dim", c.count("head_dim"))
    return "qkvo" if c.flag("attention_bias") else ""


def _ministral_bias(c: Config) -> str:
    given(c, "head_dim", *(("sliding_window",) if c.has("sliding_window") else ()))
    return ""


OWN_ACTIVATIONS = {"apertus": ("xielu",), "apertus1p5_text": ("xielu",)}

READERS = {
    "stablelm": Decoder(
        bias=flag("use_qkv_bias", "qkv", ""),
        qk_norm=flag("qk_layernorm", "per_head", "none"),
        rope=0.25,
        norm="layer_bias",
        norms=flag("use_parallel_residual", 1, 2),
        expected=(("head_dim", None),),
    ),
    "olmo": Decoder(bias=ATTENTION_BIAS, norm="unweighted", ignored=("clip_qkv",)),
    "granite": Decoder(bias=ATTENTION_BIAS, ffn=_ffn(bias="mlp_bias")),
    "granite_swa": Decoder(
        bias=ATTENTION_BIAS,
        ffn=_ffn(bias="mlp_bias"),
        sinks=True,
        windows=by_layer_types(_first_of_4),
        rotates=_granite_swa_rope,
    ),
    "nemotron": Decoder(bias=_nemotron_bias, ffn=_ffn(gated=False, bias="mlp_bias"), rope=0.5, norm="layer_bias"),
    "glm": Decoder(bias=flag("attention_bias", "qkv", ""), rope=0.5),
    "helium": Decoder(bias=_helium_bias, ffn=_ffn(bias="mlp_bias")),
    "seed_oss": Decoder(bias=_seed_bias, ffn=_ffn(bias="mlp_bias")),
    "apertus": Decoder(bias=ATTENTION_BIAS, ffn=_ffn(gated=False), qk_norm="head", extras=_xielu),
    "apertus1p5_text": Decoder(bias=ATTENTION_BIAS, ffn=_ffn(gated=False), qk_norm="head", extras=_apertus1p5),
    "emu3_text_model": Decoder(expected=(("attention_bias", False), ("mlp_bias", False))),
    "emu3": text_model("emu3_text_model", ignored=("vq_config", "vocabulary_map")),
    "fuyu": text_model("persimmon", ignored=("image_size", "patch_size", "num_channels")),
    "got_ocr2": text_model("qwen2"),
    "moss_transcribe_diarize": text_model(
        "qwen3", ignored=("projector_hidden_act", "projector_bias", "audio_merge_size", "audio_chunk_size")
    ),
    "arcee": Decoder(bias=ATTENTION_BIAS, ffn=_ffn(gated=False, bias="mlp_bias")),
    "hunyuan_v1_dense": Decoder(
        bias=_hunyuan_bias,
        qk_norm="head",
        expected=(
            ("add_classification_head", False),
            ("mlp_bias", False),
            ("norm_type", "rms"),
            ("num_experts", 1),
            ("use_cla", False),
            ("use_qk_norm", True),
            ("use_rotary_pos_emb", True),
        ),
        ignored=(
            "class_num",
            "pool_type",
            "num_media_embeds",
            "cla_share_factor",
            "dense_list",
            "org_vocab_size",
            "position_embedding_xdrope",
            "xdrope_section",
        ),
    ),
    "hyperclovax": Decoder(bias=ATTENTION_BIAS, ffn=_ffn(bias="mlp_bias"), norms=flag("use_post_norm", 4, 2)),
    "internlm3": Decoder(bias=_internlm3_bias, ffn=_ffn(bias="mlp_bias")),
    "iquestcoder": Decoder(
        bias=ATTENTION_BIAS,
        ffn=_ffn(bias="mlp_bias"),
        expected=(("clip_qkv", None), ("use_sliding_window", False), ("sliding_window", None)),
    ),
    "jais2": Decoder(bias=ATTENTION_BIAS, ffn=_ffn(gated=False, bias="mlp_bias"), norm="layer_bias"),
    "ministral": Decoder(bias=_ministral_bias, windows=by_layer_types(_sliding)),
    "nanochat": Decoder(
        bias=ATTENTION_BIAS, ffn=_ffn(gated=False), qk_norm="unweighted", norm="unweighted", final_softcap=True
    ),
    "bitnet": Decoder(bias=ATTENTION_BIAS, norms=3, extras=_bitnet_norm),
    "vaultgemma": Decoder(bias=ATTENTION_BIAS, windows=by_layer_types(_second), softcaps=True),
}
