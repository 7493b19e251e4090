"""What transformers keeps and computes for a configuration: the real model, on the meta device, beside the estimate.

Tensors on the meta device have shapes and dtypes and no memory, so that a model of any size runs a prefill and one
decode step in seconds. Nothing is downloaded, no code but that of transformers is executed, and no weight is read.
"""

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from attncalc.errors import AttncalcError, shown

_DispatchMode: Any = TorchDispatchMode  # whose methods have no types
MAX_LAYERS = 10_000


@dataclass(frozen=True)
class Kept:
    """Equal tensors of a cache: how many there are, and the shape of one."""

    tensor: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    bytes: int


class Step(NamedTuple):
    """One step: what is kept after it, and FLOPs of the attention modules by layer.

    `flops` is None where no module was seen to write to the cache: a cache of the model's own kind.
    """

    new_tokens: int
    context: int
    cache: tuple[Kept, ...]
    flops: dict[int, int] | None

    @property
    def cache_bytes(self) -> int:
        """Of all tensors."""
        return sum(t.bytes for t in self.cache)

    @property
    def total(self) -> int | None:
        """FLOPs of all layers."""
        return None if self.flops is None else sum(self.flops.values())


class Run(NamedTuple):
    """A prefill, and a decode step of one token after it."""

    prefill: Step
    decode: Step


@dataclass(frozen=True)
class Reference:
    """A model of transformers on the meta device."""

    model: Any = field(repr=False)

    @property
    def model_type(self) -> str:
        """Its configuration's."""
        return str(self.model.config.model_type)

    @property
    def parameters(self) -> int:
        """Elements of all parameters, tied ones once; buffers are left out."""
        return sum(p.numel() for p in self.model.parameters())

    @property
    def buffers(self) -> int:
        """Elements of the buffers that a checkpoint holds."""
        stored = self.model.state_dict(keep_vars=True)
        return sum(b.numel() for b in stored.values() if not isinstance(b, nn.Parameter))

    def run(self, context: int, batch: int = 1) -> Run:
        """Prefill `context` tokens of each sequence, then decode one.

        Raises:
            AttncalcError: the model keeps no cache, or cannot run on the meta device.
        """
        tokens = torch.zeros(batch, context, dtype=torch.long, device="meta")
        where = self.model_type
        with (
            _quiet(),
            refusing(where, "transformers cannot run this model on the meta device"),
            torch.no_grad(),
            Watch(self.model) as watch,
        ):
            cache = _called(self.model, tokens, None)
            prefill = Step(context, context, kept(cache), watch.flops_by_layer())
            watch.clear()
            cache = _called(self.model, tokens[:, :1], cache)
            decode = Step(1, context + 1, kept(cache), watch.flops_by_layer())
        return Run(prefill, decode)


def _called(model: Any, tokens: Tensor, cache: Any) -> Any:
    """One step, and the cache after it."""
    given = {} if cache is None else {"past_key_values": cache}
    out = model(input_ids=tokens, use_cache=True, **given)
    for name in ("past_key_values", "cache_params"):
        made = getattr(out, name, None)
        if made is not None:
            return made
    raise AttncalcError(model.config.model_type, "transformers keeps no cache for this configuration")


def version() -> str:
    """Of transformers.

    Raises:
        AttncalcError: it is not installed.
    """
    try:
        return str(import_module("transformers").__version__)
    except ImportError:
        hint = 'pip install "attncalc[reference]"'
        raise AttncalcError("--against", "needs transformers, which is not installed", hint=hint) from None


