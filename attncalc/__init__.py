"""attncalc: exact cache bytes, FLOPs and arithmetic intensity of attention, and their proof on real layers.

The public API is small and loaded on use (PEP 562): importing the package imports nothing else.

    >>> import attncalc
    >>> model = attncalc.load("deepseek-v3")
    >>> model.cache(context=131_072).bytes_total
    9210691584
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attncalc.dtypes import Formats
    from attncalc.engines.options import EngineOptions
    from attncalc.errors import AttncalcError
    from attncalc.model import Model
    from attncalc.presets import load
    from attncalc.workload import Conventions

__version__ = "0.1.0"

__all__ = ["AttncalcError", "Conventions", "EngineOptions", "Formats", "Model", "__version__", "load"]

_HOME = {
    "AttncalcError": "attncalc.errors",
    "Conventions": "attncalc.workload",
    "EngineOptions": "attncalc.engines.options",
    "Formats": "attncalc.dtypes",
    "Model": "attncalc.model",
    "load": "attncalc.presets",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'attncalc' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
