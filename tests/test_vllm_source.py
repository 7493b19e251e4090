"""The profile of vLLM against vLLM's own arithmetic: a record of it, and the package itself where it can be imported.

`PYTHONPATH` may name it unpacked.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import attncalc
from attncalc import AttncalcError
from attncalc.attention.csa import CSA
from attncalc.attention.dsa import DSA
from attncalc.attention.gdn import GDN
from attncalc.attention.gqa import GQA
from attncalc.attention.kda import KDA
from attncalc.attention.mamba2 import Mamba2
from attncalc.attention.mla import MLA
from attncalc.dtypes import Formats
from attncalc.engines import engine
from attncalc.engines.options import EngineOptions
from attncalc.model import LayerGroup, Model

SCRIPT = Path(__file__).parent / "vllm_source.py"
GOLDEN = Path(__file__).parent / "golden" / "vllm_pool.json"
MODELS = (
    *("llama-3.1-70b", "qwen3-235b-a22b", "gpt-oss-20b", "gpt-oss-120b", "gemma-3-27b", "gemma-4-31b", "gemma-2-27b"),
    *("llama-4-scout", "mimo-v2-flash", "command-r7b", "deepseek-v3", "deepseek-v3.2", "glm-5.2", "mistral-7b-v0.1"),
    *("kimi-linear-48b-a3b", "kimi-k3", "qwen3-next-80b-a3b", "qwen3.5-27b", "qwen3.5-35b-a3b", "nemotron-h-8b"),
    *("nemotron-3-nano-30b-a3b", "falcon-h1-7b", "deepseek-v4-pro", "deepseek-v4-flash"),
)
RECORDS = ("deepseek-v4-pro", "glm-5.2")
"""Of these, records with scales."""
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"max_batched_tokens": 8192},
    {"no_hybrid_manager": True},
    {"prefix_caching": True, "draft_tokens": 3},
    {"block_size": 256},
    {"dcp": 2},
)


def caches(group: LayerGroup, tp: int, formats: Formats, state: str) -> Iterator[dict[str, Any]]:
    """The caches of one layer, from its dimensions alone: heads of a GPU as vLLM counts them."""
    a = group.attention
    kind, size = {"window": "sliding", "chunk": "chunk"}.get(group.reach.kind, "full"), group.reach.size
    if isinstance(a, CSA):
        record = formats.kv == "fp8_ds_mla"
        align = 576 if record else 512
        row: dict[str, Any] = {"content": 584, "dtype": "bytes"} if record else {"dtype": "bf16"}
        m, coff = a.compress_ratio, 2 if a.compress_ratio == 4 else 1
        yield {"kind": "mla_sliding", "block": 64, "k": 512, "size": size, "alignment": align} | row
        if m:
            block = {4: 4, 128: 8}[m]
            held: dict[str, Any] = {"kind": "mla_sliding", "block": block, "size": coff * m, "alignment": align}
            yield {"kind": "mla", "k": 512, "alignment": align, "every": m} | row
            yield held | {"k": 2 * coff * 512, "dtype": "fp32"}
        if a.sparse:
            yield {"kind": "mla", "k": 132, "alignment": align, "every": m, "dtype": "bytes"}
            yield held | {"k": 2 * coff * 128, "dtype": "fp32"}
    elif isinstance(a, MLA):
        packed = {"content": 656} if formats.kv == "fp8_ds_mla" else {}
        yield {"kind": "mla", "k": a.kv_lora_rank + a.qk_rope_head_dim, "dtype": "bf16"} | packed
        if isinstance(a, DSA) and a.own_indexer:
            yield {"kind": "mla", "k": a.index_head_dim * 33 // 32, "dtype": "bytes", "index": True}
    elif isinstance(a, GQA):
        if a.own_kv:
            heads = max(1, a.num_kv_heads // tp)
            yield {"kind": kind, "heads": heads, "k": a.head_dim, "v": a.v_head_dim, "size": size, "dtype": "bf16"}
    elif isinstance(a, KDA):
        sizes = {"num_heads": a.num_heads, "head_dim": a.head_k_dim, "conv_kernel_size": a.conv_kernel}
        yield {"kind": "state", "family": "kda", "sizes": sizes, "dtype": state}
    elif isinstance(a, GDN):
        sizes = {"num_k_heads": a.num_heads, "num_v_heads": a.num_v_heads, "conv_kernel_size": a.conv_kernel}
        sizes |= {"head_k_dim": a.head_k_dim, "head_v_dim": a.head_v_dim}
        yield {"kind": "state", "family": "gdn", "sizes": sizes, "dtype": state}
    elif isinstance(a, Mamba2):
        sizes = {"intermediate_size": a.num_heads * a.head_dim, "n_groups": a.n_groups, "num_heads": a.num_heads}
        sizes |= {"head_dim": a.head_dim, "state_size": a.state_size, "conv_kernel": a.conv_kernel}
        yield {"kind": "state", "family": "mamba2", "sizes": sizes, "dtype": state}


def case(model: Model, tp: int, length: int, formats: Formats, settings: dict[str, Any]) -> dict[str, Any]:
    variants = {g.variant for g in model.groups}
    v4 = bool(variants & {"csa", "hca", "tied-mqa"})
    state = engine("vllm").formats(model, formats).state or "fp32"
    by_layer = sorted((i, place) for place, g in enumerate(model.groups) for i in g.indices)
    return {
        "layers": [c for _, place in by_layer for c in caches(model.groups[place], tp, formats, state)],
        "tp": tp,
        "length": length,
        "dcp": settings.get("dcp", 1),
        "block": settings.get("block_size") or (256 if v4 else 64 if "dsa" in variants else 16),
        "in_flight": settings.get("max_batched_tokens", 2048),
        "hybrid": not settings.get("no_hybrid_manager", False),
        "caching": settings.get("prefix_caching", False),
        "drafts": settings.get("draft_tokens", 0),
        "packed": v4,
        "cache_dtype": "auto" if formats.kv == "bf16" else formats.kv,
    }


class Geometry(NamedTuple):
    """What is asked, as vLLM's script reads it, and what the profile says: bytes of a block, blocks of a sequence."""

    name: str
    case: dict[str, Any]
    block_bytes: int | None
    blocks: int | None


