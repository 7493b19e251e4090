"""Configurations of reference implementations, which have no model_type and are known by their fields.

Sources: deepseek-ai/DeepSeek-V3 and V3.2-Exp `inference/model.py`; mistralai/mistral-inference `args.py`.
"""

from attncalc.hf_config.config import MAX_POSITIONS, Config, Facts
from attncalc.hf_config.layers import Layer, Row, dense, document, gqa, moe, window


def _deepseek(c: Config) -> Row:
    """The first n_dense_layers are dense; index_* fields make it V3.2. Positions are not stated."""
    total = c.count("n_layers", maximum=10_000)
    rank = c.count("q_lora_rank", minimum=0) or None
    attention = {
        "variant": "mla",
        "num_heads": c.count("n_heads"),
        "q_lora_rank": rank,
        "kv_lora_rank": c.count("kv_lora_rank"),
        "qk_nope_head_dim": c.count("qk_nope_head_dim"),
        "qk_rope_head_dim": c.count("qk_rope_head_dim"),
        "v_head_dim": c.count("v_head_dim"),
        "rotated": True,
        "gate": "none",
        "bias": False,
        "latent_norm": True,
    }
    kind = "deepseek_v3"
    if c.has("index_topk"):
        index = {name: c.count(name) for name in ("index_n_heads", "index_head_dim", "index_topk")}
        attention = attention | {"variant": "dsa"} | index | {"own_indexer": True}
        kind = "deepseek_v32"
    hidden, size = c.count("dim"), c.count("moe_inter_dim")
    correction = "buffer" if hidden == _CORRECTED else "none"
    experts = moe(
        c.count("n_routed_experts"),
        c.count("n_activated_experts"),
        size,
        shared_intermediate_size=size * c.count("n_shared_experts", minimum=0),
        router_correction=correction,
    )
    first = c.count("n_dense_layers", minimum=0, maximum=total)
    plain = dense(c.count("inter_dim"))
    layers = [Layer(attention, plain if i < first else experts, 2) for i in range(total)]
    c.ignore("n_expert_groups", "n_limited_groups", "scale_fmt", "mscale", "rope_factor", "beta_fast", "beta_slow")
    c.ignore("original_seq_len", "max_batch_size", "max_seq_len")
    rest: Row = {"max_position_embeddings": None, "hidden_size": hidden, "tie_word_embeddings": False}
    return {"model_type": kind} | document(c, layers, **rest)


_CORRECTED = 7168
"""The hidden size at which that code gives its router a bias that picks experts."""


def _mistral(c: Config) -> Row:
    """`params.json`: sliding_window null or absent for none, experts in `moe`, latent attention not understood."""
    total = c.count("n_layers", maximum=10_000)
    heads, kv, width = c.count("n_heads"), c.count("n_kv_heads"), c.count("head_dim")
    size = c.maybe("sliding_window", absent=None)
    inner = c.count("hidden_dim")
    ffn = dense(inner)
    if not c.null("moe"):
        m = c.inner("moe")
        ffn = moe(m.count("num_experts"), m.count("num_experts_per_tok"), inner)
        m.finish()
    for name in ("vision_encoder", "llama_4_scaling", "yarn"):
        c.ignore(name)
    c.only("causal", True)
    c.only("use_biases", False)
    positions = None
    for name in ("max_position_embeddings", "max_seq_len", "model_max_length"):
        if not c.null(name):
            positions = c.count(name, maximum=MAX_POSITIONS)
    c.ignore("max_batch_size")
    attention = gqa(heads, kv, width)
    layers = [Layer(attention, ffn, 2, window(size))] * total
    tie = c.flag("tied_embeddings", absent=False)
    rest: Row = {"max_position_embeddings": positions, "hidden_size": c.count("dim"), "tie_word_embeddings": tie}
    return {"model_type": "mistral" if c.null("moe") else "mixtral"} | document(c, layers, **rest)


READERS = {"deepseek-inference": _deepseek, "mistral-inference": _mistral}
FACTS = {"deepseek-inference": Facts(), "mistral-inference": Facts()}
