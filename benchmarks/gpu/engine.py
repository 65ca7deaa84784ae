"""One engine on a GPU behind our protocol: tokens per second, updates in a row, sleep.

`python -m benchmarks.gpu.engine torch|vllm tokens|updates|sleep` prints a JSON object; so does
`generate`, the rival: transformers' `generate` in static batches. The model has the shape of
Qwen3-0.6B and random weights in bfloat16.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import Any

import numpy as np
import torch

from benchmarks.bench_engine import Job, run_generate
from benchmarks.engine_rival import adapter_answer, rate
from benchmarks.gpu.model import VOCAB_SIZE, card_of, held_gib, make_model, version_of
from benchmarks.weights.pauses import Load, Version, pauses, rates
from tailrace_inference.adapters.engines import start_engine
from tailrace_inference.config import InferenceConfig
from tailrace_inference.ports import Engine

SIZE = "0.6B"
IN_FLIGHT = ((1, 3), (16, 32), (64, 128), (256, 512))  # and the number of jobs
UPDATED_IN_FLIGHT = 64
LEARNER_S = 2.0  # between two versions
UTILIZATION = 0.5
Figures = dict[str, Any]


def make_jobs(count: int) -> list[Job]:
    """Prompts of 128 to 512 tokens with 64 to 256 new ones."""
    rng = np.random.default_rng(1)
    sizes = zip(rng.integers(128, 513, count), rng.integers(64, 257, count), strict=True)
    return [
        Job(rng.integers(3, VOCAB_SIZE, prompt).astype(np.int32), int(new)) for prompt, new in sizes
    ]


async def started(name: str, **settings: Any) -> tuple[Engine, Version]:
    """The engine with its first version."""
    model = make_model(SIZE, torch.bfloat16)
    version = version_of(model)
    del model
    torch.cuda.empty_cache()
    config = InferenceConfig(
        engine=name, max_running=256, max_model_len=2048, gpu_memory_utilization=UTILIZATION, **settings
    )
    engine = await start_engine(card_of(SIZE), config)
    await version.stage(engine, 1)
    await engine.apply()
    return engine, version


async def tokens(name: str) -> Figures:
    """Tokens per second by the number in flight."""
    engine, version = await started(name)
    answer = adapter_answer(engine)
    await rate(answer, make_jobs(64), 64)
    found = {
        str(in_flight): await rate(answer, make_jobs(count), in_flight)
        for in_flight, count in IN_FLIGHT
    }
    await engine.close()
    version.segment.close(delete=True)
    return {"tokens_per_s": found}


def generate(name: str) -> Figures:
    """Tokens per second of `generate`, without log-probabilities."""
    model = make_model(SIZE, torch.bfloat16).eval()
    run_generate(model, make_jobs(2), 2)
    found = {}
    for in_flight, count in ((1, 2), (64, 64)):
        began_s = time.perf_counter()
        num_tokens = run_generate(model, make_jobs(count), in_flight)
        torch.cuda.synchronize()
        found[str(in_flight)] = num_tokens / (time.perf_counter() - began_s)
    return {"tokens_per_s": found}


async def updates(name: str) -> Figures:
    """20 updates while 64 calls run: none ends or starts again; their pauses, and staging's cost."""
    engine, version = await started(name, stream_chunk_tokens=1, stream_interval_ms=0.0)
    load = Load(engine, UPDATED_IN_FLIGHT)
    await asyncio.sleep(3.0)
    began_s = time.perf_counter()
    await version.stage(engine, 1)
    staged_s = time.perf_counter() - began_s
    found = await rates(engine, load, version, LEARNER_S) | await pauses(engine, load, version)
    load.is_over = True
    await engine.close()
    version.segment.close(delete=True)
    return found | {"stage_s": staged_s, "version_gib": version.manifest.num_bytes / (1 << 30)}


async def sleep(name: str) -> Figures:
    """Memory of the device in use before, during and after a sleep, and the seconds it takes."""
    before = held_gib()
    engine, version = await started(name)
    engine.allow_sleep()
    answer = adapter_answer(engine)
    await rate(answer, make_jobs(16), 16)
    awake = held_gib()
    began_s = time.perf_counter()
    await engine.pause()
    await engine.sleep()
    slept_s = time.perf_counter() - began_s
    asleep = held_gib()
    began_s = time.perf_counter()
    await engine.wake()
    await engine.resume()
    woke_s = time.perf_counter() - began_s
    again = await rate(answer, make_jobs(16), 16)
    found = {"before_gib": before, "awake_gib": awake, "asleep_gib": asleep, "again_gib": held_gib()}
    await engine.close()
    version.segment.close(delete=True)
    return found | {"sleep_s": slept_s, "wake_s": woke_s, "tokens_per_s_afterwards": again}


def main() -> None:
    """Measure one thing and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=["torch", "vllm", "sglang"])
    parser.add_argument("what", choices=["tokens", "generate", "updates", "sleep"])
    chosen = parser.parse_args()
    found = globals()[chosen.what](chosen.engine)
    figures = found if isinstance(found, dict) else asyncio.run(found)
    sys.stdout.write("\n" + json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
