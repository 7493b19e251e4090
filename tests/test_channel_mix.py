"""RWKV-7's channel mixing against a loop written from its definition, and torch's own counts of its products."""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import attncalc
from attncalc.channel_mix import ChannelMix
from attncalc.dtypes import Formats
from attncalc.workload import Workload

SPEC = ChannelMix(hidden_size=6, intermediate_size=20)


class Mixer(nn.Module):
    """y_t = relu((x_t + (x_{t-1} - x_t) * x_k) W_key)^2 W_value; what is kept is the last x."""

    def __init__(self, spec: ChannelMix) -> None:
        super().__init__()
        self.x_k = nn.Parameter(torch.rand(spec.hidden_size, dtype=torch.float64))
        self.key = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False, dtype=torch.float64)
        self.value = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False, dtype=torch.float64)

    def forward(self, x: torch.Tensor, last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = torch.cat([last, x[:, :-1]], dim=1)
        mixed = x + (before - x) * self.x_k
        out: torch.Tensor = self.value(torch.relu(self.key(mixed)) ** 2)
        return out, x[:, -1:]


def test_parameters_cache_and_products_are_those_of_a_module() -> None:
    mixer, workload = Mixer(SPEC), Workload(context=9, new_tokens=5, batch=2)
    assert {w.name: w.sizes for w in SPEC.weights()} == {n: tuple(p.shape) for n, p in mixer.named_parameters()}
    x = torch.rand(2, 5, 6, dtype=torch.float64)
    with FlopCounterMode(display=False) as counter:
        _, kept = mixer(x, torch.zeros(2, 1, 6, dtype=torch.float64))
    assert sum(op.flops for op in SPEC.ops(workload).contractions) == counter.get_total_flops()
    (tensor,) = SPEC.cache()
    assert tensor.at(9, 2, Formats()).shape == (2, 1, *kept.shape[1:])


def test_what_is_kept_is_what_a_later_step_needs() -> None:
    mixer, x = Mixer(SPEC), torch.rand(2, 7, 6, dtype=torch.float64)
    whole, _ = mixer(x, torch.zeros(2, 1, 6, dtype=torch.float64))
    first, last = mixer(x[:, :4], torch.zeros(2, 1, 6, dtype=torch.float64))
    rest, _ = mixer(x[:, 4:], last)
    assert torch.allclose(torch.cat([first, rest], dim=1), whole, atol=0, rtol=1e-12)


def test_a_step_reads_and_writes_the_last_input_once() -> None:
    moved = {"cache": 0, "cache_write": 0}
    for op in SPEC.ops(Workload(context=9, new_tokens=5, batch=2)).contractions:
        for role in moved:
            moved[role] += op.bytes(Formats())[role]  # type: ignore[index]
    assert moved == {"cache": 2 * 6 * 2, "cache_write": 2 * 6 * 2}


def test_shards_split_the_width_and_repeat_the_shift() -> None:
    assert SPEC.shard(8).intermediate_size == 3
    assert SPEC.shard(8).cache() == SPEC.cache()
    assert SPEC.inactive_parameters == 0


def test_rwkv7_has_the_parameters_that_its_paper_counts() -> None:
    """arXiv 2503.14456, appendix: 2DV + 4D + LD(12D + 2(d_w + d_a + d_v + d_g) + 19) - (2D d_v + D)."""
    D, V, L = 2048, 50_304, 24
    d_w, d_a, d_v, d_g = 96, 96, 64, 256
    expected = 2 * D * V + 4 * D + L * D * (12 * D + 2 * (d_w + d_a + d_v + d_g) + 19) - (2 * D * d_v + D)
    model = attncalc.load("rwkv7-goose-1.4b-pile")
    assert model.parameters() == expected == 1_465_014_272  # published as 1.47B


def test_cache_of_rwkv7() -> None:
    # 24 layers of 32 fp32 states of 64 x 64, and two shifts of 2,048 in bf16
    made = attncalc.load("rwkv7-goose-1.4b-pile").cache(1000)
    assert made.bytes_total == made.bytes_fixed == 24 * (32 * 64 * 64 * 4 + 2 * 2048 * 2)
    assert made.bytes_per_token == 0
