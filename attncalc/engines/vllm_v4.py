"""The caches that vLLM 0.33 keeps for DeepSeek-V4: five kinds of pages in one pool.

Sources: vLLM 0.33 `models/deepseek_v4/attention.py` (entries and index keys), `models/deepseek_v4/compressor.py`
(CompressorStateCache), `v1/attention/backends/mla/sparse_swa.py` (DeepseekV4SWACache).
"""

from typing import cast

from attncalc.attention.csa import CSA
from attncalc.axes import Dim
from attncalc.cache import CacheTensor
from attncalc.dtypes import Formats, whole_bytes
from attncalc.engines.blocks import Spec, pad
from attncalc.engines.paged import Kept
from attncalc.model import LayerGroup
from attncalc.reach import FULL

WINDOW_BLOCK = 64
STATE_BLOCKS = {4: 4, 128: 8}
"""Tokens of a block of the compressor's state, by the ratio."""
RECORD_ALIGNMENT, ROW_ALIGNMENT = 576, 512
"""Bytes that pages are rounded up to: of fp8_ds_mla records, and of plain rows."""


def caches(
    place: int, group: LayerGroup, layout: tuple[CacheTensor, ...], formats: Formats, block_tokens: int
) -> list[Kept]:
    """The window; entries and index keys of `block_tokens` tokens a block; the compressors' states as windows.

    A state holds c and z of the last o * m tokens in float32, o = 2 where blocks overlap; the indexer has one too.
    """
    spec = cast("CSA", group.attention)
    align = RECORD_ALIGNMENT if formats.kv == "fp8_ds_mla" else ROW_ALIGNMENT
    by_name = {t.name: t for t in layout}
    m, pooled = spec.compress_ratio, spec.blocks_pooled

    def sliding(tokens: int, size: int, tensor: CacheTensor, logical: tuple[CacheTensor, ...]) -> Kept:
        content = whole_bytes(tokens * tensor.row_bits(formats), "--kv-dtype")
        made = Spec("sliding", tokens, content, pad(content, align), size, latent=True)
        return Kept(place, made, (tensor,), logical)

    def entries(name: str) -> Kept:
        tensor = by_name[name]
        content = whole_bytes(block_tokens // m * tensor.row_bits(formats), "--kv-dtype")
        made = Spec("full", block_tokens, content, pad(content, align), latent=True, role=name)
        return Kept(place, made, (tensor,), (tensor,), rows_every=m)

    def state(name: str, width: Dim, logical: tuple[CacheTensor, ...]) -> Kept:
        wide = Dim(2 * pooled * width.size, f"2 * {pooled} * {width.label}")
        tensor = CacheTensor(name, "state", Dim(1, ""), wide, FULL)
        return sliding(STATE_BLOCKS[m], pooled * m, tensor, logical)

    window = by_name["window_kv"]
    out = [sliding(WINDOW_BLOCK, group.reach.size, window, (window,))]
    if m:
        out += [entries("compressed_kv"), state("compressor_state", window.width, (by_name["compressor_state"],))]
    if spec.sparse:
        index = by_name["index_k"]
        out += [entries("index_k"), state("index_compressor_state", index.width, ())]
    return out