def geometries() -> Iterator[Geometry]:
    """Models, splits, lengths and settings; a split that the profile refuses is left out."""
    for name in MODELS:
        model = attncalc.load(name)
        formats = Formats(kv="fp8_ds_mla" if name in RECORDS else "bf16")
        for tp, length, (at, settings) in product((1, 2, 8), (1, 100, 5000, 131_072), enumerate(SETTINGS)):
            options, block_bytes, blocks = EngineOptions(**settings), None, None
            try:
                made = model.cache(length, tp=tp, engine="vllm", formats=formats, options=options)
                (pool,) = made.pools
                block_bytes, blocks = pool.block_bytes, pool.blocks(length)
            except AttncalcError as error:
                if error.where in ("--tp", "--dcp"):
                    continue
                assert error.where == "--no-hybrid-manager"  # noqa: PT017
            asked = case(model, tp, length, formats, settings)
            yield Geometry(f"{name} tp {tp} length {length} settings {at}", asked, block_bytes, blocks)


def run_vllm(asked: list[Geometry]) -> dict[str, list[int | None]]:
    """What vLLM's own planning makes of them."""
    cases = json.dumps([g.case for g in asked])
    ran = subprocess.run([sys.executable, str(SCRIPT)], input=cases, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    made = json.loads(ran.stdout)
    return {g.name: [r.get("block_bytes"), r.get("blocks")] for g, r in zip(asked, made, strict=True)}


def test_the_profile_is_what_vllm_made_of_each_geometry() -> None:
    """Recorded once from vLLM 0.33's own planning; null where it refuses."""
    recorded = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert recorded["vllm"].startswith("0.33.")
    assert len(recorded["geometries"]) > 1000
    found = {g.name: [g.block_bytes, g.blocks] for g in geometries()}
    expected = recorded["geometries"]
    assert found.keys() == expected.keys()
    assert [(n, found[n], expected[n]) for n in found if found[n] != expected[n]][:10] == []


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="the package vllm is not there")
def test_the_record_is_vllms_own_arithmetic() -> None:
    assert run_vllm(list(geometries())) == json.loads(GOLDEN.read_text(encoding="utf-8"))["geometries"]


def record(version: str) -> None:
    """Write the record anew: `python -m tests.test_vllm_source VERSION`, with the package vllm of that version."""
    rows = [f"{json.dumps(name)}: {json.dumps(made)}" for name, made in run_vllm(list(geometries())).items()]
    settings = json.dumps([dict(s) for s in SETTINGS])
    text = f'{{"vllm": {json.dumps(version)}, "settings": {settings}, "geometries": {{\n'
    GOLDEN.write_text(text + ",\n".join(rows) + "\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    record(sys.argv[1])
