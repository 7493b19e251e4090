"""The claims that a model's own layers can be put to, at their own dimensions."""

from collections.abc import Callable, Iterator, Sequence

from attncalc.attention.base import Attention
from attncalc.attention.dsa import DSA
from attncalc.attention.gdn import GDN
from attncalc.attention.gla import GLA
from attncalc.attention.gqa import GQA
from attncalc.attention.kda import KDA
from attncalc.attention.lightning import Lightning
from attncalc.attention.mla import MLA
from attncalc.attention.mla_split import MLASplit
from attncalc.attention.retnet import RetNet
from attncalc.attention.tpa import TPA
from attncalc.errors import AttncalcError
from attncalc.model import Model
from attncalc.reach import Reach
from attncalc.verify import identities
from attncalc.verify.proof import Proof

MAX_BYTES = 2**30
"""Weights of a layer in float64 above which some of its heads stand for all."""


def of_model(model: Model, names: Sequence[str]) -> Iterator[tuple[str, Proof]]:
    """The claims that a model's own layers can be put to, at their own dimensions."""
    seen = set[tuple[Attention, Reach]]()
    for group in model.groups:
        if group.attention is None or not hasattr(group.attention, "forms") or group.cache_from:
            continue
        key = (group.attention, group.reach)
        if key in seen:
            continue
        seen.add(key)
        spec, text = _fitting(group.attention)
        for claim, proofs in _claims_of(spec, group.reach, text).items():
            if not names or claim in names:
                for proof in proofs():
                    yield claim, proof


def _fitting(spec: Attention) -> tuple[Attention, str]:
    """The specification, or the heads of one of the fewest GPUs whose weights fit; and what that is, in words."""

    def size(part: Attention) -> int:
        return 8 * max(sum(w.elements for w in part.weights(form)) for form in part.forms)

    heads = spec.query_heads()
    for tp in range(1, heads + 1):
        try:
            part = spec.shard(tp)
        except AttncalcError:
            continue
        if size(part) <= MAX_BYTES:
            whole = f"{spec.variant} of {heads} heads"
            return part, whole if tp == 1 else f"{whole}, {part.query_heads()} of them"
    raise AttncalcError("verify", "one head of this layer does not fit into memory", got=f"{size(spec)} bytes")


def _claims_of(spec: Attention, reach: Reach, text: str) -> dict[str, Callable[[], Iterator[Proof]]]:
    def steps() -> Iterator[Proof]:
        for form in spec.forms:
            yield identities.stepwise(spec, reach, form, f"{text}, {form}" if len(spec.forms) > 1 else text)

    claims: dict[str, Callable[[], Iterator[Proof]]] = {"decode": steps}
    if isinstance(spec, DSA):
        claims["top-k"] = lambda: identities.all_selected(spec, text)
    if isinstance(spec, (MLA, MLASplit)):
        claims["absorb"] = lambda: identities.forms_agree(text, spec, ("absorbed", "decompressed"))
        claims["merge"] = lambda: identities.forms_agree(text, spec, ("merged",))
    elif isinstance(spec, (GLA, TPA)):
        claims["forms"] = lambda: identities.same_weights(text, spec)
    elif isinstance(spec, (KDA, GDN, Lightning, RetNet)):
        claims["kda"] = lambda: identities.chunked(spec, text)
    elif isinstance(spec, GQA) and spec == GQA(
        spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim, spec.rope_dim
    ):
        claims["gqa-as-mla"] = lambda: identities.as_mla(spec, text)
    return claims
