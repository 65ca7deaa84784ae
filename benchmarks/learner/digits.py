"""The digits task on our engine and learner: sample, train, swap the weights, again.

The engine is a process beside the learner's, as in a run, with a pipe in place of queues. With `lag` 1
it samples the next step's answers while the learner trains: no token is more than one step old. `lag` 0
takes turns, as TRL does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.learner import task
from benchmarks.learner.sides import make_model
from tailrace_inference.config import InferenceConfig
from tailrace_inference.engine.engine import TorchEngine
from tailrace_learner.adapters.allocator import keep_freed_memory
from tailrace_learner.adapters.hf_model import prepared
from tailrace_learner.config import LearnerConfig, TrainingArgs
from tailrace_learner.core import attention
from tailrace_learner.core.optimizer import make_adamw
from tailrace_learner.core.policy import Policy
from tailrace_learner.core.rows import PreparedGroup, Row
from tailrace_learner.core.step import StepTrainer
from tailrace_protos.base import as_float32, as_int32, pack_int32
from tailrace_protos.generation import GenerateRequest, SamplingParams, TokenChunk


class Tensor(NamedTuple):
    """What the engine stages."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Any  # bytes on their way, a memoryview for the engine


class Rollout(NamedTuple):
    """One answer."""

    prompt: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    reward: float


class Sampler:
    """The engine, and what it needs to sample a step's groups."""

    def __init__(self, seed: int) -> None:
        content = {"model_type": "qwen3", **task.MODEL}
        config = InferenceConfig(max_running=64, kv_cache_tokens=16384, stream_interval_ms=1e6)
        self._engine = TorchEngine.from_config_json(json.dumps(content).encode(), config)
        self._seed = seed * 1_000_003

    def load(self, weights: list[Tensor], policy_version: int) -> None:
        """Swap the weights."""
        self._engine.stage(weights, policy_version)
        self._engine.apply()

    def sample(self, step: int) -> list[list[Rollout]]:
        """A group of answers for every prompt."""
        self._engine.attach()
        self._parts: dict[str, list[TokenChunk]] = {}
        names = []
        for index, prompt in enumerate(task.PROMPTS):
            ids = np.frombuffer(prompt.encode(), np.uint8).astype(np.int64)
            group = [self._submit(f"{step}.{index}.{member}", ids) for member in range(task.GROUP_SIZE)]
            names.append((ids, group))
        while self._engine.has_work():
            self._engine.step()
        return [[self._rollout(ids, name) for name in group] for ids, group in names]

    def _submit(self, name: str, ids: NDArray[np.int64]) -> str:
        self._seed += 1
        sampling = SamplingParams(seed=self._seed, stop_token_ids=(task.END_ID,))
        prompt = pack_int32(ids)
        request = GenerateRequest(name, name, prompt, task.MAX_NEW_TOKENS, sampling)
        self._parts[name] = []
        self._engine.submit(request, self._parts[name].append)
        return name

    def _rollout(self, prompt: NDArray[np.int64], name: str) -> Rollout:
        chunks = self._parts.pop(name)
        token_ids = np.concatenate([as_int32(chunk.token_ids) for chunk in chunks]).astype(np.int64)
        logprobs = np.concatenate([as_float32(chunk.inference_logprobs) for chunk in chunks])
        return Rollout(prompt, token_ids, logprobs, task.digit_share(task.text_of(token_ids.tolist())))


def prepared_group(index: int, rollouts: list[Rollout], age: int) -> PreparedGroup:
    """Rows with the advantages of GRPO."""
    rewards = np.array([rollout.reward for rollout in rollouts])
    advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    rows = [
        _row(f"{index}.{i}", *pair, age)
        for i, pair in enumerate(zip(rollouts, advantages, strict=True))
    ]
    return PreparedGroup(f"g{index}", index, tuple(rows), "", tuple(rewards.tolist()), ())


def _row(name: str, rollout: Rollout, advantage: float, age: int) -> Row:
    token_ids = np.concatenate((rollout.prompt, rollout.token_ids))
    size = len(rollout.token_ids)
    return Row(
        row_id=name,
        token_ids=token_ids[:-1],
        targets=np.arange(len(rollout.prompt), len(token_ids)),
        target_ids=rollout.token_ids,
        log_mu=rollout.logprobs,
        advantages=np.full(size, advantage, np.float32),
        staleness=np.full(size, age),
        is_current=np.full(size, age == 0),
    )


class Learner:
    """The learner's own step, from first weights that are TRL's too."""

    def __init__(self) -> None:
        args = TrainingArgs(
            learning_rate=task.LEARNING_RATE, adam_beta2=0.999, weight_decay=0.0, max_grad_norm=1.0
        )
        config = LearnerConfig(training_args=args, loss="ppo_clip", pg_clip=0.2)
        self._model = prepared(make_model(attention.IMPLEMENTATION), config)
        policy = Policy(self._model, torch.device("cpu"), 1.0, config.logprob_chunk_tokens)
        optimizer = make_adamw(policy.parameters, args)
        self._trainer = StepTrainer(
            policy, optimizer, config, groups_per_step=len(task.PROMPTS), max_steps=task.MAX_STEPS
        )

    def train(self, step: int, groups: list[list[Rollout]], age: int) -> None:
        """One optimizer step."""
        torch.set_num_threads(1)
        self._trainer.begin(step)
        for index, rollouts in enumerate(groups):
            self._trainer.add(prepared_group(index, rollouts, age))
        self._trainer.work()
        self._trainer.finish()

    def weights(self) -> list[Tensor]:
        """Copies, as they would be published."""
        return [
            Tensor(name, "float32", tuple(parameter.shape), parameter.detach().numpy().tobytes())
            for name, parameter in self._model.named_parameters()
        ]


def serve(learner: Connection, seed: int) -> None:
    """The engine's process: weights and a step's number in, the step's groups out; None ends it."""
    keep_freed_memory()
    sampler = Sampler(seed)
    learner.send("ready")
    while (asked := learner.recv()) is not None:
        weights, step = asked
        sampler.load([each._replace(data=memoryview(each.data)) for each in weights], step)
        learner.send(sampler.sample(step))


def run(seed: int, lag: int) -> dict[str, Any]:
    """Rewards and seconds per step up to the goal."""
    context = get_context("spawn")
    engine, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, seed))
    process.start()
    theirs.close()  # the engine's end alone keeps the pipe open
    learner = Learner()
    assert engine.recv() == "ready"
    rewards: list[float] = []
    times_s: list[float] = []
    began_s = time.perf_counter()
    engine.send((learner.weights(), 0))
    for step in range(task.MAX_STEPS):
        groups = engine.recv()
        if lag:
            engine.send((learner.weights(), step + 1))
        rewards.append(float(np.mean([rollout.reward for group in groups for rollout in group])))
        learner.train(step, groups, min(lag, step))
        if not lag:
            engine.send((learner.weights(), step + 1))
        times_s.append(time.perf_counter() - began_s)
        if rewards[-1] >= task.GOAL:
            break
    engine.recv()
    engine.send(None)
    process.join()
    return {"rewards": rewards, "times_s": times_s}


def main() -> int:
    """Run one seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lag", type=int, choices=(0, 1), default=1)
    args = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    print(json.dumps(run(args.seed, args.lag)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
