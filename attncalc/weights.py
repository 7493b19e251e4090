"""Bytes of a model's weights in memory, on one GPU: split, repeated, or whole, as engines hold them.

Attention, experts and feed-forward layers split themselves (`shard`); embedding and head are split by vocabulary;
norms, routers and what a variant does not split lie whole on every GPU. Source: vLLM 0.33 `model_executor/layers`
(VocabParallelEmbedding, ColumnParallelLinear, ReplicatedLinear).
"""

from collections.abc import Sequence
from math import prod

from attncalc.axes import Weight
from attncalc.dtypes import Formats, whole_bytes
from attncalc.model import ExtraWeight, LayerGroup, Model


def matrix_bytes(shape: tuple[int, ...], formats: Formats, kind: str = "weight") -> int:
    """Bytes of a weight whose rows are the last axis; `kind` is weight or vector."""
    *lead, last = shape
    return whole_bytes(prod(lead) * formats.row(kind, last), "weights")


def norm_bytes(model: Model, norms: int, formats: Formats) -> int:
    """Bytes of so many norms over the hidden size."""
    vectors = model.norm_elements(norms) // model.hidden_size
    return matrix_bytes((vectors, model.hidden_size), formats, "vector")


def group_bytes(
    model: Model, group: LayerGroup, formats: Formats, *, form: str | None = None, attention_tp: int = 1, tp: int = 1
) -> int:
    """Bytes of the weights of a group's layers on one of `tp` GPUs, buffers included.

    `attention_tp`: GPUs that share the heads, fewer than `tp` where replicas of the attention lie within it.
    """
    weights: list[Weight] = []
    if group.attention:
        attention = group.attention.shard(attention_tp)
        weights += attention.weights(form if form in attention.forms else attention.forms[0])
    if group.ffn:
        weights += group.ffn.shard(tp).weights()
    one = sum(matrix_bytes(w.sizes, formats, w.kind) for w in weights)
    return group.weight_copies * (one + norm_bytes(model, group.norms, formats))


def table_bytes(model: Model, formats: Formats, tp: int) -> int:
    """Bytes of the embedding (or of the head) on one of `tp` GPUs: ceil(V / tp) rows."""
    return matrix_bytes((-(-(model.vocab_size or 0) // tp), model.hidden_size), formats)


def extra_bytes(extras: Sequence[ExtraWeight], formats: Formats, tp: int) -> int:
    """Bytes of named extra weights; those of the head and the embedding are split by vocabulary."""
    out = 0
    for w in extras:
        shape = (-(-w.shape[0] // tp), *w.shape[1:]) if w.place in ("head", "embedding") else w.shape
        out += w.copies * matrix_bytes(shape, formats, "weight" if len(shape) > 1 else "vector")
    return out


def bytes_on_gpu(
    model: Model,
    groups: Sequence[LayerGroup],
    formats: Formats,
    *,
    form: str | None = None,
    tp: int = 1,
    attention_tp: int | None = None,
    first: bool = True,
    last: bool = True,
    mtp: bool = False,
) -> int:
    """Bytes of the weights of `groups` and of what lies beside them, on one of `tp` GPUs of a pipeline stage.

    The `first` stage holds the embedding, the `last` the head (a copy of the table where they are tied), the final norm
    and what MTP adds. Extra weights of layers count where the stage is both.

    Raises:
        AttncalcError: the heads cannot be split so, or the format does not fit a weight.
    """
    heads = tp if attention_tp is None else attention_tp
    out = sum(group_bytes(model, g, formats, form=form, attention_tp=heads, tp=tp) for g in groups)
    if model.vocab_size is not None:
        tables = int(first) + int(last and not (first and model.tie_word_embeddings))
        out += tables * table_bytes(model, formats, tp)
    if last:
        out += norm_bytes(model, int(model.final_norm), formats)
    places = {"embedding": first, "head": last, "attention": first and last, "ffn": first and last}
    extras = [w for w in model.extra_weights if places[w.place]]
    if mtp and last and model.mtp:
        extras += model.mtp.extra_weights
    return out + extra_bytes(extras, formats, tp)
