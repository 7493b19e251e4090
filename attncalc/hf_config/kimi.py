"""Kimi Linear and Kimi K3: Kimi delta attention beside latent attention without RoPE.

Sources: transformers 5.24 `models/kimi_linear`; moonshotai/Kimi-K3 config.json, whose own code is not public in full.
"""

from collections.abc import Callable

from attncalc.errors import AttncalcError
from attncalc.hf_config.composite import text_model
from attncalc.hf_config.config import Config, Facts
from attncalc.hf_config.decoder import check, check_groups, layer_count, moe_layers
from attncalc.hf_config.deepseek import mla
from attncalc.hf_config.layers import Layer, Row, document, moe


def _read(c: Config, *, k3: bool = False) -> Row:
    """Layers by linear_attn_config. Kimi K3 has gates of full rank and on the output, and experts over a latent."""
    total = layer_count(c)
    check(
        c,
        (
            ("mla_use_nope", True),
            ("moe_layer_freq", 1),
            ("num_nextn_predict_layers", 0),
            ("layer_types", None),
            ("tie_word_embeddings", False),  # its model class has two weights whatever this says
            ("mlp_layer_types", None),
        ),
    )
    c.ignore("activation_situ_beta", "activation_situ_linear_beta", "use_grouped_topk")
    linear = c.inner("linear_attn_config")
    full = _full_layers(linear, total)
    kda = _kda(linear, k3=k3)
    linear.finish()
    gated = k3 and c.flag("mla_use_output_gate")
    attention = mla(c, rotated=False, gate="full" if gated else "none")
    ffns = moe_layers(c, total, _sparse_from(c, total), _experts(c, k3=k3))
    layers = [Layer(attention if i in full else kda, ffn, 2) for i, ffn in enumerate(ffns)]
    return document(c, layers, partial=_partial(c, kda)) if k3 else document(c, layers)


def _sparse_from(c: Config, total: int) -> Callable[[int], bool]:
    first = c.count("first_k_dense_replace", minimum=0, maximum=total, absent=1)
    return lambda i: i >= first


def _full_layers(linear: Config, total: int) -> set[int]:
    """full_attn_layers and kda_layers count from 1 and name every layer once."""
    both = []
    for name in ("full_attn_layers", "kda_layers"):
        given = linear.listed(name)
        both.append([linear.whole(f"{name}[{i}]", n, 1, total) - 1 for i, n in enumerate(given)])
    if sorted(both[0] + both[1]) != list(range(total)):
        rule = f"and kda_layers must name each of the {total} layers once"
        raise AttncalcError(linear.path("full_attn_layers"), rule)
    return set(both[0])


def _kda(linear: Config, *, k3: bool) -> Row:
    heads, width = linear.count("num_heads"), linear.count("head_dim")
    full_rank = k3 and linear.flag("use_full_rank_gate")
    bounded = k3 and linear.number("gate_lower_bound")
    if bounded is not False and bounded >= 0:
        raise AttncalcError(linear.path("gate_lower_bound"), "must be below 0, a bound of log-decay", got=bounded)
    return {
        "variant": "kda",
        "num_heads": heads,
        "num_v_heads": heads,
        "head_k_dim": width,
        "head_v_dim": width,
        "conv_kernel": linear.count("short_conv_kernel_size", minimum=2),
        "decay": "low_rank",
        "decay_rank": width,
        "gate": "full" if full_rank else "low_rank",
        "gate_rank": None if full_rank else width,
        "gate_bias": False,
        "lower_bound": k3,
        "chunk_size": 64,
    }


def _experts(c: Config, *, k3: bool) -> Row:
    size = c.count("moe_intermediate_size")
    shared = size * c.count("n_shared_experts", minimum=0)
    options: Row = {"shared_intermediate_size": shared, "router_correction": "buffer"}
    if k3:
        options["latent_size"] = c.count("routed_expert_hidden_size")
    check_groups(c, c.count("num_experts"), ("num_expert_group", "topk_group"))
    return moe(c.count("num_experts"), c.count("num_experts_per_tok"), size, **options)


def _partial(c: Config, kda: Row) -> list[str]:
    """What Kimi K3 has and its configuration does not size."""
    blocks = c.count("attn_res_block_size")
    out = [f"weights of the attention residuals (attn_res_block_size {blocks})"]
    if c.flag("latent_moe_use_norm"):
        out.append("norm over the latent of the experts (latent_moe_use_norm)")
    rank, heads = kda["decay_rank"], kda["num_heads"]
    out.append(f"rank of the KDA decay, which config.json leaves out and is counted as head_dim {rank}, Kimi Linear's")
    out.append(f"A_log, whose published tensor has 128 values, is counted with one for each of {heads} heads")
    return out


def _k3(c: Config) -> Row:
    """As Kimi Linear, and every field required: the defaults of its own code are not known."""
    return {"model_type": "kimi_linear"} | _read(c, k3=True)


READERS = {
    "kimi_linear": _read,
    "kimi_k3_text": _k3,
    "kimi_k3": text_model("kimi_linear", ignored=("image_placeholder",), reads_as="kimi_k3_text"),
}
OWN_ACTIVATIONS = {"kimi_k3": ("situ",), "kimi_k3_text": ("situ",)}
FACTS = {
    "kimi_k3_text": Facts(
        names={"num_shared_experts": ["n_shared_experts"], "num_experts_per_token": ["num_experts_per_tok"]},
        architectures=("KimiLinearForCausalLM",),
    ),
    "kimi_k3": Facts(architectures=("KimiK3ForConditionalGeneration",)),
}
