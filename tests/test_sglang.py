"""SGLang: pools of pages and slots, against values counted by hand, logged and published."""

from fractions import Fraction
from typing import Any

import pytest

import attncalc
from attncalc import AttncalcError
from attncalc.allocation import Allocation
from attncalc.dtypes import Formats
from attncalc.engines.options import EngineOptions
from attncalc.presets import ids
from tests.conftest import Command

GiB = 2**30
ROW = 2 * 8 * 64 * 2
"""K and V of gpt-oss: 8 heads of 64 in bf16."""


def kept(model: str, context: int, *, formats: Formats | None = None, **words: Any) -> Allocation:
    """The allocation; words that are no parameter of `cache` are engine options."""
    mine = {k: words.pop(k) for k in ("batch", "tp", "mtp") if k in words}
    loaded = attncalc.load(model)
    return loaded.cache(context, engine="sglang", formats=formats, options=EngineOptions(**words), **mine)


@pytest.mark.parametrize(("page", "tokens"), [(None, 1000), (64, 1024)])
def test_pages_of_tokens_and_a_spare_one(page: int | None, tokens: int) -> None:
    made = kept("llama-3.1-8b", 1000, batch=3, block_size=page)
    assert made.bytes_per_sequence == tokens * 131_072
    assert made.bytes_overhead == (page or 1) * 131_072
    (pool,) = made.pools
    assert (pool.name, pool.block_bytes) == ("full", (page or 1) * 131_072)
    assert made.bytes_total == pool.held(1000, 3) * pool.block_bytes


