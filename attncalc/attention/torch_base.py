"""What the torch layers share: the cache, rotary embedding, norms, and named operations that a counter can see.

Shapes: B batch, T new tokens, S keys present, H query heads, G KV heads, D hidden size.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from attncalc.axes import Weight
from attncalc.reach import Reach

KernelPath = Literal["fast", "reference"]


@dataclass
class Cache:
    """What one layer keeps between steps.

    `tensors` have the names and shapes of the specification's cache, [B, heads, tokens, width]; `length` is the number
    of tokens seen, which a window forgets. `capacity` reserves room so that a full-reach decode step copies nothing.
    `lends`: the rows that the last step could attend to stay, for layers that read this cache; they are not stored.
    """

    length: int = 0
    capacity: int = 0
    buffers: dict[str, Tensor] = field(default_factory=dict)
    parts: dict[str, dict[str, int]] = field(default_factory=dict)
    reserved: set[str] = field(default_factory=set)
    lends: bool = False
    present: dict[str, Tensor] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The filled part of every buffer; one that holds several tensors side by side, as views of it."""
        out: dict[str, Tensor] = {}
        for name, buffer in self.buffers.items():
            filled = buffer[:, :, : self.length] if name in self.reserved else buffer
            widths = self.parts.get(name, {name: filled.shape[3]})
            out |= dict(zip(widths, torch.split(filled, list(widths.values()), dim=3), strict=True))
        return out

    @property
    def storage_bytes(self) -> int:
        """Bytes that the buffers really hold, shared storage once."""
        found = {b.untyped_storage().data_ptr() or id(b): b.untyped_storage().nbytes() for b in self.buffers.values()}
        return sum(found.values())

    def append(self, name: str, new: Tensor, reach: Reach, parts: dict[str, int] | None = None) -> Tensor:
        """Add the rows of the new tokens [B, heads, T, width] and return all rows that the step can attend to.

        Call it for every tensor of a layer, then `advance` once. A window or chunk keeps `reach.size` rows and shows
        the new tokens and the `reach.size - 1` before them. `parts`: the rows are these tensors side by side, by
        name and width, in one buffer that a kernel reads without a copy.
        """
        seen, added = self.length, new.shape[2]
        if parts:
            self.parts[name] = parts
        if reach.kind == "full" and self.capacity:
            if name not in self.buffers:
                shape = (*new.shape[:2], self.capacity, new.shape[3])
                self.buffers[name] = torch.zeros(shape, dtype=new.dtype, device=new.device)
                self.reserved.add(name)
            self.buffers[name][:, :, seen : seen + added] = new
            return self.buffers[name][:, :, : seen + added]
        past = self.buffers.get(name)
        if reach.kind != "full" and past is not None:
            past = past[:, :, max(0, past.shape[2] - (reach.size - 1)) :]
        present = new if past is None else torch.cat((past, new), dim=2)
        if self.lends:
            self.present[name] = present
        keep = reach.stored(seen + added)
        kept = present[:, :, -keep:]
        # A view would keep a larger storage alive: what is stored is exactly what is kept.
        exact = kept.untyped_storage().nbytes() == kept.numel() * kept.element_size()
        self.buffers[name] = kept if exact else kept.clone()
        return present

    def extend(self, name: str, rows: Tensor) -> Tensor:
        """Add rows [B, heads, rows, width] that do not stand for one token each, and return all of them."""
        past = self.buffers.get(name)
        self.buffers[name] = rows if past is None else torch.cat((past, rows), dim=2)
        return self.buffers[name]

    def lent(self, name: str, rows: int) -> Tensor:
        """The last rows [B, heads, rows, width] of a tensor, for another layer of the step that was just counted.

        Raises:
            ValueError: they are not there; a window keeps them only where `lends` is set.
        """
        held = self.present[name] if name in self.present else self.tensors.get(name)
        if held is None or held.shape[2] < rows:
            raise ValueError(f"the cache does not hold {rows} rows of {name!r}: `lends` must be set for its own layer")
        return held[:, :, held.shape[2] - rows :]

    def advance(self, new_tokens: int) -> None:
        """Count the new tokens, once all tensors of the step are in."""
        self.length += new_tokens


