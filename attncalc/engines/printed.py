"""The floats of an engine's log, made as it makes them; no formula reads them, and no other rule of engines has any.

Source: vLLM 0.33 `v1/core/kv_cache_utils.py`, `utils/mem_utils.py`.
"""


def vllm_concurrency(blocks: int, needed: int, length: int) -> tuple[str, int]:
    """How many requests of `length` tokens a pool holds, to two decimals, and the tokens that follow from it.

    tokens = int(blocks / needed * length), where rounding may cost the last one, as in what vLLM prints
    """
    concurrency = blocks / needed
    return f"{concurrency:.2f}", int(concurrency * length)


def vllm_gib(n: int) -> str:
    """GiB rounded to two decimals; a zero at the end is left out."""
    return str(round(n / 2**30, 2))
