"""Models whose code lies beside their weights. A field is required where that code's default is not known here.

Sources: baichuan-inc/Baichuan2-7B-Base, THUDM/chatglm3-6b, internlm/internlm-7b and internlm2-7b, openbmb/MiniCPM-2B,
tencent/Hunyuan-A13B-Instruct, nvidia/Llama-3_3-Nemotron-Super-49B-v1, each `configuration_*.py` and `modeling_*.py`.
"""

from attncalc.errors import AttncalcError, shown
from attncalc.hf_config.config import Config, Facts
from attncalc.hf_config.decoder import Decoder, check, divided, flag, layer_count
from attncalc.hf_config.layers import Layer, Row, dense, document, gqa, moe
from attncalc.hf_config.rope import rotated


def _every_head(c: Config) -> Row:
    """K and V of every head (Baichuan 7B, InternLM)."""
    heads, width = c.count("num_attention_heads"), divided(c)
    bias = "qkvo" if c.flag("bias", absent=False) else ""
    attention = gqa(heads, heads, width, rope_dim=rotated(c, width), bias=bias)
    c.ignore("model_max_length")
    return document(c, [Layer(attention, dense(c.count("intermediate_size")), 2)] * layer_count(c))


def _baichuan(c: Config) -> Row:
    """The 13B models have the same model_type and ALiBi, which is told by their 40 layers and is not read."""
    c.only("bias", False)
    if layer_count(c) != 32 or c.count("num_attention_heads") != 32:
        raise AttncalcError(c.path("num_hidden_layers"), "is understood only as 32, the 7B model", got=layer_count(c))
    return _every_head(c)


