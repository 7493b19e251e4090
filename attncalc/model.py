"""A model: an embedding, groups of equal layers, a head, and named weights that fit nowhere else."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from attncalc.attention.base import Attention
from attncalc.axes import Dim, Weight
from attncalc.dtypes import Formats
from attncalc.errors import AttncalcError
from attncalc.ffn import FFN
from attncalc.reach import FULL, Reach
from attncalc.workload import Conventions

if TYPE_CHECKING:
    from attncalc.allocation import Allocation
    from attncalc.engines.options import EngineOptions
    from attncalc.flops import StepCost
    from attncalc.hf_config import Reading

Norm = Literal["rms", "layer", "layer_bias", "unweighted", "none"]
"""`layer` has a weight and no bias, `unweighted` neither; `none`: there are no norms."""
NORM_WEIGHTS: dict[Norm, int] = {"rms": 1, "layer": 1, "layer_bias": 2, "unweighted": 0, "none": 0}


class Joined(NamedTuple):
    """Blocks inside layers that another group names: attention beside Mamba, or a shared block before it.

    `weight_copies`: how many copies of the weights all of them share; None where each has its own.
    """

    weight_copies: int | None = None


class LayerGroup(NamedTuple):
    """Layers that are equal in everything; `cache_from` names, for each of them, the layer whose cache it reads.

    `joined`: no layers of their own, but more blocks in layers of other groups.
    """

    indices: tuple[int, ...]
    attention: Attention | None
    ffn: FFN | None
    norms: int = 0
    reach: Reach = FULL
    cache_from: tuple[int, ...] = ()
    joined: Joined | None = None

    @property
    def weight_copies(self) -> int:
        """How many times the weights of one layer are there."""
        return (self.joined and self.joined.weight_copies) or len(self.indices)

    @property
    def variant(self) -> str:
        """The attention's id, or `none`."""
        return self.attention.variant if self.attention else "none"


@dataclass(frozen=True)
class ExtraWeight:
    """A weight that is no part of the attention, the feed-forward, the norms, the embedding or the head.

    `copies` layers (or 1) have it. `operation`: `none`, `linear` (2 * elements for each new token), or `linear_twice`
    where each token passes it twice (the router of AltUp). `place`: which sum its FLOPs join; one of the `embedding`
    is a table of which a step reads a row per token.
    """

    name: str
    shape: tuple[int, ...]
    copies: int = 1
    operation: Literal["none", "linear", "linear_twice"] = "none"
    place: Literal["embedding", "attention", "ffn", "head"] = "ffn"
    buffer: bool = False

    @property
    def elements(self) -> int:
        """In all copies."""
        return self.copies * prod(self.shape)


class MTP(NamedTuple):
    """Multi-token-prediction layers, known and left out unless asked for."""

    groups: tuple[LayerGroup, ...]
    extra_weights: tuple[ExtraWeight, ...] = ()


