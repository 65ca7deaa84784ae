"""Updates in a row while 64 calls run: what each token's log-probability differs by.

`python -m benchmarks.weights.updates torch|vllm|sglang|hf keep|recompute` prints a JSON object. Two
models take turns as the active version, 20 times, while the calls generate. Afterwards each sampled
token is judged by the forward (transformers, float32) of the version that the engine names for it, and
by that of the other one. With `recompute` the two are unrelated, so that a span that is wrong by one
token shows as a large difference. With `keep` the tokens after an update see keys and values of earlier
versions, and their difference is the drift of that choice: there the second model is the first with
each weight moved by 1% of its matrix's deviation.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.weights.pauses import MODEL, VOCAB_SIZE
from tailrace.weights import TensorBytes
from tailrace_inference.adapters.engines import start_engine
from tailrace_inference.config import InferenceConfig, KvOnUpdate
from tailrace_inference.ports import Engine
from tailrace_protos.base import as_float32, as_int32, pack_int32
from tailrace_protos.generation import FinishReason, GenerateRequest, TokenChunk
from tailrace_protos.weights import ModelCard

NUM_CALLS, NUM_UPDATES = 64, 20
PROMPT_TOKENS, NEW_TOKENS = 16, 440
NOISE = 2e-4  # between float32 kernels, in nats
_MOVED = 0.01


class Call:
    """One call and its tokens."""

    def __init__(self, number: int) -> None:
        random = np.random.default_rng(number)
        self.prompt = random.integers(3, VOCAB_SIZE, PROMPT_TOKENS).astype(np.int32)
        self.request = GenerateRequest(
            f"call-{number}", f"episode-{number}", pack_int32(self.prompt), NEW_TOKENS
        )
        self.chunks: list[TokenChunk] = []
        self.is_begun, self.is_ended = asyncio.Event(), asyncio.Event()

    def on_chunk(self, chunk: TokenChunk) -> None:
        """Keeps a chunk."""
        assert chunk.error is None, chunk.error
        self.chunks.append(chunk)
        self.is_begun.set()
        if chunk.finish_reason is not None:
            self.is_ended.set()

    @property
    def is_whole(self) -> bool:
        """Says whether it ended by its budget, with all tokens."""
        is_done = self.chunks[-1].finish_reason is FinishReason.LENGTH
        return is_done and len(self.token_ids) == NEW_TOKENS

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Tokens [T]."""
        return np.concatenate([as_int32(chunk.token_ids) for chunk in self.chunks])

    @property
    def versions(self) -> NDArray[np.int64]:
        """Policy version [T] of each token."""
        spans = [span for chunk in self.chunks for span in chunk.spans]
        return np.repeat([span.policy_version for span in spans], [span.num_tokens for span in spans])

    def differences(self, model: Any) -> NDArray[np.float32]:
        """Difference [T] of the log-probabilities from those of `model`."""
        ids = torch.from_numpy(np.concatenate([self.prompt, self.token_ids])).long()
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0, PROMPT_TOKENS - 1 : -1].float().log_softmax(-1)
        own = logprobs.gather(1, ids[PROMPT_TOKENS:, None])[:, 0].numpy()
        reported = np.concatenate([as_float32(chunk.inference_logprobs) for chunk in self.chunks])
        found: NDArray[np.float32] = np.abs(own - reported)
        return found


def make_models(kv_on_update: KvOnUpdate) -> list[Any]:
    """The two versions."""
    models = [_make_model(0), _make_model(1)]
    if kv_on_update == "keep":
        first, second = (model.state_dict() for model in models)
        for name, weight in second.items():
            noise = torch.randn_like(weight) * first[name].std()
            weight.copy_(first[name] + _MOVED * noise)
    return models


def _make_model(seed: int) -> Any:
    """Random weights, far from uniform predictions."""
    torch.manual_seed(seed)
    content = MODEL | {"initializer_range": 0.1}
    config = AutoConfig.for_model(str(content.pop("model_type")), **content)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


async def update(engine: Engine, model: Any, policy_version: int) -> None:
    """Stages and applies a model."""
    tensors = [
        TensorBytes(name, "float32", tuple(p.shape), memoryview(p.detach().numpy()).cast("B"))
        for name, p in model.named_parameters()
    ]
    await engine.stage(iter(tensors), policy_version)
    await engine.apply()


async def generate(engine: Engine, models: list[Any]) -> list[Call]:
    """All calls, while the versions change."""
    await update(engine, models[0], 0)
    calls = [Call(number) for number in range(NUM_CALLS)]
    for call in calls:
        engine.submit(call.request, call.on_chunk)
    await asyncio.gather(*(call.is_begun.wait() for call in calls))
    for policy_version in range(1, NUM_UPDATES + 1):
        await update(engine, models[policy_version % 2], policy_version)
        await asyncio.sleep(0.02)  # some tokens of each version
    num_ended = sum(call.is_ended.is_set() for call in calls)
    assert not num_ended, f"{num_ended} calls ended before the last update"
    await asyncio.gather(*(call.is_ended.wait() for call in calls))
    return calls


def judged(calls: list[Call], models: list[Any]) -> dict[str, float]:
    """Figures of the calls."""
    by_model = np.stack(
        [np.concatenate([call.differences(model) for call in calls]) for model in models]
    )
    versions = np.concatenate([call.versions for call in calls])
    places = np.arange(len(versions))
    right, wrong = by_model[versions % 2, places], by_model[1 - versions % 2, places]
    return {
        "num_tokens": len(versions),
        "num_versions": len(set(versions.tolist())),
        "num_interrupted": sum(not call.is_whole for call in calls),
        "num_backwards": sum(bool((np.diff(call.versions) < 0).any()) for call in calls),
        "mean_difference": float(right.mean()),
        "max_difference": float(right.max()),
        "share_beyond_noise": float((right > NOISE).mean()),
        "mean_difference_of_other_version": float(wrong.mean()),
    }


async def measure(name: str, kv_on_update: KvOnUpdate) -> dict[str, float]:
    """All figures of one engine."""
    models = make_models(kv_on_update)
    config = InferenceConfig(
        engine=name, device="cpu", dtype="float32", max_running=NUM_CALLS, kv_cache_tokens=65536,
        kv_on_update=kv_on_update,
    )  # fmt: skip
    engine = await start_engine(ModelCard(json.dumps(MODEL).encode(), {}), config)
    calls = await generate(engine, models)
    await engine.close()
    return judged(calls, models)


def main() -> None:
    """Measure one engine and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=["torch", "vllm", "sglang", "hf"])
    parser.add_argument("kv_on_update", choices=["keep", "recompute"])
    chosen = parser.parse_args()
    print(json.dumps(asyncio.run(measure(chosen.engine, chosen.kv_on_update))))


if __name__ == "__main__":
    main()