def test_mimo_has_a_sliding_pool_of_other_widths(attncalc: Command) -> None:
    """sgl-project/sglang#18039: 300,288 tokens, 39 layers, 2 of 8 heads on a GPU, K of 192 and V of 128, printed in GiB."""
    words = ("--tp", "4", "--block-size", "64", "--swa-ratio", "1", "-c", "300288", "--engine", "sglang", "--json")
    (row,) = attncalc("cache", "mimo-v2-flash", *words).record["results"]
    sizes: dict[str, int] = {}
    for layer in row["layers"]:
        if layer["reach"] == "window 128":
            for t in layer["tensors"]:
                sizes[t["name"]] = sizes.get(t["name"], 0) + layer["num_layers"] * t["bytes"]
    assert abs(sizes["k"] / GiB - 8.38) <= 0.005
    assert abs(sizes["v"] / GiB - 5.59) <= 0.006
    assert row["blocks"] == [300_288 // 64 + 1] * 2


@pytest.mark.parametrize("share", [None, Fraction(1, 4), Fraction(4, 5), 1])
def test_the_sliding_pool_holds_a_share_of_the_tokens(share: Fraction | int | None) -> None:
    made = kept("gpt-oss-20b", 8192, batch=3, swa_ratio=share, block_size=16)
    full, sliding = made.pools
    share = Fraction(4, 5) if share is None else share
    pages = int(share * 3 * 512)
    assert (full.held(8192, 3), sliding.held(8192, 3)) == (3 * 512 + 1, pages + 1)
    assert made.bytes_total == (3 * 512 + 1 + pages + 1) * 16 * 12 * ROW
    assert made.bytes_per_token == 12 * ROW * (1 + share)


@pytest.mark.parametrize(
    ("context", "share", "full", "sliding"),
    [
        (100, 1, 100, 100),
        (100, None, 125, 100),
        (128, None, 160, 128),
        (150, None, 160, 128),
        (161, None, 161, 128),
        (1000, Fraction(1, 10), 1280, 128),
    ],
)
def test_the_share_holds_the_window(context: int, share: Fraction | int | None, full: int, sliding: int) -> None:
    """Windows of 128 tokens: the full pool is at least so large that its share holds one."""
    made = kept("gpt-oss-20b", context, swa_ratio=share)
    assert made.bytes_per_sequence == (full + sliding) * 12 * ROW
    after = kept("gpt-oss-20b", context + 5, swa_ratio=share)
    assert after.bytes_per_sequence >= made.bytes_per_sequence
    if context == 100:  # within the window every token adds one to the sliding pool
        assert after.bytes_per_sequence - made.bytes_per_sequence >= 5 * 12 * ROW * 2
        assert made.bytes_per_token == 12 * ROW * (1 + 1 / Fraction(share or Fraction(4, 5)))


@pytest.mark.parametrize("model", ["gemma-3-27b", "gemma-2-27b", "olmo-3-7b"])
def test_most_sliding_layers_hold_the_whole_context(model: str) -> None:
    made, logical = kept(model, 20_000), attncalc.load(model).cache(20_000)
    assert [p.name for p in made.pools] == ["full"]
    whole = sum(x.layers * t.shape[1] * t.shape[3] for x in logical.layers for t in x.tensors)
    assert made.bytes_per_sequence == whole * 2 * 20_000
    assert any("as full ones" in r.rule for r in made.reasons)
    with pytest.raises(AttncalcError, match="--swa-ratio: the model has no sliding pool"):
        kept(model, 20_000, swa_ratio=1)


def test_states_have_a_slot_each_and_a_spare_one() -> None:
    """Qwen3-Next: 36 layers of 32 heads of 128 x 128 in fp32, 3 columns of 8,192 channels; 12 of 2 heads of 256."""
    slot = 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    made = kept("qwen3-next-80b-a3b", 1000, batch=5)
    full, states = made.pools
    assert (states.name, states.block_bytes, made.state_page_bytes) == ("states", slot, slot)
    assert made.bytes_total == 6 * slot + (5 * 1000 + 1) * 12 * 2048
    assert (full.spare_blocks, states.spare_blocks) == (1, 1)


@pytest.mark.parametrize(
    ("model", "layers", "state", "columns"),
    [
        ("qwen3-next-80b-a3b", 36, 32 * 128 * 128 * 4, (4 + 3 - 1) * 8192 * 2),
        ("kimi-linear-48b-a3b", 20, 32 * 128 * 128 * 4, 4 * 3 * 12_288 * 2),
    ],
)
def test_drafts_keep_a_state_for_each_verified_token(model: str, layers: int, state: int, columns: int) -> None:
    """Three drafts and the token before them; windows of GDN overlap in memory, those of KDA do not."""
    made = kept(model, 1000, batch=5, draft_tokens=3)
    drafts = next(p for p in made.pools if p.name == "drafts")
    assert drafts.block_bytes == layers * (4 * state + columns)
    assert drafts.held(1000, 5) == 6


@pytest.mark.parametrize(("kv", "row"), [("bf16", 1152), ("fp8", 656), ("fp8_ds_mla", 656)])
def test_sparse_rows(kv: str, row: int) -> None:
    """DeepSeek-V3.2: 61 layers, index keys of 132 B, pages of 64 tokens."""
    made = kept("deepseek-v3.2", 100, formats=Formats(kv=kv))
    assert made.bytes_per_sequence == 128 * 61 * (row + 132)
    assert made.bytes_overhead == 64 * 61 * (row + 132)
    assert kept("glm-5.2", 64, mtp=True, formats=Formats(kv=kv)).bytes_per_token == 79 * row + 22 * 132


def test_picked_blocks_are_pages() -> None:
    """MiniMax-M3: 60 layers of K and V of 4 heads of 128, an index key of 128 in 57 of them."""
    token = 60 * 2 * 4 * 128 * 2 + 57 * 128 * 2
    made = kept("minimax-m3", 200)
    assert (made.bytes_per_sequence, made.bytes_overhead) == (256 * token, 128 * token)
    for words in ({"kv": "fp8"}, {"index": "fp8"}):
        with pytest.raises(AttncalcError, match="dtype"):
            kept("minimax-m3", 200, formats=Formats(**words))


@pytest.mark.parametrize(("tp", "heads"), [(1, 8), (4, 2), (8, 1), (16, 1)])
def test_attention_replicas_hold_whole_sequences(tp: int, heads: int) -> None:
    made = kept("llama-3.1-70b", 1000, batch=6, tp=tp)
    assert made.bytes_per_sequence == 1000 * 80 * 2 * heads * 128 * 2
    if tp == 8:
        shared = kept("llama-3.1-70b", 1000, batch=6, tp=8, dp=4, dp_attention=True)
        # 2 of 6 sequences, with the heads of 2 GPUs
        assert shared.bytes_total == (2 * 1000 + 1) * 80 * 2 * 4 * 128 * 2
        logical = attncalc.load("llama-3.1-70b").cache(1000, batch=6, tp=8)
        assert sum(r.bytes for r in shared.reasons) == shared.bytes_total - logical.bytes_total
        assert kept("deepseek-v3", 1000, batch=6, tp=8, dp=8, dp_attention=True).bytes_total == 1001 * 61 * 1152


@pytest.mark.parametrize(
    ("model", "words", "option"),
    [
        ("llama-3.1-70b", {"tp": 8, "dp": 3, "dp_attention": True}, "--dp"),
        ("llama-3.1-70b", {"tp": 3}, "--tp"),
        ("deepseek-v3.2", {"block_size": 16}, "--block-size"),
        ("deepseek-v3.2", {"formats": Formats(index="fp4")}, "--index-dtype"),
        ("llama-3.1-8b", {"formats": Formats(kv="int8_per_token_head")}, "--kv-dtype"),
        ("deepseek-v3", {"formats": Formats(kv="fp8_ds_mla")}, "--kv-dtype"),
        ("llama-3.1-8b", {"dcp": 2}, "--dcp"),
        ("llama-3.1-8b", {"prefix_caching": True}, "--prefix-caching"),
        ("jamba-v0.1", {}, "--engine"),
        ("deepseek-v4-pro", {}, "--engine"),
    ],
)
def test_what_sglang_lacks_is_refused(model: str, words: dict[str, Any], option: str) -> None:
    with pytest.raises(AttncalcError, match=option):
        kept(model, 1000, **words)


def test_the_last_stages_have_what_is_left_over() -> None:
    made = kept("gpt-oss-20b", 1000, pp=(7,), swa_ratio=1)
    assert [len(s.layers) for s in made.stages] == [3, 3, 3, 3, 4, 4, 4]
    assert made.bytes_total == max(s.bytes_total for s in made.stages) == 4 * 1001 * ROW


@pytest.mark.parametrize("preset", ids("models"))
def test_reasons_explain_the_whole_difference(preset: str) -> None:
    model = attncalc.load(preset)
    for context, tp, options in (
        (300, 1, EngineOptions()),
        (20_000, 2, EngineOptions(draft_tokens=2, dp=2)),
        (20_000, 1, EngineOptions(pp=(2,), block_size=64)),
    ):
        try:
            made = model.cache(context, batch=3, tp=tp, engine="sglang", options=options)
            same = EngineOptions(pp=tuple(len(s.layers) for s in made.stages) or None, dp=options.dp)
            logical = model.cache(context, batch=3, tp=tp, options=same)
        except AttncalcError as error:
            assert error.where in ("--engine", "--tp", "--pp", "--kv-dtype", "--block-size")  # noqa: PT017
            continue
        if not options.pp:  # the largest stage of one need not be that of the other
            assert sum(r.bytes for r in made.reasons) == made.bytes_total - logical.bytes_total
        assert made.bytes_total == sum(x.bytes for x in made.layers) + made.bytes_overhead
        assert made.bytes_total == sum(p.held(context, made.sequences) * p.block_bytes for p in made.pools)
        assert sum(p.spare_blocks * p.block_bytes for p in made.pools) == made.bytes_overhead
