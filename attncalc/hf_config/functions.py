"""Functions that a configuration names, known ones of which change no number; another name is refused.

An activation may have weights (xIELU) or two inputs (SwiGLU), and a way of choosing experts a bias.
"""

from attncalc.errors import AttncalcError, shown
from attncalc.hf_config.config import Config

_NAMES = """gelu gelu_10 gelu_accurate gelu_fast gelu_new gelu_python gelu_python_tanh gelu_pytorch_tanh hardswish
    laplace leaky_relu linear mish quick_gelu relu relu2 relu6 sigmoid silu sqrtsoftplus swish tanh"""
ACTIVATIONS = frozenset(_NAMES.split())
"""Names of `ACT2FN` in transformers 5.24, activations.py, but for the two with weights, prelu and xielu."""

_ACTIVATION_FIELDS = (
    "hidden_act", "hidden_activation", "activation_function", "activation", "mlp_hidden_act", "mamba_hidden_act",
)  # fmt: skip
_CHOICES = {
    "scoring_func": ("softmax", "sigmoid", "sqrtsoftplus"),
    "score_func": ("softmax", "sigmoid", "sqrtsoftplus"),
    "moe_router_activation_func": ("softmax", "sigmoid"),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
}


def check_functions(c: Config, own: tuple[str, ...] = ()) -> None:
    """Refuse a function that is not known; `own`: activations of this architecture, which its reader counts.

    Raises:
        AttncalcError: its name is unknown, or it is null where no other field names one.
    """
    given = [name for name in _ACTIVATION_FIELDS if name in c.data]
    for name in given:
        # GemmaConfig of old has both fields, and null in the one that its code does not read.
        if c.data[name] is not None or given == [name]:
            check_activation(c, name, c.data[name], own)
    for name, known in _CHOICES.items():
        if c.data.get(name) is not None:
            _check(c, name, c.data[name], known, "is a way of choosing experts that the reader does not know")


def check_activation(c: Config, name: str, value: object, own: tuple[str, ...] = ()) -> None:
    """Refuse what is not the name of an activation without weights, or one of `own`."""
    _check(c, name, value, (*ACTIVATIONS, *own), "is an activation that the reader does not know")


def _check(c: Config, name: str, value: object, known: tuple[str, ...], rule: str) -> None:
    if not isinstance(value, str) or value not in known:
        raise AttncalcError(c.path(name), rule, got=shown(value))
