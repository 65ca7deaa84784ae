"""Pauses of an engine at weight updates, and its tokens per second while it stages.

`python -m benchmarks.weights.pauses torch|vllm keep|recompute` prints a JSON object; each engine runs
in its own environment, on the CPU (`benchmarks/gpu` does the same on a GPU). 16 calls are in flight all
the time, each at another place of its reply, and their tokens are reported one by one. A pause is the
longest time in which no call gets a token around an update, less the usual time between two: with the
wait for a token boundary, and the keys and values that are computed again until the first call goes on.
That of one call is longer, since others may come before it: it stands beside.

Versions are staged in turns: not at all, without a break, and at the pace of a learner.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from itertools import pairwise
from statistics import median, quantiles

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM

from tailrace.weights import TensorBytes
from tailrace.weights.background import in_background
from tailrace.weights.mappings import SegmentMappings
from tailrace.weights.segment import SegmentFolder
from tailrace.weights.tensors import fill, layout, verify, views
from tailrace_inference.adapters.engines import start_engine
from tailrace_inference.config import InferenceConfig, KvOnUpdate
from tailrace_inference.ports import Engine
from tailrace_protos.base import pack_int32
from tailrace_protos.generation import GenerateRequest, TokenChunk
from tailrace_protos.weights import ModelCard, WeightManifest

IN_FLIGHT, NUM_UPDATES, WINDOW_S, NUM_WINDOWS = 16, 20, 1.0, 6
LEARNER_S = 1 / 3  # between two versions: the demo trains three steps a second
REPLY_TOKENS = 256
VOCAB_SIZE = 512
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 768,
    "vocab_size": VOCAB_SIZE,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
}


class Load:
    """Calls in flight, and the times of their tokens."""

    def __init__(self, engine: Engine, in_flight: int = IN_FLIGHT) -> None:
        self._engine = engine
        self._random = np.random.default_rng(0)
        self._num_calls = 0
        self.times_s: list[float] = []  # of all tokens
        self.running: dict[str, list[float]] = {}  # times of the tokens of each call
        self.num_tokens = 0
        self.is_over = False
        self._token = asyncio.Event()
        for max_tokens in self._random.permutation(in_flight) + 1:
            self._submit(int(max_tokens) * REPLY_TOKENS // in_flight)

    async def next_token(self) -> None:
        """Waits for a token."""
        self._token.clear()
        await self._token.wait()

    def _submit(self, max_tokens: int = REPLY_TOKENS) -> None:
        self._num_calls += 1
        name = str(self._num_calls)
        prompt = self._random.integers(3, VOCAB_SIZE, 32).astype(np.int32)
        request = GenerateRequest(name, f"episode-{name}", pack_int32(prompt), max_tokens)
        self._engine.submit(request, self._on_chunk)

    def _on_chunk(self, chunk: TokenChunk) -> None:
        assert chunk.error is None, chunk.error
        now_s = time.perf_counter()
        self.times_s.append(now_s)
        self.running.setdefault(chunk.call_id, []).append(now_s)
        self._token.set()
        self.num_tokens += len(chunk.token_ids) // 4
        if chunk.finish_reason is not None:
            del self.running[chunk.call_id]
            if not self.is_over:
                self._submit()


class Version:
    """A version in shared memory, staged as the inference service does."""

    def __init__(self, tensors: list[TensorBytes]) -> None:
        self._mappings = SegmentMappings()
        offsets, size = layout(tensors)
        self.segment = SegmentFolder("bench", "pauses").create(size)
        self.manifest = WeightManifest(0, "a", 0, None, fill(self.segment.data, tensors, offsets), size)

    async def stage(self, engine: Engine, policy_version: int) -> None:
        """Maps, verifies and stages it."""
        buffer = self._mappings.read(self.segment.name, self.manifest.num_bytes)
        await in_background(verify, self.manifest, buffer)
        await engine.stage(views(self.manifest, buffer), policy_version)


def made() -> tuple[ModelCard, Version]:
    """The model's card and its weights."""
    torch.manual_seed(0)
    content = dict(MODEL)
    config = AutoConfig.for_model(content.pop("model_type"), **content)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = [
        TensorBytes(name, "float32", tuple(p.shape), memoryview(p.detach().numpy()).cast("B"))
        for name, p in model.named_parameters()
    ]
    words = Tokenizer(models.WordLevel({str(at): at for at in range(VOCAB_SIZE)}, unk_token="0"))
    card = ModelCard(json.dumps(MODEL).encode(), {"tokenizer.json": words.to_str().encode()})
    return card, Version(tensors)