def _chatglm(c: Config) -> Row:
    """multi_query_attention switches multi_query_group_num on; half of each head is rotated."""
    heads, width = c.count("num_attention_heads"), c.count("kv_channels")
    check(c, (("add_bias_linear", False), ("rmsnorm", True), ("post_layer_norm", True), ("original_rope", True)))
    check(c, (("apply_residual_connection_post_layernorm", False), ("prefix_projection", False), ("pre_seq_len", None)))
    c.ignore("apply_query_key_layer_scaling", "bias_dropout_fusion", "quantization_bit", "rope_ratio")
    kv = c.count("multi_query_group_num") if c.flag("multi_query_attention") else heads
    c.ignore("multi_query_group_num")
    bias = "qkv" if c.flag("add_qkv_bias") else ""
    attention = gqa(heads, kv, width, rope_dim=width // 2, bias=bias)
    layers = [Layer(attention, dense(c.count("ffn_hidden_size")), 2)] * layer_count(c)
    return document(c, layers)


def _hunyuan(c: Config) -> Row:
    """Experts beside one that every token passes, by layer; cross-layer sharing, MLA and pools are not understood."""
    total = layer_count(c)
    check(
        c,
        (
            ("use_cla", False),
            ("use_mla", False),
            ("use_mixed_mlp_moe", True),
            ("use_rotary_pos_emb", True),
            ("position_embedding_xdrope", False),
            ("moe_layer_num_skipped", 0),
            ("add_classification_head", False),
            ("norm_type", "rms"),
            ("mlp_bias", False),
            ("group_limited_greedy", False),
        ),
    )
    for name in ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        c.only(name, None)
    c.ignore("cla_share_factor", "class_num", "dense_list", "org_vocab_size", "pool_type", "pad_id", "mask_init_id")
    c.ignore("anyres_pooling_size", "anyres_vit_max_image_size", "anyres_vit_two_views", "im_end_id", "im_newline_id")
    c.ignore("im_start_id", "text_end_id", "text_start_id", "video_end_id", "video_start_id", "num_media_embeds")
    c.ignore("skip_cls_token", "vit_add_patchemb_bias", "vit_input_resolution", "vit_mapping_type", "vit_norm_type")
    c.ignore(
        "vit_patch", "vit_path", "vit_remove_prenorm", "vit_token", "vit_type", "vit_used_rms_norm", "xdrope_section"
    )
    heads, width = c.count("num_attention_heads"), c.count("attention_head_dim")
    norm, bias = ("head" if c.flag("use_qk_norm") else "none"), ("qkvo" if c.flag("attention_bias") else "")
    attention = gqa(heads, c.count("num_key_value_heads"), width, rope_dim=rotated(c, width), bias=bias, qk_norm=norm)
    sizes, top, shared = (_per_layer(c, n, total) for n in ("moe_intermediate_size", "moe_topk", "num_shared_expert"))
    number, inner = c.count("num_experts"), c.count("intermediate_size")
    layers = [
        Layer(attention, moe(number, k, size, shared_intermediate_size=inner * n), 2)
        for size, k, n in zip(sizes, top, shared, strict=True)
    ]
    return document(c, layers)


def _per_layer(c: Config, name: str, total: int) -> list[int]:
    """One number for all layers, or a list."""
    value = c.value(name)
    if isinstance(value, list):
        return [c.whole(f"{name}[{i}]", n) for i, n in enumerate(c.listed(name, total))]
    return [c.whole(name, value)] * total


def _nemotron_nas(c: Config) -> Row:
    """block_configs: the queries of a KV head and the factor of the feed-forward by layer, which may lack either."""
    total, heads, width, hidden = layer_count(c), c.count("num_attention_heads"), divided(c), c.count("hidden_size")
    check(c, (("mlp_bias", False), ("intermediate_size", None), ("num_key_value_heads", None)))
    bias = "qkvo" if c.flag("attention_bias") else ""
    rope = rotated(c, width)
    layers = []
    for i, item in enumerate(c.listed("block_configs", total)):
        block = Config(item, c.path(f"block_configs[{i}]"), log=c.log)
        a, f = block.inner("attention"), block.inner("ffn")
        check(a, (("replace_with_linear", False), ("num_sink_tokens", None), ("sparsify", None)))
        check(a, (("unshifted_sink", False), ("use_prefill_window_in_sink_attention", False), ("window_length", None)))
        check(f, (("replace_with_linear", False), ("sparsify", None)))
        attention = ffn = None
        if not a.flag("no_op"):
            group = a.count("n_heads_in_group", maximum=heads)
            if heads % group:
                raise AttncalcError(a.path("n_heads_in_group"), f"must divide num_attention_heads {heads}", got=group)
            attention = gqa(heads, heads // group, width, rope_dim=rope, bias=bias)
        if not f.flag("no_op"):
            ffn = dense(_width(f, hidden))
        a.ignore("n_heads_in_group")
        f.ignore("ffn_mult")
        for node in (a, f, block):
            node.finish()
        if attention is None and ffn is None:
            raise AttncalcError(block.where, "must have attention, a feed-forward or both")
        norms = (attention is not None) + (ffn is not None)
        layers.append(Layer(attention, ffn, norms, None if attention is None else "full"))
    return document(c, layers)


def _width(f: Config, hidden: int) -> int:
    """int(2 * ffn_mult * hidden / 3), up to the next multiple of 256."""
    factor = f.number("ffn_mult")
    if not 0 < factor <= 64:
        raise AttncalcError(f.path("ffn_mult"), "must be above 0 and at most 64", got=shown(factor))
    return -(-int(2 * factor * hidden / 3) // 256) * 256


_DECODER = {"tie_word_embeddings": False}

READERS = {
    "baichuan": _baichuan,
    "internlm": _every_head,
    "internlm2": Decoder(bias=flag("bias", "qkvo", "")),
    "minicpm": Decoder(bias=flag("attention_bias", "qkvo", "")),
    "chatglm": _chatglm,
    "hunyuan": _hunyuan,
    "nemotron-nas": _nemotron_nas,
}

FACTS = {
    "baichuan": Facts(_DECODER, architectures=("BaichuanForCausalLM",)),
    "internlm": Facts(_DECODER, architectures=("InternLMForCausalLM",)),
    "internlm2": Facts(_DECODER, architectures=("InternLM2ForCausalLM",)),
    "minicpm": Facts({"attention_bias": False}, architectures=("MiniCPMForCausalLM",)),
    "chatglm": Facts(
        _DECODER,
        names={
            "padded_vocab_size": ["vocab_size"],
            "num_layers": ["num_hidden_layers"],
            "seq_length": ["max_position_embeddings"],
        },
        architectures=("ChatGLMModel", "ChatGLMForConditionalGeneration"),
    ),
    "hunyuan": Facts(architectures=("HunYuanMoEV1ForCausalLM",)),
    "nemotron-nas": Facts(_DECODER, architectures=("DeciLMForCausalLM",)),
}
