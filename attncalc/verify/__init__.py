"""The claims that the estimates rest on, each proven in front of the user.

`figures` are arithmetic on the specifications; `identities` run real layers in float64. A claim is a function that
yields proofs; the registry names it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from attncalc.errors import AttncalcError, shown, suggestion
from attncalc.model import Model
from attncalc.verify import constructions, figures, identities
from attncalc.verify import models as models_claims
from attncalc.verify.proof import Proof

CLAIMS: dict[str, Callable[[], Iterator[Proof]]] = {
    "figures": figures.figures,
    "shapes": figures.shapes,
    "intensity": figures.intensity,
    "absorb": identities.absorb,
    "latent-first": constructions.latent_first,
    "merge": identities.merge,
    "forms": identities.forms,
    "rope": identities.rope,
    "toy": constructions.toy,
    "groups": identities.groups,
    "gqa-as-mla": identities.gqa_as_mla,
    "gva": identities.gva,
    "kda": identities.kda,
    "decode": identities.decode,
    "top-k": identities.top_k,
    "bias": identities.bias,
    "errors": constructions.errors,
}


def run(names: Sequence[str], models: Sequence[Model], seed: int) -> list[dict[str, Any]]:
    """Rows of the named claims, of all, or of those that a model's own dimensions can be put to.

    Raises:
        AttncalcError: no claim has that name, or it does not apply to a model.
    """
    import torch

    for name in names:
        if name not in CLAIMS:
            hint = suggestion(name, CLAIMS, f"Known: {', '.join(CLAIMS)}")
            raise AttncalcError("verify", "no such claim", got=shown(name), hint=hint)
    rows = []
    with torch.no_grad():
        if models:
            for model in models:
                torch.manual_seed(seed)
                for claim, proof in models_claims.of_model(model, names):
                    rows.append({"model": model.id} | proof.row(claim))
        else:
            for name in names or CLAIMS:
                torch.manual_seed(seed)
                rows += [proof.row(name) for proof in CLAIMS[name]()]
    if not rows:
        named = ", ".join(names)
        raise AttncalcError("verify", "these claims are about other layers than the model's", got=named)
    return rows
