"""One engine on a GPU behind our protocol: tokens per second, sleep, updates in a row.

`python -m benchmarks.gpu.engine torch|vllm tokens|updates` prints a JSON object; so does `generate`,
the rival: transformers in static batches. The model has the shape of Qwen3-0.6B and random
weights in bfloat16. `TAILRACE_ENGINE_ARGS` is what `inference.engine_args` is in an experiment.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
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
IN_FLIGHT = ((1, 2), (16, 16), (64, 64), (256, 256))  # and the number of jobs
UPDATED_IN_FLIGHT = 64
LEARNER_S = 2.0  # between two versions
UTILIZATION = 0.5
Figures = dict[str, float]


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
        engine=name, max_running=256, max_model_len=2048, gpu_memory_utilization=UTILIZATION,
        engine_args=json.loads(os.environ.get("TAILRACE_ENGINE_ARGS", "{}")), **settings,
    )  # fmt: skip
    engine = await start_engine(card_of(SIZE), config, sleeps=True)
    await version.stage(engine, 1)
    await engine.apply()
    return engine, version


async def tokens(engine: Engine, version: Version) -> Figures:
    """Tokens per second by the number in flight; what a sleep frees, and the seconds it takes."""
    answer = adapter_answer(engine)
    await rate(answer, make_jobs(64), 64)
    found = {
        f"tokens_per_s_{in_flight}": await rate(answer, make_jobs(count), in_flight)
        for in_flight, count in IN_FLIGHT
    }
    found["awake_gib"] = held_gib()
    began_s = time.perf_counter()
    await engine.pause()
    await engine.sleep()
    found |= {"sleep_s": time.perf_counter() - began_s, "asleep_gib": held_gib()}
    began_s = time.perf_counter()
    await engine.wake()
    await engine.resume()
    found["wake_s"] = time.perf_counter() - began_s
    await rate(answer, make_jobs(16), 16)  # it still answers
    return found


async def updates(engine: Engine, version: Version) -> Figures:
    """20 updates while 64 calls run: none ends or starts again; their pauses, and staging's cost."""
    load = Load(engine, UPDATED_IN_FLIGHT)
    await asyncio.sleep(3.0)
    began_s = time.perf_counter()
    await version.stage(engine, 1)
    found = {"stage_s": time.perf_counter() - began_s}
    found |= await rates(engine, load, version, LEARNER_S) | await pauses(engine, load, version)
    load.is_over = True
    return found | {"version_gib": version.manifest.num_bytes / (1 << 30)}


async def measured(name: str, what: str) -> Figures:
    """Figures of an engine; the error of an engine that ends."""
    by_token = {"stream_chunk_tokens": 1, "stream_interval_ms": 0.0} if what == "updates" else {}
    engine, version = await started(name, **by_token)
    work = asyncio.create_task({"tokens": tokens, "updates": updates}[what](engine, version))
    watching = asyncio.create_task(engine.watch())
    await asyncio.wait({work, watching}, return_when=asyncio.FIRST_COMPLETED)
    if not work.done():
        await watching
    watching.cancel()
    await engine.close()
    version.segment.close(delete=True)
    return work.result()


def generate() -> Figures:
    """Tokens per second of `generate`, without log-probabilities."""
    model = make_model(SIZE, torch.bfloat16).eval()
    run_generate(model, make_jobs(2), 2)
    found = {}
    for in_flight, count in ((1, 2), (64, 64)):
        began_s = time.perf_counter()
        num_tokens = run_generate(model, make_jobs(count), in_flight)
        torch.cuda.synchronize()
        found[f"tokens_per_s_{in_flight}"] = num_tokens / (time.perf_counter() - began_s)
    return found


def main() -> None:
    """Measure one thing and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=["torch", "vllm", "sglang"])
    parser.add_argument("what", choices=["tokens", "generate", "updates"])
    chosen = parser.parse_args()
    if chosen.what == "generate":
        figures = generate()
    else:
        figures = asyncio.run(measured(chosen.engine, chosen.what))
    sys.stdout.write("\n" + json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
