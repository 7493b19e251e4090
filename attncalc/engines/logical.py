"""The cache that the mathematics needs: no pages, no padding, windows of exactly W tokens."""

from attncalc.attention.base import Attention, cached_form, check_form
from attncalc.engines.base import Execution
from attncalc.engines.layered import Layered
from attncalc.engines.options import EngineOptions
from attncalc.workload import Workload


class Logical(Layered):
    """Every variant in the form that a good implementation takes, or in the one asked for."""

    name = "logical"
    follows = "the definitions"
    options = ("pp", "dp")

    def execution(
        self,
        attention: Attention,
        workload: Workload,
        form: str | None,
        options: EngineOptions,  # noqa: ARG002
    ) -> Execution:
        """The wish, or the variant's default. Only an explicit `decompressed` keeps K and V instead of latents."""
        chosen = check_form(attention, form) if form is not None else attention.default_form(workload)
        # A prompt computed decompressed by default still leaves latents behind.
        return Execution(chosen, cached_form(attention, form or attention.forms[0]))


PROFILE = Logical()
