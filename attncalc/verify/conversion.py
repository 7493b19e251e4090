"""The exact MLA of a GQA, put to the test on random weights in float64."""

from dataclasses import replace

import torch

from attncalc.attention import convert_torch, gqa_torch
from attncalc.attention.base import Attention
from attncalc.attention.convert import mla_spec_of
from attncalc.attention.gqa import GQA
from attncalc.attention.torch_base import Cache
from attncalc.errors import AttncalcError
from attncalc.reach import FULL
from attncalc.verify.proof import Proof, figure, same

SOURCE = "arXiv 2502.07864 (TransMLA) section 4"
TOKENS = 12
HIDDEN = 64
"""The construction touches rows of the projections alone, so that a small hidden size proves any."""
MAX_BYTES = 2**28
"""Weights of the MLA in float64 above which fewer groups of the same size stand for all."""


def proven_on(spec: GQA) -> GQA:
    """The heads and widths of `spec` on a small hidden size, and as many of its groups as fit into memory.

    Raises:
        AttncalcError: two groups of these widths do not fit.
    """
    per_group = spec.num_heads // spec.num_kv_heads
    for groups in range(spec.num_kv_heads, 0, -1):
        if spec.num_kv_heads % groups:
            continue
        made = replace(
            spec, hidden_size=min(HIDDEN, spec.hidden_size), num_heads=groups * per_group, num_kv_heads=groups
        )
        size = 8 * sum(w.elements for w in mla_spec_of(made).weights("absorbed"))
        if size <= MAX_BYTES and (groups > 1 or spec.num_kv_heads == 1):
            return made
    raise AttncalcError("convert", f"the proof would need more than {MAX_BYTES >> 20} MiB", got=f"{size >> 20} MiB")


def prove(spec: GQA, seed: int) -> tuple[GQA, list[Proof]]:
    """What was run, and its proofs: one prompt, the same in steps, and what the two caches hold."""
    spec = proven_on(spec)
    torch.manual_seed(seed)
    with torch.no_grad():
        layer = gqa_torch.Layer(spec, path="reference", dtype=torch.float64)
        made = convert_torch.mla_of(layer)
        x = torch.randn(2, TOKENS, spec.hidden_size, dtype=torch.float64)
        expected, caches = layer(x), (Cache(), Cache())
        layer(x, caches[0])
        parts = torch.split(x, [5, *[1] * (TOKENS - 5)], dim=1)
        steps = torch.cat([made(part, caches[1]) for part in parts], dim=1)
        proofs = [
            same("output of a prompt", SOURCE, expected, made(x)),
            same("output of a prompt and single tokens", SOURCE, expected, steps),
        ]
    specs: tuple[Attention, ...] = (spec, mla_spec_of(spec))
    for name, cache, its in zip(("GQA", "MLA"), caches, specs, strict=True):
        held = cache.storage_bytes // (8 * 2 * TOKENS)
        kept = sum(t.elements_per_token for t in its.cache(FULL, its.forms[0]))
        proofs.append(figure(f"elements per token in the cache of the {name}", "the specification", kept, held))
    return spec, proofs
