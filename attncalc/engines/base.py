"""What an engine profile decides."""

from typing import NamedTuple, Protocol

from attncalc.allocation import Allocation, Request
from attncalc.attention.base import Attention
from attncalc.dtypes import Formats
from attncalc.engines.options import EngineOptions
from attncalc.model import LayerGroup, Model
from attncalc.ops import Ops
from attncalc.reach import Reach
from attncalc.workload import Workload


class Execution(NamedTuple):
    """The form that a step executes, and the form whose tensors the cache holds."""

    form: str
    cached: str


class Engine(Protocol):
    """An engine, in the version that it follows; `options` names the `EngineOptions` that it has."""

    name: str
    follows: str
    options: tuple[str, ...]

    def check(self, model: Model, request: Request) -> None:
        """Before anything is laid out.

        Raises:
            AttncalcError: the engine does not run this model or this split, or its rules in that version are not known.
        """

    def allocate(self, model: Model, request: Request) -> Allocation:
        """What the GPU that holds most allocates; fast enough to be asked for every length of a search.

        Precondition: `check` has passed.

        Raises:
            AttncalcError: the engine does not lay out these layers, or not in these formats.
        """

    def formats(self, model: Model, formats: Formats) -> Formats:
        """The formats that the engine keeps: those asked for, and its own where nothing was.

        Raises:
            AttncalcError: the engine does not have one of them.
        """

    def execution(
        self, attention: Attention, workload: Workload, form: str | None, options: EngineOptions
    ) -> Execution:
        """How a step runs; `form` is the user's wish, which an engine may have to refuse."""

    def attended(self, model: Model, group: LayerGroup) -> Reach:
        """The tokens that a query attends to."""

    def stored(self, model: Model, group: LayerGroup, ops: Ops) -> Ops:
        """The operations with the cache rows that they really read and write."""
