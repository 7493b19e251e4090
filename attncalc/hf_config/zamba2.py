"""Zamba2: Mamba-2 in every layer, before some of it a block of attention and feed-forward that several layers share.

The block reads the hidden state beside the embedding; each layer has its own low-rank addition to the shared matrices,
and a linear layer after the block. Source: transformers 5.24 `models/zamba2`.
"""

from attncalc.errors import AttncalcError
from attncalc.hf_config.config import Config
from attncalc.hf_config.decoder import check, kv_heads, layer_count
from attncalc.hf_config.layers import Layer, Row, dense, document, gqa, indices_text, weight
from attncalc.hf_config.rope import rotated

LINEAR, HYBRID = "linear_attention", "hybrid"
LEGACY = {"mamba": LINEAR}
SEVEN = [LINEAR] + ([LINEAR] * 5 + [HYBRID]) * 7 + [LINEAR] * 4 + [HYBRID] + [LINEAR] * 3 + [HYBRID] + [LINEAR] * 2
"""The layers where the configuration names none, of which there are 54 whatever it says."""


def _zamba2(c: Config) -> Row:
    total, hidden = layer_count(c), c.count("hidden_size")
    given = c.words("layers_block_type", total, (LINEAR, HYBRID, *LEGACY), absent=SEVEN, null=SEVEN)
    shared = [i for i, kind in enumerate(given) if kind == HYBRID]
    if not shared:
        raise AttncalcError(c.path("layers_block_type"), "must give at least one layer attention: the code fails")
    bias = c.flag("add_bias_linear")
    inner = c.count("intermediate_size", minimum=0, null=0) or 4 * hidden
    attention = _attention(c, hidden)
    check(c, (("hybrid_layer_ids", shared), ("ffn_hidden_size", inner), ("gated_linear_unit", True)))
    c.ignore("use_mem_eff_path", "num_logits_to_keep", "time_step_min", "time_step_max", "time_step_floor")
    c.ignore("use_conv_bias")  # its convolution has one
    extra = _own(c, shared, total, hidden, inner)
    made = document(c, [Layer(_mamba2(c, hidden, bias=bias), None, 1)] * total, extra_weights=extra)
    if c.flag("use_long_context"):
        made["max_position_embeddings"] = 16384
    made["layers"].append(
        {
            "indices": indices_text(shared, total),
            "joined": {"weight_copies": min(c.count("num_mem_blocks"), len(shared))},
            "reach": "full",
            "cache_from": None,
            "attention": attention,
            "ffn": dense(inner, bias=bias),
            "norms": 3,  # one over both inputs, which is twice as wide
        }
    )
    return made


def _attention(c: Config, hidden: int) -> Row:
    """Heads that split both inputs."""
    heads = c.count("num_attention_heads")
    if 2 * hidden % heads:
        raise AttncalcError(c.path("num_attention_heads"), f"must divide 2 * hidden_size {2 * hidden}", got=heads)
    width = 2 * hidden // heads
    check(c, (("attention_head_dim", width), ("attention_hidden_size", 2 * hidden)))
    check(c, (("kv_channels", hidden // heads), ("num_query_groups", heads)))
    turned = rotated(c, width) if c.flag("use_mem_rope") else 0
    c.ignore("rope_parameters", "rope_scaling")
    return gqa(heads, kv_heads(c), width, rope_dim=turned) | {"variant": "gqa-concat", "input_size": 2 * hidden}


def _mamba2(c: Config, hidden: int, *, bias: bool) -> Row:
    inner, heads = c.count("mamba_expand", maximum=64) * hidden, c.count("n_mamba_heads")
    if inner % heads:
        raise AttncalcError(c.path("n_mamba_heads"), f"must divide mamba_expand * hidden_size {inner}", got=heads)
    check(c, (("mamba_headdim", inner // heads),))
    return {
        "variant": "mamba2",
        "num_heads": heads,
        "head_dim": inner // heads,
        "n_groups": c.count("mamba_ngroups"),
        "state_size": c.count("mamba_d_state"),
        "conv_kernel": c.count("mamba_d_conv", minimum=2),
        "conv_bias": True,
        "bias": bias,
        "chunk_size": c.count("chunk_size"),
        "gated_norm": True,
    }


def _own(c: Config, shared: list[int], total: int, hidden: int, inner: int) -> list[Row]:
    """What each layer adds to the block that it shares: low-rank parts of its matrices, and a linear layer after it."""
    rank = c.count("adapter_rank")
    pairs = {"gate_up_proj_adapter": (hidden, 2 * inner, "ffn")}
    if c.flag("use_shared_attention_adapter"):
        pairs |= {f"linear_{x}_adapter": (2 * hidden, 2 * hidden, "attention") for x in "qkv"}
    out = [weight("linear", (hidden, hidden), shared, total, operation="linear")]
    for name, (read, made, place) in pairs.items():
        out.append(weight(f"{name}.0", (rank, read), shared, total, operation="linear", place=place))
        out.append(weight(f"{name}.1", (made, rank), shared, total, operation="linear", place=place))
    return out


READERS = {"zamba2": _zamba2}
