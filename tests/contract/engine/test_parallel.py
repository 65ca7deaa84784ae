"""One server on several devices: tensor parallelism, by two processes on the CPU."""

from __future__ import annotations

import pytest

from tests.contract.engine.harness import ENGINE, ONE_GPU, TOLERANCE, Bench

pytestmark = [
    pytest.mark.skipif(ENGINE != "vllm", reason=f"not tried with the engine {ENGINE}"),
    pytest.mark.skipif(ONE_GPU, reason="two ranks need two GPUs, or none"),
]


async def test_two_ranks_serve_the_weights_of_each_update() -> None:
    async with await Bench.start(tensor_parallel_size=2, max_running=8) as bench:
        for expected in (0, 1):
            asked = await bench.one([5, 6, 7, 8 + expected], 24, seed=3)
            assert asked.error is None
            assert len(asked.new_ids) == 24
            assert set(asked.versions()) == {bench.policy_version}
            assert asked.drift(bench.model).max() < TOLERANCE
            await bench.update()
