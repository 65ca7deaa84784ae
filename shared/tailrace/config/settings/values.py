"""Values that this field writes in other words than we do."""

from __future__ import annotations

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
schedule = choice(
    constant="constant",
    constant_with_warmup="constant",
    linear="linear",
    cosine="cosine",
)
