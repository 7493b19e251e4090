"""The dimensions that variants are compared at, and how each variant is built from them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import cast

from attncalc.attention import VARIANTS
from attncalc.attention.base import Attention
from attncalc.attention.csa import CSA
from attncalc.attention.dsa import DSA
from attncalc.attention.gdn import GDN
from attncalc.attention.gla import GLA
from attncalc.attention.gqa import GQA
from attncalc.attention.gqa_concat import ConcatGQA
from attncalc.attention.gqa_conv import ConvGQA
from attncalc.attention.gqa_index import IndexedGQA
from attncalc.attention.gta import GTA
from attncalc.attention.kda import KDA
from attncalc.attention.lightning import Lightning
from attncalc.attention.linear_state import LinearState
from attncalc.attention.mamba import Mamba
from attncalc.attention.mamba2 import Mamba2
from attncalc.attention.mfa import MFA
from attncalc.attention.mla import MLA
from attncalc.attention.mla_split import MLASplit
from attncalc.attention.moba import MoBA
from attncalc.attention.nsa import NSA
from attncalc.attention.residual_conv import ResidualConv
from attncalc.attention.retnet import RetNet
from attncalc.attention.rg_lru import RGLRU
from attncalc.attention.rwkv7 import RWKV7
from attncalc.attention.short_conv import ShortConv
from attncalc.attention.tpa import TPA
from attncalc.errors import AttncalcError
from attncalc.model import Model
from attncalc.reach import Reach


@dataclass(frozen=True)
class Dimensions:
    """The size that all variants share. Defaults are DeepSeek-V3's, the indexer's DeepSeek-V3.2's."""

    hidden_size: int = 7168
    heads: int = 128
    kv_heads: int = 8
    head_dim: int = 128
    v_head_dim: int = 128
    kv_lora_rank: int = 512
    q_lora_rank: int | None = 1536
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 2048


def _half(size: int, option: str = "--kv-lora-rank") -> int:
    if size % 2:
        raise AttncalcError(option, "must be even to be halved", got=size)
    return size // 2


def _rope_half(head_dim: int) -> int:
    """Half of a head, rotated: the RoPE key of GTA and GLA."""
    if head_dim % 4:
        raise AttncalcError("--head-dim", "must be a multiple of 4, so that half of it can be rotated", got=head_dim)
    return head_dim // 2


MAMBA2_HEAD, MAMBA2_GROUPS = 64, 8


def _mamba2_heads(hidden_size: int) -> int:
    """Heads of width 64 in an inner width of 2D."""
    step = MAMBA2_HEAD * MAMBA2_GROUPS // 2
    if hidden_size % step:
        rule = f"must be a multiple of {step} for Mamba-2's {MAMBA2_GROUPS} groups of heads of width {MAMBA2_HEAD}"
        raise AttncalcError("hidden_size", rule, got=hidden_size)
    return 2 * hidden_size // MAMBA2_HEAD


def _rwkv7(hidden_size: int, heads: int, head_k_dim: int, head_v_dim: int) -> RWKV7:
    """Ranks as flash-linear-attention chooses them: 1.8, 1.8 and 1.3 * sqrt(D), 0.6 * D^0.8, to multiples of 32."""
    decay, values, gate = (
        max(32, round(size / 32) * 32)
        for size in (1.8 * hidden_size**0.5, 1.3 * hidden_size**0.5, 0.6 * hidden_size**0.8)
    )
    return RWKV7(hidden_size, heads, head_k_dim, head_v_dim, decay, decay, values, gate)


def _v4(d: Dimensions, compress_ratio: int, *index: int) -> CSA:
    """DeepSeek-V4-Pro's widths: heads of 512 on one KV head, groups of 8 heads projected to 1024."""
    if d.q_lora_rank is None:
        raise AttncalcError("q_lora_rank", "must be given: the query of DeepSeek-V4 is low-rank")
    groups = d.heads // gcd(d.heads, 8)
    return CSA(d.hidden_size, d.heads, 512, d.qk_rope_head_dim, d.q_lora_rank, groups, 1024, compress_ratio, *index)