def configured(data: Mapping[str, Any], where: str) -> Any:
    """The configuration that transformers makes from the fields of a `config.json`: of the text model, if it has one.

    Raises:
        AttncalcError: transformers does not know the model type, or refuses a field.
    """
    known = import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    name, inner = data.get("model_type"), data.get("text_config")
    if not isinstance(name, str) or name not in known:
        if isinstance(inner, Mapping) and str(inner.get("model_type")) in known:
            return configured(inner, f"{where}: text_config")  # a wrapper around encoders, whose text model is known
        like = _type_of(data.get("architectures"))
        if like is None:
            own = " (auto_map names code of the checkpoint, which is never run)" if data.get("auto_map") else ""
            raise AttncalcError(f"{where}: model_type", f"transformers has no such type{own}", got=shown(name))
        name, data = like, {**data, "model_type": like}
    with _quiet(), refusing(where, "transformers refuses this configuration"):
        config = text_of(known[name].from_dict(dict(data)))
    layers = getattr(config, "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > MAX_LAYERS:
        raise AttncalcError(f"{where}: num_hidden_layers", f"must be at most {MAX_LAYERS}", got=layers)
    return config


def _type_of(architectures: object) -> str | None:
    """The type of a model class that `architectures` names: Kimi K2 is a `kimi_k2` of class DeepseekV3ForCausalLM."""
    if not isinstance(architectures, list) or len(architectures) != 1:
        return None
    auto = import_module("transformers.models.auto.configuration_auto")
    for name, cls in auto.CONFIG_MAPPING_NAMES.items():
        if architectures[0] == f"{cls.removesuffix('Config')}ForCausalLM":
            return str(name)
    return None


def text_of(config: Any) -> Any:
    """The part that the causal language model is built from; Mllama's takes the whole.

    An encoder-decoder model's is the configuration itself: its decoder's part of the same class has lost its sizes.
    """
    text = config.get_text_config(decoder=True)
    if type(text) not in _causal_models() or type(text) is type(config):
        return config
    if _ties_outside(config):
        text.tie_word_embeddings = config.tie_word_embeddings
    return text


def _ties_outside(config: Any) -> bool:
    """Whether embedding and head are tied by the class around the text model, as its own configuration says."""
    auto = import_module("transformers.models.auto.modeling_auto")
    for name in ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "MODEL_FOR_MULTIMODAL_LM_MAPPING"):
        models = getattr(auto, name, {})
        if type(config) in models:
            cls: Any = models[type(config)]
            return hasattr(config, "tie_word_embeddings") and bool(getattr(cls, "_tied_weights_keys", None))
    return False


