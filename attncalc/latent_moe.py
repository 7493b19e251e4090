"""Experts over a latent: a module of its own, since few models have it and every command reads models."""

from dataclasses import dataclass
from typing import ClassVar

from attncalc.attention.base import require
from attncalc.axes import Axes, Dim, Weight
from attncalc.ffn import MoE, token_axes
from attncalc.ops import Ops, activation, product, weight
from attncalc.workload import Workload


@dataclass(frozen=True, kw_only=True)
class LatentMoE(MoE):
    """Experts that read and write a latent of width `latent_size`, which two projections share (Nemotron 3).

    Router and shared experts read the hidden state. Source: transformers 5.24 `models/nemotron_h`.
    """

    latent_size: int

    expert_axis: ClassVar[str] = "L"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "latent_size")

    @property
    def _axes(self) -> dict[str, Dim]:
        return super()._axes | {"L": Dim(self.latent_size, "latent_size")}

    def _weights(self, axes: Axes) -> tuple[Weight, ...]:
        down = Weight("fc1_latent_proj.weight", "L D", self._axes)
        return (*super()._weights(axes), down, Weight("fc2_latent_proj.weight", "D L", self._axes))

    def ops(self, workload: Workload) -> Ops:
        """As of MoE, the experts over the latent, and 2 * 2 * B * T * D * L for the two projections."""
        made, axes = super().ops(workload), self._axes | token_axes(workload)
        x, latent = activation("x", "b t D"), activation("latent", "b t L")
        router, *rest = made.contractions
        down = product("latent_down_proj", x, weight("fc1_latent_proj", "L D"), latent, axes)
        up = product("latent_up_proj", latent, weight("fc2_latent_proj", "D L"), activation("y", "b t D"), axes)
        return Ops((router, down, *rest, up), made.rowwise)
