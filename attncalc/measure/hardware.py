"""The device that layers run on: its timer, its free memory, and its own peaks, measured in the same run."""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from attncalc.errors import AttncalcError

TORCH_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WARM_UP = 2
L2_FLUSH_BYTES = 256 * 2**20
"""More than the last-level cache of any GPU: writing it before a run leaves nothing of the operands in there."""


def check_device(name: str) -> None:
    """Refuse a device that this torch cannot run on.

    Raises:
        AttncalcError: no such device here.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise AttncalcError("--device", "this torch finds no CUDA device", hint="Use cpu, or meta to count alone")
    if name == "mps" and not torch.backends.mps.is_available():
        raise AttncalcError("--device", "this torch finds no MPS device", hint="Use cpu, or meta to count alone")


def device_name(name: str) -> str:
    """What runs the layers, as the system calls it."""
    if name == "cuda":
        return str(torch.cuda.get_device_name())
    return f"{name}, {torch.get_num_threads()} threads" if name == "cpu" else name


def free_bytes(name: str) -> int | None:
    """Memory that can still be had; None where nothing is allocated or nobody says."""
    if name == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    if name == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory())
    if name == "cpu":
        try:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (ValueError, OSError):
            return None
    return None


def synchronise(name: str) -> None:
    """Wait for everything that was started."""
    if name == "cuda":
        torch.cuda.synchronize()
    elif name == "mps":
        torch.mps.synchronize()


def allocated_bytes(name: str) -> int | None:
    """What the allocator has given out; CUDA only."""
    return int(torch.cuda.memory_allocated()) if name == "cuda" else None


def median_seconds(run: Callable[[], object], device: str, repeat: int) -> float:
    """Median of `repeat` runs after warm-up: CUDA events with the L2 flushed before each, else the wall clock."""
    for _ in range(1 if device == "cpu" else WARM_UP):
        run()
    synchronise(device)
    if device == "cuda":
        return statistics.median(_cuda_seconds(run) for _ in range(repeat))
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        synchronise(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _cuda_seconds(run: Callable[[], object]) -> float:
    torch.empty(L2_FLUSH_BYTES, dtype=torch.int8, device="cuda").zero_()
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


@dataclass(frozen=True)
class Peaks:
    """What the device reaches in the easiest work: a large GEMM and a large copy, in the dtype of the layers."""

    flops_per_s: float
    bytes_per_s: float


def measure_peaks(device: str, dtype: str, repeat: int) -> Peaks:
    """Peaks of this device, now: 2 n^3 over the time of an n x n x n GEMM; read and written bytes of a copy."""
    kind = TORCH_DTYPES[dtype]
    n = 8192 if device == "cuda" else 2048 if device == "mps" else 1536
    size = 2**30 if device == "cuda" else 2**27
    a, b = (torch.randn(n, n, device=device).to(kind) for _ in range(2))
    gemm = median_seconds(lambda: a @ b, device, repeat)
    source = torch.zeros(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    copy = median_seconds(lambda: target.copy_(source), device, repeat)
    return Peaks(2 * n**3 / gemm, 2 * size / copy)
