"""Values that other systems write in another way, and numbers."""

import re
from typing import Any

from tailrace.config.settings.rules import Lookup, value_names

dtype = value_names("float32", "bfloat16", fp32="float32", bf16="bfloat16")
engine_dtype = value_names(
    "auto", "float32", "bfloat16", "float16", fp32="float32", bf16="bfloat16", fp16="float16"
)
attention = value_names(
    "packed",
    "sdpa",
    "eager",
    "flash_attention_2",
    "flash_attention_3",
    auto="packed",
    fa2="flash_attention_2",
    fa3="flash_attention_3",
)
strategy = value_names(
    "auto",
    "single",
    "fsdp2",
    "deepspeed",
    "megatron",
    fsdp_train="fsdp2",
    fsdp2_train="fsdp2",
    deepspeed_train="deepspeed",
    megatron_train="megatron",
)
schedule = value_names("constant", "linear", "cosine", constant_with_warmup="constant")

_RANGE = re.compile(r"list\(range\((\d+)(?:, *(\d+))?\)\)")


def devices(mapping: Any) -> list[int]:
    """Returns the numbers of GPUs: a list, or text like `list(range(0, 4))`; else `ValueError`."""
    if isinstance(mapping, str) and (found := _RANGE.fullmatch(mapping.strip())):
        first, end = found.groups()
        mapping = list(range(int(first)) if end is None else range(int(first), int(end)))
    is_list = isinstance(mapping, list) and all(type(gpu) is int for gpu in mapping)
    if not is_list or not mapping:
        raise ValueError(
            f"expected numbers of GPUs, like [0, 1] or list(range(0, 2)), found {mapping!r}"
        )
    return list(mapping)


def whole_number(value: Any, least: int = 1, greatest: int = 10**9) -> int:
    """Coerces `value` to an integer: an integer, or a float like `1e3`; `ValueError` for others."""
    is_whole = type(value) is int or (isinstance(value, float) and value.is_integer())
    if not is_whole or not least <= value <= greatest:
        raise ValueError(f"expected a whole number from {least} on, found {value!r}")
    return int(value)


def whole_number_at(key: str, lookup: Lookup, default: int | None = None) -> int:
    """Coerces the value at a key that a setting needs to an integer; the `ValueError` names the key."""
    try:
        return whole_number(lookup(key, default))
    except ValueError as error:
        raise ValueError(f"needs {key}: {error}") from error