@dataclass(frozen=True)
class Model:
    """A decoder, or attention layers alone where `vocab_size` is None.

    `partial`: weights that the model has and its source does not size; parameters, and FLOPs and bytes of a step,
    leave them out and say so. Nothing is missing where it is empty. `reading`: how its config.json was read, if it was.
    """

    id: str
    hidden_size: int
    groups: tuple[LayerGroup, ...]
    vocab_size: int | None = None
    tie_word_embeddings: bool = False
    norm: Norm = "none"
    final_norm: bool = False
    final_logit_softcap: bool = False
    max_position_embeddings: int | None = None
    mtp: MTP | None = None
    extra_weights: tuple[ExtraWeight, ...] = ()
    model_type: str | None = None
    hf_id: str | None = None
    kv_cache_dtype: str | None = None
    source: dict[str, Any] = field(default_factory=dict, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)
    partial: tuple[str, ...] = field(default=(), compare=False)
    path: str = field(default="", compare=False)
    reading: "Reading | None" = field(default=None, compare=False, repr=False)

    @property
    def num_layers(self) -> int:
        """Hidden layers, without MTP."""
        return sum(len(g.indices) for g in self.groups if not g.joined)

    @property
    def partial_note(self) -> str | None:
        """What the totals leave out, in words."""
        return f"{self.id}: totals are partial: {'; '.join(self.partial)}" if self.partial else None

    def layer_groups(self, *, mtp: bool) -> tuple[LayerGroup, ...]:
        """The groups that count.

        Raises:
            AttncalcError: MTP layers are asked for and the model states none.
        """
        if not mtp:
            return self.groups
        if self.mtp is None:
            raise AttncalcError("--mtp", f"the model file of {self.id} describes no multi-token-prediction layers")
        return self.groups + self.mtp.groups

    def extras(self, *, mtp: bool) -> tuple[ExtraWeight, ...]:
        """Named extra weights that count."""
        return self.extra_weights + (self.mtp.extra_weights if mtp and self.mtp else ())

    def norm_elements(self, norms: int) -> int:
        """Elements of so many norms over the hidden size."""
        return norms * NORM_WEIGHTS[self.norm] * self.hidden_size

    def embedding(self) -> tuple[Weight, ...]:
        """The token table, and the head where it is not the same."""
        if self.vocab_size is None:
            return ()
        axes = {"V": Dim(self.vocab_size, "vocab_size"), "D": Dim(self.hidden_size, "hidden_size")}
        table = Weight("embed_tokens.weight", "V D", axes)
        return (table,) if self.tie_word_embeddings else (table, Weight("lm_head.weight", "V D", axes))

    def parameter_parts(self, *, mtp: bool = False) -> dict[str, int]:
        """Parameters by part; the parts add up to the total. Buffers stand apart."""
        groups, extras = self.layer_groups(mtp=mtp), self.extras(mtp=mtp)
        attention = sum(
            g.weight_copies * w.elements for g in groups if g.attention for w in self._published(g.attention)
        )
        ffn = list(self._ffn_weights(groups))
        return {
            "attention": attention,
            "ffn": sum(n * w.elements for n, w in ffn if not w.buffer),
            "norms": self.norm_elements(sum(g.weight_copies * g.norms for g in groups) + int(self.final_norm)),
            "embedding_and_head": sum(w.elements for w in self.embedding()),
            "extra": sum(w.elements for w in extras if not w.buffer),
            "buffers": sum(n * w.elements for n, w in ffn if w.buffer) + sum(w.elements for w in extras if w.buffer),
        }

    @staticmethod
    def _published(attention: Attention) -> tuple[Weight, ...]:
        return attention.weights(attention.forms[0])

    @staticmethod
    def _ffn_weights(groups: tuple[LayerGroup, ...]) -> Iterator[tuple[int, Weight]]:
        for group in groups:
            if group.ffn:
                for w in group.ffn.weights():
                    yield group.weight_copies, w

    def parameters(self, *, mtp: bool = False) -> int:
        """All parameters of the text model, tied ones once, buffers not."""
        parts = self.parameter_parts(mtp=mtp)
        return sum(parts.values()) - parts["buffers"]

    def active_parameters(self, *, mtp: bool = False) -> int:
        """Total - (experts - top_k) * one expert in each MoE layer; embedding and head included."""
        groups = self.layer_groups(mtp=mtp)
        idle = sum(g.weight_copies * g.ffn.inactive_parameters for g in groups if g.ffn)
        return self.parameters(mtp=mtp) - idle

    def cache(
        self,
        context: int,
        *,
        batch: int = 1,
        engine: str = "logical",
        form: str | None = None,
        tp: int = 1,
        mtp: bool = False,
        formats: Formats | None = None,
        options: "EngineOptions | None" = None,
    ) -> "Allocation":
        """What the model keeps for `batch` sequences of `context` tokens, on the GPU of `tp` that holds most.

        Raises:
            AttncalcError: the engine, the form, the formats, the options or the split do not fit the model.
        """
        from attncalc.allocation import allocate

        return allocate(
            self, context, batch=batch, engine=engine, form=form, tp=tp, mtp=mtp, formats=formats, options=options
        )

    def flops(
        self,
        context: int,
        new_tokens: int = 1,
        *,
        batch: int = 1,
        engine: str = "logical",
        tp: int = 1,
        conventions: Conventions | None = None,
        options: "EngineOptions | None" = None,
    ) -> "StepCost":
        """What a step costs that computes the last `new_tokens` of `context` tokens, on one GPU of `tp`.

        Raises:
            AttncalcError: the engine, the form, the formats or the split do not fit the model.
        """
        from attncalc.flops import step_cost

        return step_cost(
            self, context, new_tokens, batch=batch, engine=engine, tp=tp, conventions=conventions, options=options
        )