class CountOperations:
    """Counts the FLOPs of every `operation` while it is active; `total` includes what has no name.

    SDPA on CPU tensors dispatches to an operator that torch's counter does not know and would count as 0; its formula
    is registered here.
    """

    active: "CountOperations | None" = None

    def __init__(self) -> None:
        cpu_flash: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
        self._mode: Any = FlopCounterMode(display=False, custom_mapping={cpu_flash: _sdpa_flops})
        self.flops: Counter[str] = Counter()

    def __enter__(self) -> Self:
        self._mode.__enter__()
        CountOperations.active = self
        return self

    def __exit__(self, *error: object) -> None:
        CountOperations.active = None
        self._mode.__exit__(*error)

    @property
    def total(self) -> int:
        """All FLOPs so far."""
        return int(self._mode.get_total_flops())


def _sdpa_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """2 * B * H * T * S * (d_k + d_v), shapes in; like torch's own, it counts every pair."""
    (batch, heads, new_tokens, width), keys, value_width = q, k[-2], v[-1]
    return int(2 * batch * heads * new_tokens * keys * (width + value_width))


@contextmanager
def operation(name: str) -> Iterator[None]:
    """Names the products inside it for `CountOperations`; the names are those of the specification's operations."""
    counter = CountOperations.active
    if counter is None:
        yield
        return
    before = counter.total
    yield
    counter.flops[name] += counter.total - before


def make_parameters(module: nn.Module, weights: tuple[Weight, ...], **factory: Any) -> None:
    """Give `module` one parameter (or buffer) for each weight of a specification, under its dotted name."""
    for w in weights:
        *path, leaf = w.name.split(".")
        owner = module
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        data = torch.empty(w.sizes, **factory)
        if w.buffer:
            owner.register_buffer(leaf, data)
        else:
            owner.register_parameter(leaf, nn.Parameter(data))


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm: x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32 at least."""
    wide = x if x.dtype == torch.float64 else x.float()
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return normed if weight is None else normed * weight


def initialise(module: nn.Module) -> None:
    """Normal weights of standard deviation fan_in^-1/2, norms 1, biases 0, other vectors standard normal."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1)
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1.0)


