"""Accelerators: dense peaks by dtype, memory bandwidth, capacity. Facts only; nothing is extrapolated."""

from dataclasses import dataclass, field
from typing import Any

from attncalc.errors import AttncalcError, shown, suggestion
from attncalc.fields import Fields

RATE_BITS = 60  # 10 PFLOP/s in fp4 are above 2^53


@dataclass(frozen=True)
class Device:
    """`peaks`: dense FLOP/s (OP/s for int8) by dtype; one multiply-add is 2; sparsity never included.

    `aliases`: what else the part is called: `a100` is the SXM4 with 80 GB.
    """

    id: str
    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: int
    peaks: dict[str, int]
    aliases: tuple[str, ...] = ()
    source: dict[str, Any] = field(default_factory=dict, compare=False)

    def peak(self, dtype: str) -> int:
        """Dense peak for a dtype.

        Raises:
            AttncalcError: none is published; another dtype's rate is never taken instead.
        """
        if dtype not in self.peaks:
            hint = suggestion(dtype, self.peaks, f"It has {', '.join(self.peaks)}")
            raise AttncalcError("--device", f"{self.id} publishes no {dtype} rate", hint=hint)
        return self.peaks[dtype]

    def ridge(self, dtype: str) -> "tuple[int, int]":
        """FLOP per byte at which compute and memory take equal time, as a ratio (peak, bandwidth)."""
        return self.peak(dtype), self.bandwidth_bytes_per_s


def read_device(data: object, where: str) -> Device:
    """The device that a preset document describes.

    Raises:
        AttncalcError: a field is missing, unknown, or of the wrong type.
    """
    top = Fields(data, where)
    peaks_node = top.child("dense_flops_per_s")
    peaks = {name: peaks_node.positive(name, RATE_BITS) for name in peaks_node.names()}
    source = top.child("source")
    aliases = top.items("aliases")
    for other in aliases:
        if not isinstance(other, str) or not other:
            raise AttncalcError(top.path("aliases"), "must be names", got=shown(other))
    device = Device(
        id=top.get("id", str),
        name=top.get("name", str),
        memory_bytes=top.positive("memory_bytes"),
        bandwidth_bytes_per_s=top.positive("bandwidth_bytes_per_s"),
        peaks=peaks,
        aliases=tuple(str(other) for other in aliases),
        source={name: source.get(name, str) for name in ("where", "date", "check")},
    )
    source.finish()
    top.finish()
    return device
