"""Values that this field writes in other words than we do."""

from __future__ import annotations

import re
from typing import Any

from tailrace.config.settings.setting import choice

dtype = choice("float32", "bfloat16", fp32="float32", bf16="bfloat16")
engine_dtype = choice(
    "auto", "float32", "bfloat16", "float16", fp32="float32", bf16="bfloat16", fp16="float16"
)
attention = choice(
    "packed",
    "sdpa",
    "eager",
    "flash_attention_2",
    "flash_attention_3",
    auto="packed",
    fa2="flash_attention_2",
    fa3="flash_attention_3",
)
strategy = choice(
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
schedule = choice("constant", "linear", "cosine", constant_with_warmup="constant")

_RANGE = re.compile(r"list\(range\((\d+)(?:, *(\d+))?\)\)")


def devices(mapping: Any) -> list[int]:
    """Numbers of GPUs: a list, or text like `list(range(0, 4))`; raises `ValueError` for others."""
    if isinstance(mapping, str) and (found := _RANGE.fullmatch(mapping.strip())):
        first, end = found.groups()
        mapping = list(range(int(first)) if end is None else range(int(first), int(end)))
    is_list = isinstance(mapping, list) and all(type(gpu) is int for gpu in mapping)
    if not is_list or not mapping:
        raise ValueError(
            f"expected numbers of GPUs, like [0, 1] or list(range(0, 2)), found {mapping!r}"
        )
    return list(mapping)
