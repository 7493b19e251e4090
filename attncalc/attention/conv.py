"""What variants with a short causal depthwise convolution share. Axes: c channels, w taps, u kept columns."""

from attncalc.axes import Dim
from attncalc.cache import CacheTensor
from attncalc.ops import ACTIVATION, BIAS, Contraction, Part, Rowwise, Term, activation, product


def conv_axes(channels: Dim, kernel: int) -> dict[str, Dim]:
    """c, w and u of a convolution over `kernel` tokens."""
    return {"c": channels, "w": Dim(kernel, "conv_kernel"), "u": Dim(kernel - 1, "conv_kernel - 1")}


def conv_cache(axes: dict[str, Dim]) -> tuple[CacheTensor, ...]:
    """conv_state [B, 1, W - 1, channels]; nothing where W is 1."""
    kept = axes["u"].size
    return (CacheTensor("conv_state", "conv", Dim(1, ""), axes["c"], None, kept),) if kept else ()


def conv_product(axes: dict[str, Dim]) -> Contraction:
    """2*B*T*W*channels; the kept columns are read and written once in a step."""
    read, written = [activation("mixed", "b t c")], [activation("mixed", "b t c")]
    if axes["u"].size:
        read.append(Part("conv_state", "b u c", "cache", "conv"))
        written.append(Part("conv_state", "b u c", "cache_write", "conv"))
    taps = Part("conv1d", "c w", "weight", "vector")
    return product("conv", Term("b t c w", tuple(read)), taps, Term("b t c", tuple(written)), axes)


def conv_rowwise(axes: dict[str, Dim], *, bias: bool, silu: bool = True) -> tuple[Rowwise, ...]:
    """The bias and SiLU of every channel, where there are any."""
    out = (Rowwise("conv_bias", "b t c", BIAS, axes),) if bias else ()
    return (*out, Rowwise("conv_silu", "b t c", ACTIVATION, axes)) if silu else out
