"""The torch layer of `attncalc.attention.csa`: DeepSeek-V4's attention with overlapping, plain or no compression.

Shapes: B batch, T new tokens, D hidden size, H heads, c head width, E entries, m tokens of a block, o = 2 where blocks
overlap, else 1.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from attncalc.attention.csa import CSA
from attncalc.attention.rotary import Rotary, Table
from attncalc.attention.torch_base import (
    Cache,
    KernelPath,
    attention_mask,
    choose_path,
    initialise,
    largest,
    linear,
    make_parameters,
    operation,
    rms_norm,
)
from attncalc.reach import FULL, Reach


class Branch(NamedTuple):
    """A compressor: where its parameters are, what its products are called, and the width of its entries."""

    module: str
    kv_proj: str
    gate_proj: str
    width: int


class Layer(nn.Module):
    """One KV head whose row is K and V, a window of it beside compressed entries, sinks, and grouped low-rank output.

    Parameters are `spec.weights(form)`. The cache is `window_kv` [B, 1, min(S, W), c], and where there is a compressor
    `compressed_kv` [B, 1, floor(S / m), c] and `compressor_state` [B, 1, o*m, width] in float32 (float64 where x is):
    c and z of the last o*m tokens, the indexer's beside them; with an indexer also `index_k` [B, 1, floor(S / m), K].
    Entries are scored all and masked, as transformers does. Source: DeepSeek-V4 section 2.3.
    """

    def __init__(
        self,
        spec: CSA,
        reach: Reach = FULL,
        form: str = "direct",
        *,
        cached: str | None = None,
        path: KernelPath | None = None,
        rotary: Rotary | None = None,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if form not in spec.forms or cached not in (None, form):
            raise ValueError(f"form {form!r}, cached {cached!r}: this layer has only the form {spec.forms[0]!r}")
        self.spec, self.reach, self.form, self.cached = spec, reach, form, form
        self.path = choose_path(path, self.paths(spec), "no fused kernel has sinks and entries")
        self.rotary = rotary or Rotary(interleaved=True)
        self.eps = eps
        self.branches = [Branch("compressor", "compressor_kv_proj", "compressor_gate_proj", spec.head_dim)]
        if spec.sparse:
            index = Branch("compressor.indexer", "index_k_proj", "index_gate_proj", spec.index_head_dim)
            self.branches.append(index)
        make_parameters(self, spec.weights(form), device=device, dtype=dtype)
        initialise(self)

    @classmethod
    def paths(cls, spec: CSA) -> tuple[KernelPath, ...]:  # noqa: ARG003
        """The ways to compute it."""
        return ("reference",)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """[B, T, D] -> [B, T, D]; the new tokens come after the `cache.length` that the cache has seen."""
        cache = Cache() if cache is None else cache
        spec, start, new_tokens = self.spec, cache.length, x.shape[1]
        table = self.rotary.table(start, new_tokens, spec.rope_dim, x.device)
        q_a = rms_norm(linear(self, "q_a_proj", x), self.get_parameter("q_a_norm.weight"), self.eps)
        q = linear(self, "q_b_proj", q_a).view(*x.shape[:2], spec.num_heads, spec.head_dim).transpose(1, 2)
        q = self._rotate(rms_norm(q, None, self.eps), table)
        kv = rms_norm(linear(self, "kv_proj", x), self.get_parameter("kv_norm.weight"), self.eps)
        rows = cache.append("window_kv", self._rotate(kv.unsqueeze(1), table), self.reach)
        keys, index_k = rows, None
        if spec.compress_ratio:
            made = self._compress(x, cache)
            entries = _append(cache, "compressed_kv", made[0])
            keys = torch.cat((rows, entries), dim=2)
            if spec.sparse:
                index_k = _append(cache, "index_k", made[1])
        cache.advance(new_tokens)
        blocks = []
        for first in range(0, new_tokens, spec.score_block):
            part = slice(first, first + spec.score_block)
            at = Table(table.cos[part], table.sin[part])
            mask = self._mask(x[:, part], q_a[:, part], at, start + first, rows.shape[2], start + new_tokens, index_k)
            blocks.append(self._attend(q[:, :, part], keys, mask))
        # V carries the rotation of its own position: turned back by that of the query, the distance is left.
        out = self._rotate(torch.cat(blocks, dim=2), Table(table.cos, -table.sin)).transpose(1, 2)
        groups = out.reshape(-1, spec.o_groups, spec.num_heads * spec.head_dim // spec.o_groups).transpose(0, 1)
        o_a = self.get_parameter("o_a_proj.weight").view(spec.o_groups, spec.o_lora_rank, -1)
        with operation("o_a_proj"):
            low = groups @ o_a.mT
        return linear(self, "o_b_proj", low.transpose(0, 1).reshape(*x.shape[:2], -1))

    def _rotate(self, x: Tensor, table: Table) -> Tensor:
        """Turn the last values of each row."""
        plain = x.shape[-1] - self.spec.rope_dim
        return torch.cat((x[..., :plain], self.rotary.rotate(x[..., plain:], table)), dim=-1)

    def _attend(self, q: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
        """Softmax over all keys [B, 1, N, c] and the sinks, of queries [B, H, T, c]; mask [B or 1, T, N]."""
        batch, heads, queries, width = q.shape
        with operation("score"):
            logits = q.reshape(batch, heads * queries, width) @ keys[:, 0].mT
        logits = logits.view(batch, heads, queries, -1) * width**-0.5
        logits = logits.masked_fill(~mask.unsqueeze(1), -torch.inf)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        sinks = self.get_parameter("sinks").to(logits.dtype).view(1, heads, 1, 1).expand(batch, -1, queries, -1)
        weights = torch.cat((logits, sinks), dim=-1).softmax(dim=-1)[..., :-1].to(keys.dtype)
        with operation("value"):
            out = weights.reshape(batch, heads * queries, -1) @ keys[:, 0]
        return out.view(q.shape)

    def _mask(
        self, x: Tensor, q_a: Tensor, table: Table, start: int, rows: int, context: int, index_k: Tensor | None
    ) -> Tensor:
        """Which of `rows` window rows and of the entries the queries from `start` on attend to: [B or 1, T, N]."""
        spec, device = self.spec, x.device
        # Aligned to the last new token, of which these queries need not be the last.
        ahead = context - start
        window = attention_mask(self.reach, ahead, rows, start, device)
        if window is None:
            window = torch.ones(ahead, rows, dtype=torch.bool, device=device)
        window = window[: x.shape[1]].unsqueeze(0)
        if not spec.compress_ratio:
            return window
        seen = torch.arange(start + 1, start + x.shape[1] + 1, device=device) // spec.compress_ratio
        entries = torch.arange(context // spec.compress_ratio, device=device) < seen[:, None]
        chosen = entries.unsqueeze(0) if index_k is None else self._choose(x, q_a, table, entries, index_k)
        return torch.cat((window.expand(chosen.shape[0], -1, -1), chosen), dim=-1)

    def _choose(self, x: Tensor, q_a: Tensor, table: Table, visible: Tensor, index_k: Tensor) -> Tensor:
        """The top k of the visible entries for each query, [B, T, E]; of equal scores, which ReLU makes, the first."""
        spec, index = self.spec, "compressor.indexer"
        q = linear(self, f"{index}.q_b_proj", q_a, "index_q_proj").view(*x.shape[:2], spec.index_heads, -1)
        q = self._rotate(q.transpose(1, 2), table)
        head_weights = linear(self, f"{index}.scorer.weights_proj", x, "index_weights_proj")
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        with operation("index_score"):
            products = q.flatten(1, 2) @ index_k[:, 0].mT
        products = products.view(*q.shape[:3], -1).to(wide).relu() * spec.index_head_dim**-0.5
        head_weights = head_weights.to(wide).transpose(1, 2).unsqueeze(-1) * spec.index_heads**-0.5
        scores = (products * head_weights).sum(dim=1).masked_fill(~visible, -torch.inf)
        return largest(scores, spec.index_topk)

    def _compress(self, x: Tensor, cache: Cache) -> list[Tensor]:
        """The entries that the new tokens complete, [B, 1, new, width] for each compressor; the state moves on."""
        spec, start, new_tokens = self.spec, cache.length, x.shape[1]
        m, o = spec.compress_ratio, spec.blocks_pooled
        made = []
        for branch in self.branches:
            made.append(linear(self, f"{branch.module}.kv_proj", x, branch.kv_proj))
            made.append(linear(self, f"{branch.module}.gate_proj", x, branch.gate_proj))
        state = cache.buffers.get("compressor_state")
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        if state is None:
            state = x.new_zeros(x.shape[0], 1, o * m, sum(t.shape[-1] for t in made), dtype=wide)
        seen = torch.cat((state[:, 0], torch.cat(made, dim=-1).to(wide)), dim=1)
        # A slice would keep all of it alive.
        cache.buffers["compressor_state"] = seen[:, None, new_tokens:].clone()
        done, after = start // m, (start + new_tokens) // m
        # Blocks from the one before the first new entry's on, where they overlap; `seen` begins o*m tokens ago.
        first = (done - o + 1) * m
        offset = first - (start - o * m)
        number = after - done + o - 1
        blocks = seen[:, offset : offset + number * m].view(x.shape[0], number, m, seen.shape[-1])
        halves = torch.split(blocks, [o * b.width for b in self.branches for _ in "cz"], dim=-1)
        return [
            self._pool(halves[2 * i], halves[2 * i + 1], branch, done, x.dtype)
            for i, branch in enumerate(self.branches)
        ]

    def _pool(self, kv: Tensor, gate: Tensor, branch: Branch, done: int, dtype: torch.dtype) -> Tensor:
        """Entries from c and z of whole blocks, [B, blocks, m, o * width] each; the first entry is number `done`."""
        m, width = self.spec.compress_ratio, branch.width
        gate = gate + self.get_parameter(f"{branch.module}.position_bias").to(gate.dtype)
        if self.spec.blocks_pooled == 2:
            if done == 0:
                gate[:, 0] = -torch.inf  # no block came before the first
            kv, gate = (torch.cat((a[:, :-1, :, :width], a[:, 1:, :, width:]), dim=2) for a in (kv, gate))
        pooled = (kv * gate.softmax(dim=2)).sum(dim=2).to(dtype)
        entries = rms_norm(pooled, self.get_parameter(f"{branch.module}.kv_norm.weight"), self.eps).unsqueeze(1)
        table = self.rotary.table(done * m, entries.shape[2], self.spec.rope_dim, kv.device, step=m)
        return self._rotate(entries, table)


def _append(cache: Cache, name: str, new: Tensor) -> Tensor:
    """All rows, the new ones last."""
    past = cache.buffers.get(name)
    rows = new if past is None else torch.cat((past, new), dim=2) if new.shape[2] else past
    # A slice of a larger tensor would keep it alive.
    cache.buffers[name] = rows.contiguous()
    return rows
