"""The cache that the mathematics needs: no pages, no padding, windows of exactly W tokens."""

from attncalc.attention.base import Attention, check_form
from attncalc.cache import CacheTensor
from attncalc.dtypes import Formats
from attncalc.engines.base import Execution
from attncalc.model import LayerGroup, Model
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
        chosen = check_form(attention, form) if form else attention.default_form(workload)
        kept = "decompressed" if form == "decompressed" else attention.forms[0]
        return Execution(chosen, kept)

    def attended(self, model: Model, group: LayerGroup) -> Reach:  # noqa: ARG002
        """The layer's own reach."""
        return group.reach

    def cache(self, model: Model, group: LayerGroup, form: str) -> tuple[CacheTensor, ...]:  # noqa: ARG002
        """The variant's own layout."""
        return group.attention.cache(group.reach, form) if group.attention else ()

    def rule(self, model: Model, group: LayerGroup) -> str:  # noqa: ARG002
        """Nothing differs."""
        return ""


PROFILE = Logical()
