"""Named axes: the vocabulary in which weights, cache tensors and operations are written.

An axis letter stands for a `Dim`: a size and the field names it comes from. Shapes are strings of letters,
`"b h t r"`, and parentheses join axes that are stored as one, as in einops: `"(h e) q"`.
"""

from collections.abc import Mapping
from math import prod
from typing import NamedTuple


class Dim(NamedTuple):
    """The size of an axis and how it is derived, such as `Dim(576, "kv_lora_rank + qk_rope_head_dim")`."""

    size: int
    label: str


Axes = Mapping[str, Dim]


def letters(shape: str) -> tuple[str, ...]:
    """The axes of `"(h e) q"`, in order: `("h", "e", "q")`."""
    return tuple(shape.replace("(", " ").replace(")", " ").split())


def sizes(shape: str, axes: Axes) -> tuple[int, ...]:
    """The stored shape: joined axes are one, `"(h e) q"` -> `(heads * width, rank)`."""
    out: list[int] = []
    joined: list[int] | None = None
    for word in shape.replace("(", " ( ").replace(")", " ) ").split():
        if word == "(":
            joined = []
        elif word == ")":
            out.append(prod(joined or ()))
            joined = None
        else:
            (out if joined is None else joined).append(axes[word].size)
    return tuple(out)


def elements(shape: str, axes: Axes) -> int:
    """Number of elements: the product of all axes."""
    return prod(axes[a].size for a in letters(shape))


class Weight(NamedTuple):
    """A parameter of a layer: its name in the module, its axes, and whether the optimiser sees it."""

    name: str
    shape: str
    axes: Axes
    buffer: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape as torch prints it; a linear weight is [out, in]."""
        return sizes(self.shape, self.axes)

    @property
    def elements(self) -> int:
        """Number of elements."""
        return elements(self.shape, self.axes)

    @property
    def kind(self) -> str:
        """`weight` for a matrix that a product reads; `vector` for norms, biases, decays, sinks and taps."""
        matrix = len(self.sizes) > 1 and "norm" not in self.name and "conv1d" not in self.name
        return "weight" if matrix and self.name.endswith("weight") else "vector"

    @property
    def formula(self) -> str:
        """`num_heads * head_dim * hidden_size`."""
        return " * ".join(parenthesised(self.axes[a].label) for a in letters(self.shape))


def parenthesised(label: str) -> str:
    """`label`, in parentheses if it is a sum."""
    return f"({label})" if " " in label else label
