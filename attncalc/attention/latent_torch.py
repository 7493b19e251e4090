"""What the torch layers over latents share: the forms of `attncalc.attention.latent`, each with its own products.

Shapes: B batch, T new tokens, S keys present, H heads, L latent, R RoPE key, n and v widths of a key and a value.
"""

from abc import abstractmethod

import torch
from torch import Tensor, nn

from attncalc.attention.mla import MLA
from attncalc.attention.mla_split import MLASplit
from attncalc.attention.rotary import Rotary
from attncalc.attention.torch_base import (
    Cache,
    KernelPath,
    attend,
    attend_reference,
    choose_path,
    initialise,
    make_parameters,
    operation,
)
from attncalc.reach import Reach

PATHS: tuple[KernelPath, ...] = ("fast", "reference")


class LatentLayer(nn.Module):
    """Causal attention over latents in one form; see `attncalc.attention.latent`.

    `cached` is a form that keeps what this one shall keep: the latents, or K and V of all heads (`decompressed`).
    Decompressed over cached latents is for whole prompts only, since earlier K and V are gone.
    """

    def __init__(
        self,
        spec: MLA | MLASplit,
        reach: Reach,
        form: str,
        *,
        cached: str | None,
        path: KernelPath | None,
        rotary: Rotary,
        softmax_scale: float,
        eps: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        cached = cached or form
        if form not in spec.forms or cached not in spec.forms:
            raise ValueError(f"form {form!r}, cached {cached!r}: the forms are {', '.join(spec.forms)}")
        if cached == "decompressed" and form != "decompressed":
            raise ValueError(f"form {form!r} reads latents, which are not kept where K and V are")
        self.reach, self.form, self.cached = reach, form, cached
        self.path = choose_path(path, PATHS, "no such path")
        self.rotary, self.softmax_scale, self.eps = rotary, softmax_scale, eps
        make_parameters(self, spec.weights(form), device=device, dtype=dtype)
        initialise(self)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; the new tokens come after the `cache.length` that the cache has seen."""
        cache = Cache() if cache is None else cache
        start = cache.length
        q = self.query(self.query_source(x), start)
        k, v = self.present(x, cache)
        cache.advance(x.shape[1])
        kernel = attend if self.path == "fast" else attend_reference
        return self.output(x, kernel(q, k, v, self.reach, start, self.softmax_scale))

    def present(self, x: Tensor, cache: Cache) -> tuple[Tensor, Tensor]:
        """Keep what the new tokens add, and return K and V as the form's core reads them."""
        start = cache.length
        if self.form == "decompressed" and self.cached != "decompressed" and start:
            raise ValueError("decompressed needs K and V of all earlier tokens in the cache; use expanded")
        key, value = self.latents(x, start)
        if self.cached == "decompressed":
            k, v = self.per_head(key, value)
            return cache.append("k", k, self.reach), cache.append("v", v, self.reach)
        present = self.keep(cache, key, value)
        if self.form in ("absorbed", "merged"):
            return present
        return self.per_head(*(present if self.form == "expanded" else (key, value)))

    def query_source(self, x: Tensor) -> Tensor:
        """What the queries are made from: x [B, T, D] itself, or a latent of it."""
        return x

    @abstractmethod
    def query(self, source: Tensor, start: int) -> Tensor:
        """[B, T, D or Q] -> [B, H, T, n + R], or in the latent space [B, H, T, L + R]."""

    @abstractmethod
    def latents(self, x: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """[B, T, D] -> the rows of the keys and of the values, [B, 1, T, L + R] and [B, 1, T, L]."""

    @abstractmethod
    def keep(self, cache: Cache, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put the new rows into the cache and return those present, [B, 1, S, L + R] and [B, 1, S, L]."""

    @abstractmethod
    def per_head(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of all heads from the latents, [B, H, S, n + R] and [B, H, S, v]."""

    @abstractmethod
    def output(self, x: Tensor, out: Tensor) -> Tensor:
        """The weighted values [B, H, T, v], or latents [B, H, T, L], -> [B, T, D]."""


def head_product(name: str, x: Tensor, weight: Tensor) -> Tensor:
    """A product of each head with its own matrix: [B, H, T, i] x [H, i, o] -> [B, H, T, o].

    One batch of H products with B * T rows each, so that the matrices are not repeated for the batch.
    """
    batch, heads, tokens, _ = x.shape
    with operation(name):
        out = torch.bmm(x.transpose(0, 1).reshape(heads, batch * tokens, -1), weight)
    return out.view(heads, batch, tokens, -1).transpose(0, 1)
