"""What an engine profile decides."""

from typing import NamedTuple, Protocol

from attncalc.attention.base import Attention
from attncalc.cache import CacheTensor
from attncalc.dtypes import Formats
from attncalc.model import LayerGroup, Model
from attncalc.ops import Ops
from attncalc.reach import Reach
from attncalc.workload import Workload


class Execution(NamedTuple):
    """The form that a step executes, and the form whose tensors the cache holds."""

    form: str
    cached: str


class Engine(Protocol):
    """An engine, in the version that it follows."""

    name: str
    follows: str

    def check_formats(self, formats: Formats) -> None:
        """Refuse a storage format that the engine does not have."""

    def execution(self, attention: Attention, workload: Workload, form: str | None) -> Execution:
        """How a step runs; `form` is the user's wish, which an engine may have to refuse."""

    def attended(self, model: Model, group: LayerGroup) -> Reach:
        """The tokens that a query attends to."""

    def cache(self, model: Model, group: LayerGroup, form: str, tp: int) -> tuple[CacheTensor, ...]:
        """The tensors that one layer keeps on one of `tp` GPUs; the group is whole."""

    def stored(self, model: Model, group: LayerGroup, ops: Ops) -> Ops:
        """The operations with the cache rows that they really read and write."""

    def rule(self, model: Model, group: LayerGroup) -> str:
        """Why this group's cache differs from the logical one; empty if it does not."""
