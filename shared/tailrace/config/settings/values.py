"""Values that this field writes in other words than we do."""

from __future__ import annotations

import re
from typing import Any

from tailrace.config.settings.setting import choice

dtype = choice(
    float32="float32",
    fp32="float32",
    bfloat16="bfloat16",
    bf16="bfloat16",
)
engine_dtype = choice(
    auto="auto",
    float32="float32",
    fp32="float32",
    bfloat16="bfloat16",
    bf16="bfloat16",
    float16="float16",
    fp16="float16",
)
attention = choice(
    packed="packed",
    auto="packed",
    sdpa="sdpa",
    eager="eager",
    fa2="flash_attention_2",
    flash_attention_2="flash_attention_2",
    fa3="flash_attention_3",
    flash_attention_3="flash_attention_3",
)
strategy = choice(
    auto="auto",
    single="single",
    fsdp2="fsdp2",
    fsdp_train="fsdp2",
    fsdp2_train="fsdp2",
    deepspeed="deepspeed",
    deepspeed_train="deepspeed",
)
schedule = choice(
    constant="constant",
    constant_with_warmup="constant",
    linear="linear",
    cosine="cosine",
)

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
