"""Steps of the learner on a GPU beside plain Hugging Face, and their memory beside the estimate.

`python -m benchmarks.gpu.learner padded|packed|shared` prints a JSON object: tokens per second of whole
optimizer steps (AdamW, float32 weights, bfloat16 products, layers computed again), and the peak of
memory. The model has the shape of Qwen3-1.7B. Rows are groups of 8 answers to one prompt, which is
three quarters of their tokens; tokens count as rows have them, however often they are computed.

    padded  plain Hugging Face: eight rows a pass, padded to the longest, torch's attention
    packed  the learner without `share_prefixes`
    shared  the learner as it is configured by default
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.model import SIZES, VOCAB_SIZE, make_model
from benchmarks.learner.sides import Step, padded_step_of, step_of
from benchmarks.learner.task import Sample, num_tokens
from tailrace_cli.experiment import load
from tailrace_cli.loading.model_facts import model_facts
from tailrace_cli.loading.needs import rank_needs
from tailrace_learner.adapters.hf_model import prepared
from tailrace_learner.config import LearnerConfig, ModelArgs, TrainingArgs
from tailrace_learner.core.model import attention
from tailrace_learner.core.model.policy import PolicyModel
from tailrace_learner.core.step.optimizer import SummedOptimizer
from tailrace_learner.core.step.step import StepTrainer

SIZE = "1.7B"
GROUPS, GROUP_SIZE, PROMPT, ANSWER = 4, 8, 1536, (256, 769)
TOKENS_PER_PASS = 16384
NUM_STEPS = 3
LEARNING_RATE = 1e-6
EXAMPLE = Path(__file__).parents[2] / "examples" / "frozen_lake" / "experiment.yaml"
CUDA = torch.device("cuda")


def make_samples() -> list[Sample]:
    """Groups of answers to one prompt each."""
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(GROUPS):
        prompt = rng.integers(3, VOCAB_SIZE, PROMPT)
        for _ in range(GROUP_SIZE):
            answer = rng.integers(3, VOCAB_SIZE, rng.integers(*ANSWER))
            logprobs = rng.normal(-12.0, 0.1, len(answer)).astype(np.float32)
            samples.append(Sample(prompt, answer, logprobs, float(rng.normal())))
    return samples


def padded_step(samples: list[Sample]) -> Step:
    """Plain Hugging Face in bfloat16 autocast; the loss reads the answers' logits alone."""
    model = make_model(SIZE, torch.float32)
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    return padded_step_of(model, samples, _padded_loss)


def _padded_loss(model: Any, samples: Sequence[Sample]) -> torch.Tensor:
    longest = max(len(sample.completion) for sample in samples)
    ids = torch.zeros((len(samples), PROMPT + longest), dtype=torch.long)
    old, gain, seen = (torch.zeros((len(samples), longest)) for _ in range(3))
    for row, sample in enumerate(samples):
        size = len(sample.completion)
        ids[row, :PROMPT] = torch.from_numpy(sample.prompt)
        ids[row, PROMPT : PROMPT + size] = torch.from_numpy(sample.completion)
        old[row, :size] = torch.from_numpy(sample.logprobs)
        gain[row, :size], seen[row, :size] = sample.advantage, 1.0
    ids, old, gain, seen = (each.to(CUDA) for each in (ids, old, gain, seen))
    with torch.autocast("cuda", torch.bfloat16):  # padding comes last: causal attention needs no mask
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=longest + 1).logits[:, :-1]
    learner_logprobs = -torch.nn.functional.cross_entropy(
        logits.float().transpose(1, 2), ids[:, PROMPT:], reduction="none"
    )
    ratio = torch.exp(learner_logprobs - old)
    return -(torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain) * seen).sum()


def own_step(samples: list[Sample], *, share_prefixes: bool) -> tuple[Step, float]:
    """The learner's own step, and the estimate of its memory in GiB."""
    args = TrainingArgs(learning_rate=LEARNING_RATE)
    config = LearnerConfig(
        share_prefixes=share_prefixes, training_args=args, max_tokens_per_micro_batch=TOKENS_PER_PASS,
        model_args=ModelArgs(dtype="bfloat16", disable_gradient_checkpointing=False),
    )  # fmt: skip
    attention.register()
    model = prepared(make_model(SIZE, torch.float32, attention.IMPLEMENTATION).train(), config)
    policy = PolicyModel(model, CUDA, 1.0, config.logprob_chunk_tokens, autocast=True)
    optimizer = SummedOptimizer.of(policy.parameters, args)
    trainer = StepTrainer(policy, optimizer, config, groups_per_step=1, max_steps=1000)
    experiment = dataclasses.replace(load(EXAMPLE), learner=config)
    facts = model_facts(SIZE, json.dumps(SIZES[SIZE]).encode())
    needs = rank_needs(experiment, facts)
    return step_of(trainer, samples), (needs.least + needs.activations) / (1 << 30)


def measure(side: str) -> dict[str, Any]:
    """Figures of one side."""
    samples, estimate = make_samples(), None
    if side == "padded":
        step = padded_step(samples)
    else:
        step, estimate = own_step(samples, share_prefixes=side == "shared")
    began_s = time.perf_counter()
    step()
    torch.cuda.synchronize()
    first_s = time.perf_counter() - began_s
    torch.cuda.reset_peak_memory_stats()
    times_s = []
    for _ in range(NUM_STEPS):
        began_s = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times_s.append(time.perf_counter() - began_s)
    return {
        "tokens_per_s": num_tokens(samples) / min(times_s),
        "first_step_s": first_s,
        "peak_gib": torch.cuda.max_memory_allocated() / (1 << 30),
        "estimate_gib": estimate,
    }


def main() -> None:
    """Measure one side and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=["padded", "packed", "shared"])
    sys.stdout.write("\n" + json.dumps(measure(parser.parse_args().side)) + "\n")


if __name__ == "__main__":
    main()