# How each variant is built at given dimensions. RoPE over the whole head; MLA's is decoupled.
BUILD: Mapping[str, Callable[[Dimensions], Attention]] = {
    "mha": lambda d: GQA(d.hidden_size, d.heads, d.heads, d.head_dim, d.v_head_dim, d.head_dim),
    "gqa": lambda d: GQA(d.hidden_size, d.heads, d.kv_heads, d.head_dim, d.v_head_dim, d.head_dim),
    "mqa": lambda d: GQA(d.hidden_size, d.heads, 1, d.head_dim, d.v_head_dim, d.head_dim),
    # Zamba's: the hidden state beside the embedding, no RoPE.
    "gqa-concat": lambda d: ConcatGQA(
        d.hidden_size, d.heads, d.kv_heads, d.head_dim, d.v_head_dim, input_size=2 * d.hidden_size
    ),
    # Inkling's kernel, relative states and distances.
    "gqa-conv": lambda d: ConvGQA(
        d.hidden_size, d.heads, d.kv_heads, d.head_dim, d.v_head_dim, conv_kernel=4, rel_dim=16, rel_extent=1024
    ),
    "mla": lambda d: MLA(
        d.hidden_size,
        d.heads,
        d.q_lora_rank,
        d.kv_lora_rank,
        d.qk_nope_head_dim,
        d.qk_rope_head_dim,
        d.v_head_dim,
    ),
    # The indexer's queries come from the query latent: DeepSeek-V3's, where there is none to share.
    "dsa": lambda d: DSA(
        d.hidden_size,
        d.heads,
        d.q_lora_rank or Dimensions.q_lora_rank,
        d.kv_lora_rank,
        d.qk_nope_head_dim,
        d.qk_rope_head_dim,
        d.v_head_dim,
        index_n_heads=d.index_n_heads,
        index_head_dim=d.index_head_dim,
        index_topk=d.index_topk,
    ),
    "kda": lambda d: KDA(
        d.hidden_size,
        d.heads,
        d.heads,
        d.head_dim,
        d.v_head_dim,
        conv_kernel=4,
        decay="low_rank",
        decay_rank=d.head_dim,
        gate="low_rank",
        gate_rank=d.head_dim,
    ),
    "gdn": lambda d: GDN(d.hidden_size, d.heads, d.heads, d.head_dim, d.head_dim, conv_kernel=4),
    "lightning": lambda d: Lightning(d.hidden_size, d.heads, d.head_dim),
    "retnet": lambda d: RetNet(d.hidden_size, d.heads, d.head_dim, 2 * d.head_dim),
    "linear-state": lambda d: LinearState(d.hidden_size, _half(d.hidden_size, "--hidden-size"), bias=False),
    "mamba2": lambda d: Mamba2(d.hidden_size, _mamba2_heads(d.hidden_size), MAMBA2_HEAD, MAMBA2_GROUPS, state_size=128),
    "mamba": lambda d: Mamba(d.hidden_size, 2 * d.hidden_size, state_size=16, dt_rank=-(-d.hidden_size // 16)),
    "rwkv7": lambda d: _rwkv7(d.hidden_size, d.heads, d.head_dim, d.v_head_dim),
    # RecurrentGemma's: as many channels as the hidden size, a block of the gates for each head.
    "rg-lru": lambda d: RGLRU(d.hidden_size, d.hidden_size, d.heads),
    "short-conv": lambda d: ShortConv(d.hidden_size, d.hidden_size, conv_kernel=3),  # LFM2's
    "conv": lambda d: ResidualConv(d.hidden_size, conv_kernel=4),  # Inkling's
    "mla-split": lambda d: MLASplit(
        d.hidden_size, d.heads, d.head_dim, d.v_head_dim, _half(d.kv_lora_rank), _half(d.kv_lora_rank)
    ),
    "gta": lambda d: GTA(d.hidden_size, d.heads, d.kv_heads, d.head_dim, _rope_half(d.head_dim)),
    # GLA-2: two latents of 2d.
    "gla": lambda d: GLA(
        d.hidden_size, d.heads, 2, d.q_lora_rank, 2 * d.head_dim, d.head_dim, _rope_half(d.head_dim), d.v_head_dim
    ),
    # Step-3's rank and width.
    "mfa": lambda d: MFA(d.hidden_size, d.heads, 2048, 256, 256),
    # The paper's ranks.
    "tpa": lambda d: TPA(d.hidden_size, d.heads, d.head_dim, 6, 2, 2, d.head_dim),
    "nsa": lambda d: NSA(d.hidden_size, d.heads, d.kv_heads, d.head_dim, d.v_head_dim, d.head_dim),
    # MiniMax-M3's indexer.
    "gqa-index": lambda d: IndexedGQA(
        d.hidden_size,
        d.heads,
        d.kv_heads,
        d.head_dim,
        d.v_head_dim,
        d.head_dim,
        index_dim=d.head_dim,
        block_size=128,
        blocks=16,
    ),
    "moba": lambda d: MoBA(d.hidden_size, d.heads, d.kv_heads, d.head_dim, d.v_head_dim, d.head_dim),
    "csa": lambda d: _v4(d, 4, 64, 128, 1024),
    "hca": lambda d: _v4(d, 128),
    "tied-mqa": lambda d: _v4(d, 0),
}

# What a variant that is not full attention attends to, beside what it says itself.
REACHES = dict.fromkeys(("csa", "hca", "tied-mqa"), Reach("window", 128))

# Where a variant refuses one of its fields, the option that set it.
OPTIONS = {
    "num_heads": "--heads",
    "num_kv_heads": "--kv-heads",
    "rope_dim": "--head-dim",
    "head_k_dim": "--head-dim",
    **{f"{v4}.rope_dim": "--qk-rope-head-dim" for v4 in REACHES},
    **{name: f"--{name.replace('_', '-')}" for name in Dimensions.__dataclass_fields__},
}


def shown_attention(model: Model) -> Attention | None:
    """The attention whose dimensions a model lends: its first softmax or latent layer, else its first of any kind."""
    every = [g.attention for g in model.groups if g.attention]
    return next((a for a in every if isinstance(a, (GQA, MLA))), every[0] if every else None)


def dimensions_like(attention: Attention) -> Dimensions:
    """The dimensions of a model's attention; what it does not have (latent sizes) stays DeepSeek-V3's.

    Raises:
        AttncalcError: the variant has no head widths to take.
    """
    if isinstance(attention, MLA):
        made = Dimensions(
            hidden_size=attention.hidden_size,
            heads=attention.num_heads,
            head_dim=attention.qk_nope_head_dim,
            v_head_dim=attention.v_head_dim,
            kv_lora_rank=attention.kv_lora_rank,
            q_lora_rank=attention.q_lora_rank,
            qk_nope_head_dim=attention.qk_nope_head_dim,
            qk_rope_head_dim=attention.qk_rope_head_dim,
        )
        if not isinstance(attention, DSA):
            return made
        return replace(
            made,
            index_n_heads=attention.index_n_heads,
            index_head_dim=attention.index_head_dim,
            index_topk=attention.index_topk,
        )
    if isinstance(attention, GQA):
        return Dimensions(
            hidden_size=attention.hidden_size,
            heads=attention.num_heads,
            # gqa keeps its 8 groups where the model is an MHA or MQA.
            kv_heads=attention.num_kv_heads if 1 < attention.num_kv_heads < attention.num_heads else 8,
            head_dim=attention.head_dim,
            v_head_dim=attention.v_head_dim,
            qk_nope_head_dim=attention.head_dim,
        )
    if isinstance(attention, CSA):
        return Dimensions(
            hidden_size=attention.hidden_size,
            heads=attention.num_heads,
            head_dim=attention.head_dim,
            v_head_dim=attention.head_dim,
            q_lora_rank=attention.q_lora_rank,
            qk_nope_head_dim=attention.head_dim,
            qk_rope_head_dim=attention.rope_dim,
        )
    raise AttncalcError("--like", "must name a model of softmax or latent attention", got=attention.variant)


def used_dimensions(names: list[str]) -> set[str]:
    """The dimensions that building these variants reads."""
    seen = set[str]()

    class Recording:
        """Dimensions that remember what was asked."""

        def __getattr__(self, name: str) -> object:
            seen.add(name)
            return getattr(Dimensions(), name)

    for name in names:
        BUILD[name](cast("Dimensions", Recording()))
    return seen


def known_variants() -> tuple[str, ...]:
    """Ids that can be compared."""
    return tuple(v for v in VARIANTS if v in BUILD)
