"""Tensor and pipeline parallelism of an engine, under our names and the engine's."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace_inference.config import InferenceConfig


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tensor_parallel_size": 2}, "the engine torch has one device"),
        ({"pipeline_parallel_size": 2}, "the engine torch has one device"),
        ({"engine": "vllm", "engine_args": {"data_parallel_size": 2}}, "data-parallel group"),
        ({"engine": "sglang", "engine_args": {"dp_size": 2}}, "data-parallel group"),
        (
            {"engine": "vllm", "tensor_parallel_size": 2, "engine_args": {"tensor_parallel_size": 4}},
            "the same setting",
        ),
        ({"engine": "sglang", "engine_args": {"tp_size": "two"}}, "a number from 1"),
        ({"engine": "vllm", "tensor_parallel_size": 0}, "must be at least 1"),
    ],
)
def test_sizes_that_an_engine_cannot_have_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        InferenceConfig(**settings)


@pytest.mark.parametrize(
    ("engine", "args"),
    [
        ("vllm", {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}),
        ("sglang", {"tp_size": 4, "pp_size": 2}),
    ],
)
def test_a_server_has_the_gpus_of_both_sizes(engine: str, args: dict[str, int]) -> None:
    theirs = InferenceConfig(engine=engine, engine_args=args)
    ours = InferenceConfig(engine=engine, tensor_parallel_size=4, pipeline_parallel_size=2)
    assert theirs.parallel_sizes == ours.parallel_sizes == (4, 2)
    assert theirs.gpus_per_server == ours.gpus_per_server == 8
