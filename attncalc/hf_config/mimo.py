"""MiMo. Sources: transformers 5.24 `models/mimo_v2_flash`; XiaomiMiMo `configuration_mimo.py` and the flash model's."""

from attncalc.errors import AttncalcError
from attncalc.hf_config.config import Config, Facts
from attncalc.hf_config.decoder import FULL, SLIDING, Decoder, check, check_groups, layer_count, moe_layers
from attncalc.hf_config.layers import Layer, Row, document, gqa, moe, window
from attncalc.hf_config.qwen import switched_windows
from attncalc.hf_config.rope import rotated

PART = 0.334
"""The rotated part of a head where rope_parameters does not say it."""


def _flash(c: Config) -> Row:
    """Sliding layers have twice the KV heads, and sinks; the first layer is dense.

    transformers derives layers and heads; the model's own code reads hybrid_layer_pattern, moe_layer_freq and swa_*.
    """
    total = layer_count(c)
    kinds = _by_list(c, total, "layer_types", "hybrid_layer_pattern", (FULL, SLIDING), _sixth(total))
    mlp = _by_list(c, total, "mlp_layer_types", "moe_layer_freq", ("dense", "sparse"), [0] + [1] * (total - 1))
    heads, kv = c.count("num_attention_heads"), c.count("num_key_value_heads")
    width, values = c.count("head_dim"), c.count("v_head_dim")
    expected = (
        ("swa_num_attention_heads", heads),
        ("swa_num_key_value_heads", 2 * kv),
        ("swa_head_dim", width),
        ("swa_v_head_dim", values),
        ("add_swa_attention_sink_bias", True),
        ("add_full_attention_sink_bias", False),
        ("n_shared_experts", (None, 0)),
    )
    check(c, expected)
    size = _window(c)
    c.ignore("attention_value_scale", "attention_chunk_size")
    bias = "qkv" if c.flag("attention_bias") else ""

    def attention(kind: str) -> Row:
        slides = kind == SLIDING
        rope = rotated(c, width, kind, part=PART, nesting="alone")
        if not c.null("partial_rotary_factor") and int(width * c.number("partial_rotary_factor")) != rope:
            rule = f"must rotate {rope} values: the code of transformers does not read it, the model's own does"
            raise AttncalcError(c.path("partial_rotary_factor"), rule, got=c.number("partial_rotary_factor"))
        number = 2 * kv if slides else kv
        return gqa(heads, number, width, v_head_dim=values, rope_dim=rope, bias=bias, sinks=slides)

    made = {kind: attention(kind) for kind in dict.fromkeys(kinds)}
    sizes = c.count("n_routed_experts"), c.count("num_experts_per_tok"), c.count("moe_intermediate_size")
    check_groups(c, sizes[0])
    experts = moe(*sizes, router_correction="buffer")
    ffns = moe_layers(c, total, lambda i: mlp[i] == "sparse", experts)
    layers = [
        Layer(made[kind], ffn, 2, window(size if kind == SLIDING else None))
        for kind, ffn in zip(kinds, ffns, strict=True)
    ]
    return document(c, layers)


def _window(c: Config) -> int:
    """The current token included, as the model's own code counts; the class of transformers defaults to one more."""
    if c.null("sliding_window_size"):
        if c.has("sliding_window"):
            rule = "must be given: sliding_window alone has one token less in the code of transformers than in its own"
            raise AttncalcError(c.path("sliding_window_size"), rule)
        return c.count("sliding_window", absent=128)
    size = c.count("sliding_window_size")
    if c.has("sliding_window"):
        c.only("sliding_window", size, size + 1)  # as published, and as transformers saves it
    return size


def _sixth(total: int) -> list[int]:
    return [int(i != 0 and (i + 1) % 6 != 0) for i in range(total)]


def _by_list(c: Config, total: int, words: str, numbers: str, known: tuple[str, str], derived: list[int]) -> list[str]:
    """The words of a list, which transformers reads, or derives; the older list of 0 and 1 must say the same."""
    kinds = [known[n] for n in derived] if c.null(words) else c.words(words, total, known)
    if c.has(numbers):
        given = c.listed(numbers, total)
        for i, n in enumerate(given):
            if known[c.whole(f"{numbers}[{i}]", n, 0, 1)] != kinds[i]:
                rule = f"must say {kinds[i]}, as transformers has it by {words} or derives it"
                raise AttncalcError(c.path(f"{numbers}[{i}]"), rule, got=n)
    return kinds


READERS = {
    "mimo": Decoder(
        bias="qkv",
        windows=switched_windows,
        expected=(("attention_bias", True),),
        ignored=("num_nextn_predict_layers",),
    ),
    "mimo_v2_flash": _flash,
}

FACTS = {
    "mimo": Facts(
        defaults={"layer_types": None}, nullable=frozenset({"layer_types"}), architectures=("MiMoForCausalLM",)
    )
}
