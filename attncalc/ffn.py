"""Feed-forward layers: dense and mixture of experts.

Gated (SwiGLU, GeGLU): y = (act(x W_gate) * (x W_up)) W_down, 3 * 2 * D * I FLOPs per token; plain: 2 * 2 * D * I.
Sources: Shazeer 2020 (arXiv 2002.05202); DeepSeekMoE (arXiv 2401.06066) for shared experts.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Protocol, Self

from attncalc.attention.base import require
from attncalc.axes import Axes, Dim, Weight
from attncalc.cache import CacheTensor
from attncalc.errors import AttncalcError
from attncalc.ops import (
    ACTIVATION,
    BIAS,
    GATED_ACTIVATION,
    Contraction,
    Ops,
    Part,
    Rowwise,
    Term,
    activation,
    product,
    weight,
)
from attncalc.workload import Workload


class FFN(Protocol):
    """What every feed-forward answers; a frozen dataclass whose fields are its dimensions, and nothing else."""

    @property
    def hidden_size(self) -> int:
        """D."""

    def weights(self) -> tuple[Weight, ...]:
        """Parameters and buffers by name and shape."""

    def read_weights(self, workload: Workload) -> tuple[Weight, ...]:
        """What a step reads of them."""

    def cache(self) -> tuple[CacheTensor, ...]:
        """What one layer keeps for each sequence."""

    def ops(self, workload: Workload) -> Ops:
        """What one layer computes."""

    def shard(self, tp: int) -> Self:
        """The part of one of `tp` GPUs that holds most."""

    @property
    def inactive_parameters(self) -> int:
        """Parameters that a token does not use."""


def token_axes(workload: Workload) -> dict[str, Dim]:
    """B and t of a step."""
    return {"b": Dim(workload.batch, "batch"), "t": Dim(workload.new_tokens, "new_tokens")}


@dataclass(frozen=True)
class Dense:
    """One feed-forward of width I for every token."""

    hidden_size: int
    intermediate_size: int
    gated: bool
    bias: bool = False

    def __post_init__(self) -> None:
        require(self, "hidden_size", "intermediate_size")

    @property
    def _axes(self) -> dict[str, Dim]:
        return {
            "D": Dim(self.hidden_size, "hidden_size"),
            "I": Dim(self.intermediate_size, "intermediate_size"),
        }

    def weights(self) -> tuple[Weight, ...]:
        """(3 or 2) * D * I, and biases."""
        names = (
            {"gate_proj": "I", "up_proj": "I", "down_proj": "D"} if self.gated else {"up_proj": "I", "down_proj": "D"}
        )
        axes, out = self._axes, []
        for name, rows in names.items():
            out.append(Weight(f"{name}.weight", "D I" if rows == "D" else "I D", axes))
            if self.bias:
                out.append(Weight(f"{name}.bias", rows, axes))
        return tuple(out)

    def read_weights(self, workload: Workload) -> tuple[Weight, ...]:  # noqa: ARG002
        """What a step reads: everything."""
        return self.weights()

    def ops(self, workload: Workload) -> Ops:
        """2 * B * T * D * I for each matrix."""
        axes = self._axes | token_axes(workload)
        x, mid = activation("x", "b t D"), activation("ffn_mid", "b t I")
        names = ("ffn_gate_proj", "ffn_up_proj") if self.gated else ("ffn_up_proj",)
        products = [product(name, x, weight(name, "I D"), activation(name, "b t I"), axes) for name in names]
        down = weight("ffn_down_proj", "D I")
        products.append(product("ffn_down_proj", mid, down, activation("y", "b t D"), axes))
        act = GATED_ACTIVATION if self.gated else ACTIVATION
        rowwise = [Rowwise("ffn_activation", "b t I", act, axes)]
        if self.bias:
            rowwise += [Rowwise(f"{name}_bias", "b t I", BIAS, axes) for name in names]
            rowwise.append(Rowwise("ffn_down_proj_bias", "b t D", BIAS, axes))
        return Ops(tuple(products), tuple(rowwise))

    def cache(self) -> tuple[CacheTensor, ...]:
        """Nothing is kept between steps."""
        return ()

    def shard(self, tp: int) -> "Dense":
        """I / tp columns, rounded up: the GPU that holds most."""
        return replace(self, intermediate_size=-(-self.intermediate_size // tp))

    @property
    def inactive_parameters(self) -> int:
        """Every token uses all of it."""
        return 0


@dataclass(frozen=True)
class MoE:
    """E experts of width I, of which each token uses top_k, beside shared ones of total width `shared`.

    `router_bias`: the router is a linear layer with bias. `router_correction`: a bias that only picks experts
    (DeepSeek-V3's e_score_correction_bias), a buffer or a parameter. `shared_gate`: a scalar sigmoid on the shared
    expert (Qwen2-MoE).
    """

    hidden_size: int
    num_experts: int
    top_k: int
    moe_intermediate_size: int
    gated: bool
    shared_intermediate_size: int = 0
    bias: bool = False
    router_bias: bool = False
    router_correction: Literal["none", "buffer", "parameter"] = "none"
    shared_gate: bool = False

    expert_axis: ClassVar[str] = "D"

    def __post_init__(self) -> None:
        require(self, "hidden_size", "num_experts", "top_k", "moe_intermediate_size")
        require(self, "shared_intermediate_size", minimum=0)
        if self.shared_gate and not self.shared_intermediate_size:
            raise AttncalcError("shared_gate", "must be false where there is no shared expert", got="true")
        if self.top_k > self.num_experts:
            raise AttncalcError("top_k", f"must not exceed num_experts {self.num_experts}", got=self.top_k)

    @property
    def _axes(self) -> dict[str, Dim]:
        return {
            "D": Dim(self.hidden_size, "hidden_size"),
            "E": Dim(self.num_experts, "num_experts"),
            "I": Dim(self.moe_intermediate_size, "moe_intermediate_size"),
            "G": Dim(2 if self.gated else 1, "matrices"),
            "J": Dim(self.shared_intermediate_size, "shared_intermediate_size"),
            "one": Dim(1, "1"),
        }

    @property
    def _shared(self) -> Dense | None:
        if not self.shared_intermediate_size:
            return None
        return Dense(self.hidden_size, self.shared_intermediate_size, self.gated)

    def _weights(self, axes: Axes) -> tuple[Weight, ...]:
        out = [Weight("router.weight", "E D", self._axes)]
        if self.router_bias:
            out.append(Weight("router.bias", "E", self._axes))
        if self.router_correction != "none":
            buffer = self.router_correction == "buffer"
            out.append(Weight("router.correction_bias", "E", self._axes, buffer))
        up, width = "gate_up_proj" if self.gated else "up_proj", self.expert_axis
        out += [
            Weight(f"experts.{up}.weight", f"E (G I) {width}", axes),
            Weight("experts.down_proj.weight", f"E {width} I", axes),
        ]
        if self.bias:
            out += [
                Weight(f"experts.{up}.bias", "E (G I)", axes),
                Weight("experts.down_proj.bias", f"E {width}", axes),
            ]
        if self._shared:
            out += [w._replace(name=f"shared.{w.name}") for w in self._shared.weights()]
            if self.shared_gate:
                out.append(Weight("shared_gate.weight", "one D", self._axes))
        return tuple(out)

    def weights(self) -> tuple[Weight, ...]:
        """D*E + E * (3 or 2) * D * I + shared experts, and what the options add."""
        return self._weights(self._axes)

    def reached(self, workload: Workload) -> int:
        """Experts whose weights a step reads: min(E, tokens * top_k), at most one token for each."""
        return min(self.num_experts, workload.batch * workload.new_tokens * self.top_k)

    def read_weights(self, workload: Workload) -> tuple[Weight, ...]:
        """What a step reads: the experts that it can reach, and the rest whole."""
        reached = Dim(self.reached(workload), "min(num_experts, batch * new_tokens * top_k)")
        return self._weights(self._axes | {"E": reached})

    def ops(self, workload: Workload) -> Ops:
        """Router 2*B*T*D*E; experts top_k times a dense layer of width I; shared ones as dense."""
        axes = self._axes | token_axes(workload)
        routed = workload.batch * workload.new_tokens * self.top_k
        axes["x"] = Dim(routed, "batch * new_tokens * top_k")
        axes["a"] = Dim(self.reached(workload), "min(num_experts, batch * new_tokens * top_k)")
        x, width = activation("x", "b t D"), self.expert_axis
        products: list[Contraction] = [
            product("router", x, weight("router", "E D"), activation("router_logits", "b t E"), axes)
        ]
        rows, mid = activation("x", f"x {width}"), activation("expert_mid", "x I")
        names = ("expert_gate_proj", "expert_up_proj") if self.gated else ("expert_up_proj",)
        for name in names:
            held = Term(f"I {width}", (Part(name, f"a I {width}", "weight", "weight"),))
            products.append(product(name, rows, held, activation(name, "x I"), axes))
        held = Term(f"{width} I", (Part("expert_down_proj", f"a {width} I", "weight", "weight"),))
        products.append(product("expert_down_proj", mid, held, activation("expert_y", f"x {width}"), axes))
        act = GATED_ACTIVATION if self.gated else ACTIVATION
        rowwise = [
            Rowwise("router_scores", "b t E", 1, axes),
            Rowwise("expert_activation", "x I", act, axes),
            Rowwise("expert_combine", f"x {width}", 2, axes),
        ]
        if self.router_bias:
            rowwise.append(Rowwise("router_bias", "b t E", BIAS, axes))
        if self.router_correction != "none":
            rowwise.append(Rowwise("router_correction", "b t E", BIAS, axes))
        if self.bias:
            rowwise += [Rowwise(f"{name}_bias", "x I", BIAS, axes) for name in names]
            rowwise.append(Rowwise("expert_down_proj_bias", f"x {width}", BIAS, axes))
        if self._shared:
            shared = self._shared.ops(workload)
            products += [op._replace(name=op.name.replace("ffn_", "shared_")) for op in shared.contractions]
            rowwise += [op._replace(name=op.name.replace("ffn_", "shared_")) for op in shared.rowwise]
            if self.shared_gate:
                gate, out = weight("shared_gate", "one D"), activation("shared_gate", "b t one")
                products.append(product("shared_gate", x, gate, out, axes))
                rowwise.append(Rowwise("shared_gate_sigmoid", "b t", 1, axes))
                rowwise.append(Rowwise("shared_gate", "b t D", 1, axes))
        return Ops(tuple(products), tuple(rowwise))

    def cache(self) -> tuple[CacheTensor, ...]:
        """Nothing is kept between steps."""
        return ()

    def shard(self, tp: int) -> "MoE":
        """Every expert's I / tp columns, rounded up; the router is replicated."""
        return replace(
            self,
            moe_intermediate_size=-(-self.moe_intermediate_size // tp),
            shared_intermediate_size=-(-self.shared_intermediate_size // tp),
        )

    @property
    def inactive_parameters(self) -> int:
        """Parameters of the experts that a token does not use: (E - top_k) * one expert."""
        experts = sum(w.elements for w in self.weights() if w.name.startswith("experts."))
        return experts // self.num_experts * (self.num_experts - self.top_k)