def _causal_models() -> Any:
    return import_module("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING


def built(config: Any, where: str) -> Reference:
    """The causal language model of a configuration, in bfloat16 with eager attention.

    Raises:
        AttncalcError: transformers has none, or cannot build it.
    """
    models = _causal_models()
    if type(config) not in models:
        rule = "transformers has no causal language model of this type"
        raise AttncalcError(f"{where}: model_type", rule, got=repr(config.model_type))
    with _quiet(), refusing(where, "transformers cannot build this model"):
        cls = models[type(config)]
        with torch.device("meta"):
            model = cls._from_config(config, attn_implementation="eager", dtype=torch.bfloat16)
    return Reference(model.eval())


@contextmanager
def refusing(where: str, rule: str) -> Iterator[None]:
    """Whatever transformers raises, as one line: its code is not ours, and any of its errors can come from a field."""
    try:
        yield
    except AttncalcError:
        raise
    except Exception as error:  # noqa: BLE001
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise AttncalcError(where, rule, got=f"{type(error).__name__}: {said}"[:200]) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """No warnings, no log lines, and no request of huggingface_hub, through which transformers asks for everything.

    Its setting is read from the environment once, at import, and from here at each request.
    """
    logging: Any = import_module("transformers.utils.logging")
    hub: Any = import_module("huggingface_hub.constants")
    level, offline = logging.get_verbosity(), hub.HF_HUB_OFFLINE
    logging.set_verbosity(logging.CRITICAL)
    hub.HF_HUB_OFFLINE = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hub.HF_HUB_OFFLINE = offline
        logging.set_verbosity(level)


def kept(cache: Any) -> tuple[Kept, ...]:
    """The tensors of a cache, equal ones together, in the order of the first layer that has them.

    A tensor that two attributes name counts once. Whole numbers (positions, lengths) are bookkeeping and left out.
    """
    seen = set[int]()
    found = Counter[tuple[str, tuple[int, ...], torch.dtype]]()
    for name, tensor in _tensors(cache, ""):
        if id(tensor) in seen or not tensor.is_floating_point():
            continue
        seen.add(id(tensor))
        found[name, tuple(tensor.shape), tensor.dtype] += 1
    out = []
    for (name, shape, dtype), count in found.items():
        size = count * dtype.itemsize * torch.Size(shape).numel()
        out.append(Kept(name, shape, str(dtype).removeprefix("torch."), count, size))
    return tuple(out)


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield re.sub(r"^layers\.\d+\.", "", name), value
        return
    if isinstance(value, Mapping):
        inner = list(value.items())
    elif isinstance(value, (list, tuple)):
        inner = list(enumerate(value))
    elif type(value).__module__.startswith("transformers") and hasattr(value, "__dict__"):
        inner = list(vars(value).items())
    else:
        return
    for key, item in inner:
        yield from _tensors(item, f"{name}.{key}" if name else str(key))


class Watch(_DispatchMode):  # type: ignore[misc]
    """Counts the FLOPs of every module, and sees which of them write to the cache.

    An attention module is one that writes to the cache itself, or has the class of one that does: a layer that reads
    another's K and V writes nothing. Where it is a part of a module that is also called attention (BERT's output
    projection stands beside its products), that one counts.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.modules = dict(model.named_modules())
        self.names = {module: name for name, module in self.modules.items()}
        self.stack: list[nn.Module] = []
        self.flops = Counter[str]()
        self.writers = set[type[nn.Module]]()
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        self._undo.callback(register_module_forward_pre_hook(self._into).remove)
        self._undo.callback(register_module_forward_hook(self._out_of, always_call=True).remove)
        for cls, name, method in _writing_methods():
            setattr(cls, name, self._noted(method))
            self._undo.callback(setattr, cls, name, method)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._undo.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)  # noqa: SLF001
        if count is not None and self.stack:
            number = int(count(*args, **(kwargs or {}), out_val=out))
            for name in {self.names[m] for m in self.stack if m in self.names}:
                self.flops[name] += number
        return out

    def _into(self, module: nn.Module, _: Any) -> None:
        self.stack.append(module)

    def _out_of(self, module: nn.Module, *_: Any) -> None:
        while self.stack and self.stack.pop() is not module:
            pass

    def _noted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.stack:
                self.writers.add(type(self.stack[-1]))
            return method(*args, **kwargs)

        return call

    def clear(self) -> None:
        """Start another step."""
        self.flops.clear()

    def flops_by_layer(self) -> dict[int, int] | None:
        """What the attention modules computed since `clear`, by the number of their layer."""
        if not self.writers:
            return None
        flops = Counter[int]()
        for name in self._attention():
            number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
            if self.flops[name]:
                flops[int(number[1]) if number else 0] += self.flops[name]
        return dict(sorted(flops.items()))

    def _attention(self) -> list[str]:
        chosen = set[str]()
        for name, module in self.modules.items():
            if type(module) in self.writers:
                parts = name.split(".")
                around = [".".join(parts[:i]) for i in range(1, len(parts))]
                outer = (n for n in around if type(self.modules[n]).__name__.endswith("Attention"))
                chosen.add(next(outer, name))
        return [n for n in chosen if not any(n.startswith(f"{other}.") for other in chosen)]


def _writing_methods() -> list[tuple[type, str, Callable[..., Any]]]:
    """The methods of every cache and cache layer of transformers that put something into it."""
    caches = import_module("transformers.cache_utils")
    classes: list[Any] = [caches.Cache, caches.CacheLayerMixin, caches.LinearAttentionCacheLayerMixin]
    for cls in classes:
        classes += [c for c in cls.__subclasses__() if c not in classes]
    return [
        (cls, name, method)
        for cls in classes
        for name, method in vars(cls).items()
        if name.startswith("update") and callable(method)
    ]