async def rates(
    engine: Engine, load: Load, version: Version, learner_s: float = LEARNER_S
) -> dict[str, float]:
    """Tokens per second in turns without staging, without a break in it, and with a learner's pace."""
    paces_s = (None, 0.0, learner_s)
    found: dict[float | None, list[float]] = {pace_s: [] for pace_s in paces_s}
    num_staged = dict.fromkeys(paces_s, 0)
    for pace_s in paces_s * NUM_WINDOWS:
        began_s, before = time.perf_counter(), load.num_tokens
        while (now_s := time.perf_counter()) - began_s < WINDOW_S:
            if pace_s is None:
                await asyncio.sleep(0.01)
                continue
            await version.stage(engine, 1)
            num_staged[pace_s] += 1
            await asyncio.sleep(max(0.0, now_s + pace_s - time.perf_counter()))
        found[pace_s].append((load.num_tokens - before) / (time.perf_counter() - began_s))
    return {
        "tokens_per_s": median(found[None]),
        "tokens_per_s_staging": median(found[0.0]),
        "versions_staged_per_s": num_staged[0.0] / NUM_WINDOWS / WINDOW_S,
        "tokens_per_s_learner": median(found[learner_s]),
        "versions_per_s_learner": num_staged[learner_s] / NUM_WINDOWS / WINDOW_S,
    }


def longest_s(times_s: list[float], began_s: float, ended_s: float) -> float:
    """Longest time between two tokens around an update."""
    before_s = max(at for at in times_s if at < began_s)
    around = [before_s, *(at for at in times_s if at >= began_s)]
    return max(late - early for early, late in pairwise(around) if early < ended_s)


async def pauses(engine: Engine, load: Load, version: Version) -> dict[str, float]:
    """Swaps and pauses of updates in a row, in milliseconds."""
    swaps_ms, pauses_ms, of_calls_ms = [], [], []
    for update in range(2, 2 + NUM_UPDATES):
        await version.stage(engine, update)
        await asyncio.sleep(0.3)
        gaps = np.diff(load.times_s[-400:])
        usual_s = median(gaps[gaps > 1e-4])  # tokens of one step come together
        began_s, calls = time.perf_counter(), list(load.running.values())
        swaps_ms.append(1e3 * await engine.apply())
        ended_s = time.perf_counter()
        while any(times_s[-1] < ended_s and times_s in load.running.values() for times_s in calls):
            await load.next_token()
        pauses_ms.append(1e3 * (longest_s(load.times_s, began_s, ended_s) - usual_s))
        lasting = [times_s for times_s in calls if times_s[-1] >= ended_s]
        of_calls_ms += [1e3 * (longest_s(each, began_s, ended_s) - usual_s) for each in lasting]
    kinds = {"swap": swaps_ms, "pause": pauses_ms, "call_pause": of_calls_ms}
    return {
        f"{kind}_{name}_ms": value
        for kind, values in kinds.items()
        for name, value in (("p50", median(values)), ("p99", quantiles(values, n=100)[98]))
    }


async def measure(name: str, kv_on_update: KvOnUpdate) -> dict[str, float]:
    """All figures of one engine."""
    card, version = made()
    config = InferenceConfig(
        engine=name, device="cpu", dtype="float32", stream_chunk_tokens=1, stream_interval_ms=0.0,
        max_running=32, kv_cache_tokens=16384, kv_on_update=kv_on_update,
    )  # fmt: skip
    engine = await start_engine(card, config)
    watching = asyncio.create_task(engine.watch())
    await version.stage(engine, 1)
    await engine.apply()
    load = Load(engine)
    await asyncio.sleep(2.0)  # first steps of an engine are slower
    found = await rates(engine, load, version) | await pauses(engine, load, version)
    load.is_over = True
    watching.cancel()
    await engine.close()
    version.segment.close(delete=True)
    return found


def main() -> None:
    """Measure one engine and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=["torch", "vllm", "sglang"])
    parser.add_argument("kv_on_update", choices=["keep", "recompute"])
    chosen = parser.parse_args()
    print(json.dumps(asyncio.run(measure(chosen.engine, chosen.kv_on_update))))


if __name__ == "__main__":
    main()