def linear(module: nn.Module, name: str, x: Tensor, counted: str = "") -> Tensor:
    """The product x W^T + b with `name`.weight and, if there is one, `name`.bias; counted as `counted` or `name`."""
    owner = module.get_submodule(name)
    with operation(counted or name):
        return nn.functional.linear(x, owner.get_parameter("weight"), bias_of(owner))


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, heads * width] -> [B, heads, T, width]."""
    return x.view(*x.shape[:-1], heads, -1).transpose(1, 2)


def bias_of(owner: nn.Module) -> Tensor | None:
    """The bias beside a weight."""
    return owner.get_parameter("bias") if hasattr(owner, "bias") else None


def attention_mask(
    reach: Reach, new_tokens: int, keys: int, length: int, device: torch.device, rows: slice | None = None
) -> Tensor | None:
    """[T, S] booleans, True where a query may attend; None where one query may attend to every key present.

    `length` tokens came before; the keys present end at the last new token. Bottom-right aligned. `rows`: those of
    some of the new tokens.
    """
    if new_tokens == 1 and reach.pairs(1, length + 1, "causal") == keys:
        return None
    query = torch.arange(length, length + new_tokens, device=device)[rows or slice(None), None]
    key = torch.arange(length + new_tokens - keys, length + new_tokens, device=device)[None, :]
    allowed = key <= query
    if reach.kind == "window":
        allowed &= key > query - reach.size
    elif reach.kind == "chunk":
        allowed &= key // reach.size == query // reach.size
    return allowed


def attend(q: Tensor, k: Tensor, v: Tensor, reach: Reach, length: int, scale: float) -> Tensor:
    """Causal softmax attention in one fused kernel: q [B, H, T, d], k [B, G, S, d], v [B, G, S, e] -> [B, H, T, e].

    K and V are never repeated for the H / G heads of a group by this code.
    """
    (batch, heads, new_tokens, _), (groups, keys) = q.shape, k.shape[1:3]
    if q.device.type == "cpu" and k.shape[3] != v.shape[3]:
        return attend_in_blocks(q, k, v, reach, length, scale)
    sdpa = nn.functional.scaled_dot_product_attention
    if new_tokens == 1:
        # The heads of a group are rows of one product: a kernel that knows no groups reads K and V once.
        mask = attention_mask(reach, 1, keys, length, q.device)
        rows = q.reshape(batch, groups, heads // groups, -1)
        mask = mask if mask is None else mask.expand(heads // groups, -1)
        return sdpa(rows, k, v, attn_mask=mask, scale=scale).reshape(batch, heads, 1, -1)
    if groups == 1:
        # Views with stride 0. `enable_gqa` has no kernel for the widths of a latent, and its fallback copies.
        k, v = k.expand(-1, heads, -1, -1), v.expand(-1, heads, -1, -1)
    grouped = 1 < groups < heads
    if keys == new_tokens and (reach.kind == "full" or new_tokens <= reach.size):  # nothing came before
        return sdpa(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    mask = attention_mask(reach, new_tokens, keys, length, q.device)
    return sdpa(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)


QUERY_BLOCK = 128
"""Queries whose scores stand in memory at once; `measure.plan` counts on it."""


def attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, reach: Reach, length: int, scale: float) -> Tensor:
    """`attend` as two products for each block of queries, with scores of one block alone in memory.

    For CPUs, where no fused kernel takes values of another width than the keys: the general one copies K and V and
    keeps all scores.
    """
    (batch, heads, new_tokens, _), (groups, keys) = q.shape, k.shape[1:3]
    out = q.new_empty(batch, heads, new_tokens, v.shape[3])
    for start in range(0, new_tokens, QUERY_BLOCK):
        rows = slice(start, start + QUERY_BLOCK)
        block = q[:, :, rows]
        logits = block.reshape(batch, groups, -1, q.shape[3]) @ k.transpose(2, 3)
        logits = logits.view(batch, heads, -1, keys).mul_(scale)
        mask = attention_mask(reach, new_tokens, keys, length, q.device, rows)
        if mask is not None:
            logits.masked_fill_(~mask, -torch.inf)
        weights = logits.softmax(dim=-1).view(batch, groups, -1, keys)
        out[:, :, rows] = (weights @ v).view(batch, heads, -1, v.shape[3])
    return out


def attend_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    reach: Reach,
    length: int,
    scale: float,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    allowed: Tensor | None = None,
) -> Tensor:
    """`attend` as two products, with what no fused kernel does.

    `softcap` bounds the logits, c * tanh(logit / c) (Gemma 2, arXiv 2408.00118); `sinks` [H] are logits that take
    weight from the keys and give no value (gpt-oss, arXiv 2508.10925). `bias` [B, H, T, S] is added to the logits.
    `allowed` [B, 1, T, S] replaces the mask of `reach`.
    """
    (batch, heads, new_tokens, _), (groups, keys) = q.shape, k.shape[1:3]
    rows = q.reshape(batch, groups, heads // groups * new_tokens, -1)
    with operation("score"):
        logits = rows @ k.transpose(2, 3)
    logits = logits.view(batch, heads, new_tokens, keys) * scale
    if bias is not None:
        logits = logits + bias
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    mask = attention_mask(reach, new_tokens, keys, length, q.device) if allowed is None else allowed
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if sinks is not None:
        column = sinks.to(logits.dtype).view(1, heads, 1, 1).expand(batch, -1, new_tokens, -1)
        logits = torch.cat((logits, column), dim=-1)
    weights = logits.softmax(dim=-1)[..., :keys].to(v.dtype)
    with operation("value"):
        out = weights.reshape(batch, groups, -1, keys) @ v
    return out.view(batch, heads, new_tokens, -1)


def attend_beside(
    path: KernelPath,
    own: tuple[Tensor, Tensor],
    shared: tuple[Tensor, Tensor] | None,
    v: Tensor,
    reach: Reach,
    length: int,
    scale: float,
) -> Tensor:
    """Attention whose keys are a part of each group's own beside a part that all groups share.

    `own` is q [B, H, T, n] and K [B, G, S, n], `shared` q [B, H, T, R] and K [B, 1, S, R]; v [B, G, S, e]. For one new
    token the fast path adds the logits of the two parts and builds no K; otherwise K is put together once.
    """
    q, k = own
    if shared is not None and path == "fast" and q.shape[2] == 1:
        return _one_beside(own, shared, v, reach, length, scale)
    if shared is not None:
        q, k = torch.cat((q, shared[0]), dim=-1), torch.cat((k, shared[1].expand(-1, k.shape[1], -1, -1)), dim=-1)
    kernel = attend if path == "fast" else attend_reference
    return kernel(q, k, v, reach, length, scale)


def _one_beside(
    own: tuple[Tensor, Tensor], shared: tuple[Tensor, Tensor], v: Tensor, reach: Reach, length: int, scale: float
) -> Tensor:
    (q, k), (q_shared, k_shared) = own, shared
    (batch, heads, _, _), (groups, keys) = q.shape, k.shape[1:3]
    logits = (q_shared.reshape(batch, 1, heads, -1) @ k_shared.mT).view(batch, groups, -1, keys)
    logits = (logits + q.reshape(batch, groups, heads // groups, -1) @ k.mT) * scale
    mask = attention_mask(reach, 1, keys, length, q.device)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return (logits.softmax(dim=-1).to(v.dtype) @ v).view(batch, heads, 1, -1)


def attend_masked(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float, *, names: tuple[str, str]
) -> tuple[Tensor, Tensor]:
    """Softmax attention over the keys that `allowed` [.., T, S] names: output [B, H, T, e], weights [B, H, T, S].

    A query without keys gives 0. `names` are those of the two products.
    """
    (batch, heads, new_tokens, _), (groups, keys) = q.shape, k.shape[1:3]
    with operation(names[0]):
        logits = q.reshape(batch, groups, -1, q.shape[-1]) @ k.transpose(2, 3)
    logits = logits.view(batch, heads, new_tokens, keys) * scale
    logits = logits if logits.dtype == torch.float64 else logits.float()
    # A row of -inf alone has no softmax: its keys are allowed for a moment, and then weigh nothing.
    some = allowed.any(dim=-1, keepdim=True)
    weights = logits.masked_fill(~allowed & some, -torch.inf).softmax(dim=-1) * some
    with operation(names[1]):
        out = weights.to(v.dtype).reshape(batch, groups, heads // groups * new_tokens, keys) @ v
    return out.view(batch, heads, new_tokens, -1), weights


def allowed_blocks(chosen: Tensor, size: int, start: int, keys: int) -> Tensor:
    """[.., T, S] booleans: the earlier keys, and the own one, that lie in a chosen block [.., T, blocks]."""
    query = torch.arange(start, start + chosen.shape[-2], device=chosen.device)[:, None]
    causal = torch.arange(keys, device=chosen.device)[None, :] <= query
    return chosen.repeat_interleave(size, dim=-1)[..., :keys] & causal


def largest(scores: Tensor, count: int) -> Tensor:
    """Booleans of the shape of `scores`: the `count` largest of the last axis, of equals the first, never -inf."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, True) & (scores > -torch.inf)  # noqa: FBT003


def choose_path(path: KernelPath | None, existing: tuple[KernelPath, ...], why: str) -> KernelPath:
    """The path asked for, or the first that exists.

    Raises:
        ValueError: there is no such path.
    """
    chosen = path or existing[0]
    if chosen not in existing:
        raise ValueError(f"path {chosen!r}: {why}; this layer has {', '.join(existing)}")
    return chosen
