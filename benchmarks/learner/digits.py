"""The digits task on our engine and learner: sample, train, swap the weights, all at once.

The engine is a process beside the learner's, as in a run, with a pipe in place of queues; weights go
through shared memory, as a run's do. It samples for the step that is trained next and for `ahead` more,
and swaps weights between two tokens as soon as there are new ones, keeping keys and values: no token is
more than `ahead` steps old. With `ahead` 0 they take turns, as TRL does. Garbage is collected as in a
service.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.learner import task
from benchmarks.learner.sides import make_model
from tailrace.runtime.service import tame_garbage_collection
from tailrace.weights.mappings import SegmentMappings
from tailrace.weights.segment import SegmentFolder, SharedSegment
from tailrace.weights.tensors import TensorBytes, fill, layout, views
from tailrace_inference.config import InferenceConfig
from tailrace_inference.engine.engine import TorchEngine
from tailrace_inference.ports import OnChunk
from tailrace_learner.adapters.compute_thread import keep_freed_memory
from tailrace_learner.adapters.hf_model import prepared
from tailrace_learner.config import LearnerConfig, TrainingArgs
from tailrace_learner.core.batch.rows import PreparedGroup, TrainingRow
from tailrace_learner.core.model import attention
from tailrace_learner.core.model.policy import PolicyModel
from tailrace_learner.core.step.optimizer import SummedOptimizer
from tailrace_learner.core.step.step import StepTrainer
from tailrace_protos.base import as_float32, as_int32, pack_int32
from tailrace_protos.generation import GenerateRequest, SamplingParams, TokenChunk
from tailrace_protos.weights import WeightManifest

# More at once would delay the one that the learner waits for: one begins so many tokens after the last,
# the second when the first is done.
MAX_BATCHES = 2
BATCH_DISTANCE = task.MAX_NEW_TOKENS // MAX_BATCHES


class Rollout(NamedTuple):
    """One answer."""

    prompt: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int64]  # of the weights that sampled each token
    reward: float


class Batch:
    """A step's groups while they are sampled."""

    def __init__(self) -> None:
        self._chunks: dict[tuple[int, int], list[TokenChunk]] = {}
        self._num_open = 0

    def begin(self, prompt: int, member: int) -> OnChunk:
        """Sink for the chunks of an answer."""
        chunks = self._chunks[prompt, member] = []
        self._num_open += 1

        def on_chunk(chunk: TokenChunk) -> None:
            chunks.append(chunk)
            self._num_open -= chunk.finish_reason is not None

        return on_chunk

    @property
    def is_done(self) -> bool:
        """Returns whether all answers are complete."""
        return self._num_open == 0

    def groups(self) -> list[list[Rollout]]:
        """Answers by prompt."""
        members = range(task.GROUP_SIZE)
        return [
            [_rollout(prompt, self._chunks[index, member]) for member in members]
            for index, prompt in enumerate(map(prompt_ids, task.PROMPTS))
        ]


def prompt_ids(prompt: str) -> NDArray[np.int64]:
    """A token per byte."""
    return np.frombuffer(prompt.encode(), np.uint8).astype(np.int64)


def _rollout(prompt: NDArray[np.int64], chunks: list[TokenChunk]) -> Rollout:
    token_ids = np.concatenate([as_int32(chunk.token_ids) for chunk in chunks]).astype(np.int64)
    logprobs = np.concatenate([as_float32(chunk.inference_logprobs) for chunk in chunks])
    spans = [span for chunk in chunks for span in chunk.spans]
    versions = np.repeat(
        [span.policy_version for span in spans], [span.num_tokens for span in spans]
    ).astype(np.int64)
    reward = task.digit_share(task.text_of(token_ids.tolist()))
    return Rollout(prompt, token_ids, logprobs, versions, reward)


class Sampler:
    """The engine and the batches that it works on."""

    def __init__(self, seed: int) -> None:
        content = {"model_type": "qwen3", **task.MODEL}
        config = InferenceConfig(
            max_running=128, kv_cache_tokens=16384, kv_on_update="keep", stream_interval_ms=1e6
        )
        self._engine = TorchEngine.from_config_json(json.dumps(content).encode(), config)
        self._engine.attach()
        self._seed = seed * 1_000_003
        self._batches: deque[Batch] = deque()
        self._age = 0  # of the newest batch, in tokens
        self._num_done = 0
        self._mappings = SegmentMappings()

    def load(self, weights: Published) -> None:
        """Swap the weights, whatever is under way."""
        buffer = self._mappings.read(weights.segment, weights.manifest.num_bytes)
        tensors = views(weights.manifest, buffer)
        self._engine.stage(tensors, weights.manifest.policy_version)
        self._engine.apply()

    def begin(self, number: int) -> None:
        """Start on one more batch."""
        batch = Batch()
        self._batches.append(batch)
        self._age = 0
        for index, prompt in enumerate(task.PROMPTS):
            ids = pack_int32(prompt_ids(prompt))
            for member in range(task.GROUP_SIZE):
                self._seed += 1
                sampling = SamplingParams(seed=self._seed, stop_token_ids=(task.END_ID,))
                name = f"{number}.{index}.{member}"
                request = GenerateRequest(name, name, ids, task.MAX_NEW_TOKENS, sampling)
                self._engine.submit(request, batch.begin(index, member))

    def step(self) -> list[list[Rollout]] | None:
        """A token for every answer under way; the oldest batch, if it is whole."""
        self._engine.step()
        self._age += 1
        if self._batches and self._batches[0].is_done:
            self._num_done += 1
            return self._batches.popleft().groups()
        return None

    @property
    def is_idle(self) -> bool:
        """Returns whether no batch is running."""
        return not self._batches

    @property
    def has_room(self) -> bool:
        """Returns whether one more batch may begin."""
        limit = MAX_BATCHES if self._num_done else 1
        return self.is_idle or (len(self._batches) < limit and self._age >= BATCH_DISTANCE)


