"""The cache that the mathematics needs: no pages, no padding, windows of exactly W tokens."""

from attncalc.attention.base import Attention, cached_form, check_form
from attncalc.cache import CacheTensor
from attncalc.dtypes import Formats
from attncalc.engines.base import Execution
from attncalc.model import LayerGroup, Model
from attncalc.ops import Ops
from attncalc.reach import Reach
from attncalc.workload import Workload


class Logical:
    """Every variant in the form that a good implementation takes, or in the one asked for."""

    name = "logical"
    follows = "the definitions"

    def check_formats(self, formats: Formats) -> None:
        """Every format is possible."""

    def execution(self, attention: Attention, workload: Workload, form: str | None) -> Execution:
        """The wish, or the variant's default. Only an explicit `decompressed` keeps K and V instead of latents."""
        chosen = check_form(attention, form) if form is not None else attention.default_form(workload)
        # A prompt computed decompressed by default still leaves latents behind.
        return Execution(chosen, cached_form(attention, form or attention.forms[0]))

    def attended(self, model: Model, group: LayerGroup) -> Reach:  # noqa: ARG002
        """The layer's own reach."""
        return group.reach

    def cache(self, model: Model, group: LayerGroup, form: str, tp: int) -> tuple[CacheTensor, ...]:  # noqa: ARG002
        """The variant's own layout."""
        return group.attention.shard(tp).cache(group.reach, form) if group.attention else ()

    def stored(self, model: Model, group: LayerGroup, ops: Ops) -> Ops:  # noqa: ARG002
        """As the variant says."""
        return ops

    def rule(self, model: Model, group: LayerGroup) -> str:  # noqa: ARG002
        """Nothing differs."""
        return ""


PROFILE = Logical()
