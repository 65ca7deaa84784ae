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

MOST_GPUS = 65_536  # of a run: more are a mistake, and lists of them would fill the memory
_RANGE = re.compile(r"list\(range\((\d+)(?:, *(\d+))?\)\)")
_LIST = re.compile(r"(?:list\()?\[(\d{1,9}(?:, *\d{1,9})*)\]\)?")


def devices(mapping: Any) -> list[int]:
    """Returns the numbers of GPUs: a list, or text like `list(range(0, 4))` or `[0, 1]`.

    Raises `ValueError` for anything else.
    """
    if isinstance(mapping, str):
        mapping = _listed(mapping.strip())
    is_list = isinstance(mapping, list) and all(type(gpu) is int for gpu in mapping)
    if not is_list or not mapping:
        raise ValueError(
            f"expected numbers of GPUs, like [0, 1] or list(range(0, 2)), found {mapping!r}"
        )
    return list(mapping)


def _listed(text: str) -> list[int] | str:
    """Numbers that the text lists; the text itself if it is no list."""
    if found := _LIST.fullmatch(text):
        return [int(number) for number in found[1].split(",")]
    if not (found := _RANGE.fullmatch(text)):
        return text
    first, end = found.groups()
    numbers = range(int(first)) if end is None else range(int(first), int(end))
    check_gpus(numbers.stop - numbers.start)
    return list(numbers)


def check_gpus(count: int) -> None:
    """Raises `ValueError` for more GPUs than a run has."""
    if count > MOST_GPUS:
        raise ValueError(f"{count:,} GPUs in all: give at most {MOST_GPUS:,}")


def whole_number(value: Any, least: int = 1, greatest: int = 10**9) -> int:
    """Coerces `value` to an integer: an integer, or a float like `1e3`; `ValueError` for others."""
    is_whole = type(value) is int or (isinstance(value, float) and value.is_integer())
    if not is_whole or value < least:
        raise ValueError(f"expected a whole number from {least} on, found {value!r}")
    if value > greatest:
        raise ValueError(f"expected a whole number up to {greatest:,}, found {value:,}")
    return int(value)


def whole_number_at(key: str, lookup: Lookup, default: int | None = None) -> int:
    """Coerces the value at a key that a setting needs to an integer; the `ValueError` names the key."""
    try:
        return whole_number(lookup(key, default))
    except ValueError as error:
        raise ValueError(f"needs {key}: {error}") from error
