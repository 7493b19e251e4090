"""The specification of the exact MLA of a GQA; the layer and the construction are in `convert_torch`. No torch."""

from attncalc.attention.gqa import GQA
from attncalc.attention.mla import MLA
from attncalc.errors import AttncalcError


def plain(spec: GQA) -> GQA:
    """The same heads without biases, norms, gate, sinks and the like."""
    return GQA(spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim, spec.rope_dim)


def mla_spec_of(spec: GQA) -> MLA:
    """L = G*(d - p + e), R = G*p, P = d - p, V = e; no query latent, no latent norm.

    Raises:
        AttncalcError: the GQA has more than its four projections.
    """
    if spec != plain(spec):
        raise AttncalcError("convert", "only a plain GQA, without biases, norms, gate or sinks, has this MLA")
    G, d, e, p = spec.num_kv_heads, spec.head_dim, spec.v_head_dim, spec.rope_dim
    return MLA(
        spec.hidden_size,
        spec.num_heads,
        None,
        G * (d - p + e),
        d - p,
        G * p,
        e,
        rotated=p > 0,
        latent_norm=False,
    )
