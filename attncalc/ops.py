"""Operations: what a layer computes, written once, from which every number about it is derived.

A `Contraction` is a product over named axes, such as `b h t r, b s r -> b h t s`, the scores of absorbed MLA. Its
FLOPs (2 per multiply-add), its GEMM shape, the bytes of its operands by role, its intensity and its printed
formula follow from the axes. Where two axes are causally coupled, `pairs` replaces the product of their sizes.

What is no contraction (softmax, norms, rotation, gates) is a `Rowwise` with its own stated count, one FLOP for
each addition, multiplication, comparison, division or transcendental; it is reported apart and never mixed in.
"""

from collections.abc import Mapping
from math import prod
from typing import Literal, NamedTuple

from attncalc.axes import Axes, Dim, elements, letters, parenthesised, sizes
from attncalc.dtypes import Formats, whole_bytes

Role = Literal["weight", "cache", "cache_write", "activation", "on_chip"]

ROLES: tuple[Role, ...] = ("weight", "cache", "cache_write", "activation", "on_chip")


class Part(NamedTuple):
    """A stored tensor behind an operand: where it lives, how it is laid out, and the kind that picks its format.

    `on_chip` costs no traffic: scores between two products of one kernel, or a latent that the score product
    has already read.
    """

    name: str
    shape: str
    role: Role
    kind: str

    def bits(self, axes: Axes, formats: Formats) -> int:
        """Bits moved to or from memory: rows of the last axis in the format of this kind."""
        if self.role == "on_chip":
            return 0
        *lead, width = sizes(self.shape, axes)
        return prod(lead) * formats.row(self.kind, width)


def weight(name: str, shape: str) -> Part:
    """A parameter that the operation reads once."""
    return Part(name, shape, "weight", "weight")


def activation(name: str, shape: str) -> Part:
    """A tensor that goes through memory in the activation format."""
    return Part(name, shape, "activation", "activation")


def on_chip(name: str, shape: str) -> Part:
    """A tensor that never reaches memory."""
    return Part(name, shape, "on_chip", "activation")


class Term(NamedTuple):
    """A side of a contraction: its logical axes and the stored parts that make it up."""

    shape: str
    parts: tuple[Part, ...]


def term(side: Term | Part) -> Term:
    """A side as it is, or as the one stored tensor that it is."""
    return side if isinstance(side, Term) else Term(" ".join(letters(side.shape)), (side,))


class Contraction(NamedTuple):
    """left x right -> out over named axes.

    `pairs` is the number of (t, s) pairs that are computed and `pairs_formula` says how; None is all of them.
    """

    name: str
    left: Term
    right: Term
    out: Term
    axes: Axes
    pairs: int | None = None
    pairs_formula: str = ""

    @property
    def expression(self) -> str:
        """`b h t r, b s r -> b h t s`."""
        return f"{self.left.shape}, {self.right.shape} -> {self.out.shape}"

    @property
    def free(self) -> tuple[str, ...]:
        """Every axis once, without the coupled pair."""
        every = dict.fromkeys(letters(f"{self.left.shape} {self.right.shape} {self.out.shape}"))
        return tuple(a for a in every if self.pairs is None or a not in ("t", "s"))

    @property
    def flops(self) -> int:
        """2 x the product of all axis sizes, with `pairs` in place of t x s."""
        return 2 * prod(self.axes[a].size for a in self.free) * (1 if self.pairs is None else self.pairs)

    @property
    def formula(self) -> str:
        """`2 * batch * num_heads * (kv_lora_rank + qk_rope_head_dim) * pairs`."""
        names = [parenthesised(self.axes[a].label) for a in self.free]
        return " * ".join(["2", *names, *([] if self.pairs is None else ["pairs"])])

    @property
    def symbols(self) -> dict[str, int]:
        """The value of every factor of `formula`."""
        out = {self.axes[a].label: self.axes[a].size for a in self.free}
        return out if self.pairs is None else out | {"pairs": self.pairs}

    @property
    def gemm(self) -> dict[str, int]:
        """The GEMM that executes it: M rows of the left, N of the right, K contracted, and how many of them."""
        left, right, out = letters(self.left.shape), letters(self.right.shape), letters(self.out.shape)
        groups = {
            "gemm_batch": [a for a in out if a in left and a in right],
            "m": [a for a in out if a in left and a not in right],
            "n": [a for a in out if a in right and a not in left],
            "k": [a for a in left if a in right and a not in out],
        }
        return {name: prod(self.axes[a].size for a in group) for name, group in groups.items()}

    @property
    def parts(self) -> tuple[Part, ...]:
        """Every stored tensor, read or written."""
        return self.left.parts + self.right.parts + self.out.parts

    def bytes(self, formats: Formats) -> dict[Role, int]:
        """Bytes by role: weights and cache read, cache written, activations in and out."""
        out = dict.fromkeys(ROLES, 0)
        for part in self.parts:
            out[part.role] += whole_bytes(part.bits(self.axes, formats), f"{self.name}.{part.name}")
        return out


class Rowwise(NamedTuple):
    """`per_element` FLOPs for each element of `shape`: stated, not derived. `pairs` as in a contraction."""

    name: str
    shape: str
    per_element: int
    axes: Axes
    pairs: int | None = None
    pairs_formula: str = ""

    @property
    def flops(self) -> int:
        """per_element x elements."""
        if self.pairs is None:
            return self.per_element * elements(self.shape, self.axes)
        return self.per_element * self.pairs * prod(self.axes[a].size for a in letters(self.shape))

    @property
    def formula(self) -> str:
        """`5 * batch * num_heads * pairs`."""
        names = [parenthesised(self.axes[a].label) for a in letters(self.shape)]
        return " * ".join([str(self.per_element), *names, *([] if self.pairs is None else ["pairs"])])

    @property
    def symbols(self) -> dict[str, int]:
        """The value of every factor of `formula`."""
        out = {self.axes[a].label: self.axes[a].size for a in letters(self.shape)}
        return out if self.pairs is None else out | {"pairs": self.pairs}


class Ops(NamedTuple):
    """What one layer computes in one step."""

    contractions: tuple[Contraction, ...]
    rowwise: tuple[Rowwise, ...]


# FLOPs per element of what is no contraction. A sigmoid, exponential or square root counts 1.
SOFTMAX = 5  # maximum, subtraction, exponential, sum, division
RMS_NORM = 4  # square, sum, scale, weight
LAYER_NORM = 7  # mean, subtraction, square, sum, scale, weight, bias
ROTATION = 3  # two products and a sum for each rotated value
SOFTCAP = 3  # division, tanh, product
GATE = 2  # sigmoid and product
GATED_ACTIVATION = 3  # sigmoid or tanh form, product with the input, product with the up projection
ACTIVATION = 2
BIAS = 1
RESIDUAL = 1


def product(name: str, left: Term | Part, right: Term | Part, out: Term | Part, axes: Mapping[str, Dim]) -> Contraction:
    """A contraction without causal coupling."""
    return Contraction(name, term(left), term(right), term(out), axes)