def prepared_group(index: int, rollouts: list[Rollout], step: int) -> PreparedGroup:
    """Rows with the advantages of GRPO."""
    rewards = np.array([rollout.reward for rollout in rollouts])
    advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    rows = [
        _row(f"{index}.{i}", *pair, step)
        for i, pair in enumerate(zip(rollouts, advantages, strict=True))
    ]
    return PreparedGroup(f"g{index}", index, tuple(rows), "", tuple(rewards.tolist()), ())


def _row(name: str, rollout: Rollout, advantage: float, step: int) -> TrainingRow:
    token_ids = np.concatenate((rollout.prompt, rollout.token_ids))
    size = len(rollout.token_ids)
    return TrainingRow(
        row_id=name,
        token_ids=token_ids[:-1],
        targets=np.arange(len(rollout.prompt), len(token_ids)),
        target_ids=rollout.token_ids,
        inference_logprobs=rollout.logprobs,
        advantages=np.full(size, advantage, np.float32),
        staleness=step - rollout.versions,
        is_current=rollout.versions == step,
    )


class Learner:
    """The learner's own step, from first weights that are TRL's too."""

    def __init__(self) -> None:
        args = TrainingArgs(
            learning_rate=task.LEARNING_RATE, adam_beta2=0.999, weight_decay=0.0, max_grad_norm=1.0
        )
        config = LearnerConfig(training_args=args, loss="ppo_clip", pg_clip=0.2)
        self._model = prepared(make_model(attention.IMPLEMENTATION), config)
        policy = PolicyModel(self._model, torch.device("cpu"), 1.0, config.logprob_chunk_tokens)
        optimizer = SummedOptimizer.of(policy.parameters, args)
        self._trainer = StepTrainer(
            policy, optimizer, config, groups_per_step=len(task.PROMPTS), max_steps=task.MAX_STEPS
        )

    def train(self, step: int, groups: list[list[Rollout]]) -> None:
        """One optimizer step."""
        torch.set_num_threads(1)
        self._trainer.begin(step)
        for index, rollouts in enumerate(groups):
            self._trainer.add(prepared_group(index, rollouts, step))
        self._trainer.work()
        self._trainer.finish()

    def weights(self) -> list[TensorBytes]:
        """As they would be published."""
        return [
            TensorBytes(name, "float32", tuple(parameter.shape), memoryview(parameter.detach().numpy()))
            for name, parameter in self._model.named_parameters()
        ]


class Published(NamedTuple):
    """Weights in shared memory."""

    manifest: WeightManifest
    segment: str


class Publisher:
    """Copies weights into shared memory: into that of the version `num_segments` before."""

    def __init__(self, num_segments: int) -> None:
        self._folder = SegmentFolder("bench-learner", "learner")
        self._folder.sweep()
        self._num_segments = num_segments
        self._segments: list[SharedSegment] = []

    def publish(self, tensors: list[TensorBytes], policy_version: int) -> Published:
        """The version, for the engine."""
        offsets, num_bytes = layout(tensors)
        if len(self._segments) < self._num_segments:
            self._segments.append(self._folder.create(num_bytes))
        segment = self._segments[policy_version % self._num_segments]
        entries = fill(segment.data, tensors, offsets)
        manifest = WeightManifest(policy_version, "", policy_version, None, entries, num_bytes)
        return Published(manifest, segment.name)

    def close(self) -> None:
        """Delete them."""
        for segment in self._segments:
            segment.close(delete=True)


def serve(learner: Connection, seed: int, ahead: int) -> None:
    """The engine's process: published weights in, groups of a step out; None ends it."""
    keep_freed_memory()
    sampler = Sampler(seed)
    tame_garbage_collection()
    learner.send("ready")
    num_begun, last_allowed = 0, -1
    while True:
        if learner.poll() or (sampler.is_idle and num_begun > last_allowed):
            asked = learner.recv()
            if asked is None:
                return
            sampler.load(asked)
            last_allowed = asked.manifest.policy_version + ahead
        if sampler.has_room and num_begun <= last_allowed:
            sampler.begin(num_begun)
            num_begun += 1
        groups = sampler.step()
        if groups is not None:
            learner.send(groups)


def run(seed: int, ahead: int) -> dict[str, Any]:
    """Rewards and seconds per step up to the goal."""
    context = get_context("spawn")
    engine, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, seed, ahead))
    process.start()
    theirs.close()  # the engine's end alone keeps the pipe open
    learner = Learner()
    # A batch is asked for weights at most `ahead` steps old, so those before them were loaded.
    publisher = Publisher(ahead + 2)
    assert engine.recv() == "ready"
    tame_garbage_collection()
    rewards: list[float] = []
    times_s: list[float] = []
    began_s = time.perf_counter()
    engine.send(publisher.publish(learner.weights(), 0))
    for step in range(task.MAX_STEPS):
        groups = engine.recv()
        rewards.append(float(np.mean([rollout.reward for group in groups for rollout in group])))
        learner.train(step, groups)
        times_s.append(time.perf_counter() - began_s)
        if rewards[-1] >= task.GOAL:
            break
        engine.send(publisher.publish(learner.weights(), step + 1))
    engine.send(None)
    process.join()
    publisher.close()
    return {"rewards": rewards, "times_s": times_s}


def main() -> int:
    """Run one seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ahead", type=int, default=2)
    args = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    print(json.dumps(run(args.seed, args.ahead)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
