"""The profile of vLLM against vLLM's own arithmetic, where the package can be imported: `PYTHONPATH` may name it unpacked."""

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="the package vllm is not there")
def test_the_profile_is_vllms_own_arithmetic() -> None:
    """Bytes of a block, blocks of a sequence and layers of each group, for models, splits, lengths and settings."""
    cases, names = list[dict[str, Any]](), list[str]()
    expected = list[tuple[int | None, int | None]]()
    for name in MODELS:
        model = attncalc.load(name)
        for tp in (1, 2, 8):
            for length in (1, 100, 5000, 131_072):
                for settings in SETTINGS:
                    kv = "fp8_ds_mla" if name in RECORDS else "bf16"
                    formats, options = Formats(kv=kv), EngineOptions(**settings)
                    try:
                        made = model.cache(length, tp=tp, engine="vllm", formats=formats, options=options)
                        (pool,) = made.pools
                        expected.append((pool.block_bytes, pool.blocks(length)))
                    except AttncalcError as error:
                        if error.where in ("--tp", "--dcp"):
                            continue
                        assert error.where == "--no-hybrid-manager"  # noqa: PT017
                        expected.append((None, None))
                    cases.append(case(model, tp, length, formats, settings))
                    names.append(f"{name} tp {tp} {length} {settings}")
    assert len(cases) > 1000
    ran = subprocess.run(
        [sys.executable, str(SCRIPT)], input=json.dumps(cases), capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = [(r.get("block_bytes"), r.get("blocks")) for r in json.loads(ran.stdout)]
    wrong = [(n, e, f) for n, e, f in zip(names, expected, found, strict=True) if e != f]
    assert not wrong, (len(wrong), wrong[:10])
