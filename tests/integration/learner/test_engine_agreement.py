"""The engine samples from the policy that the learner trains, with and without shared prefixes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tailrace_learner.adapters.hf_model import prepared
from tailrace_learner.config import LearnerConfig, TrainingArgs
from tailrace_learner.core.batch.packing import pack
from tailrace_learner.core.batch.rows import PreparedGroup, TrainingRow, gathered
from tailrace_learner.core.model import attention
from tailrace_learner.core.model.policy import PolicyModel
from tailrace_learner.core.step.optimizer import SummedOptimizer
from tailrace_learner.core.step.step import StepTrainer
from tailrace_protos.generation import TokenSpan
from tests.unit.tailrace_inference.harness import VOCAB_SIZE, Asked, Client, make_engine, make_model

CPU = torch.device("cpu")
FAMILIES = ["qwen3", "qwen2", "llama", "mistral"]


def turns(model: Any, temperature: float) -> list[Asked]:
    """Two groups of four episodes of two turns, as the engine answered them."""
    client = Client(make_engine(model))
    rng = np.random.default_rng(0)
    found: list[Asked] = []
    for group in range(2):
        prompt = rng.integers(3, VOCAB_SIZE, 13).tolist()
        for member in range(4):
            options: dict[str, Any] = {"seed": 10 * group + member, "temperature": temperature}
            options["episode"] = f"{group}.{member}"
            first = client.one(prompt, 9, **options)
            observed = rng.integers(3, VOCAB_SIZE, 3).tolist()
            found += [first, client.one([*first.ids, *observed], 5, **options)]
    return found


def row_of(index: int, asked: Asked) -> TrainingRow:
    """A turn as a row of its own."""
    ids = np.array(asked.ids)
    targets = np.arange(len(asked.prompt), len(ids))
    size = len(targets)
    return TrainingRow(
        row_id=str(index),
        token_ids=ids[:-1],
        targets=targets,
        target_ids=ids[targets],
        inference_logprobs=np.array(asked.generation.inference_logprobs, np.float32),
        advantages=np.full(size, 1.0 if index % 3 else -1.0, np.float32),
        staleness=np.zeros(size, np.int64),
        is_current=np.ones(size, np.bool_),
        spans=(TokenSpan(0, "engine", size),),
    )


def learner_of(model: Any, config: LearnerConfig) -> PolicyModel:
    attention.register()
    model.set_attn_implementation(attention.IMPLEMENTATION)
    return PolicyModel(prepared(model, config), CPU, config.temperature, config.logprob_chunk_tokens)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_those_that_the_engine_sampled_with(
    family: str, temperature: float
) -> None:
    model = make_model(family)
    rows = [row_of(*pair) for pair in enumerate(turns(model, temperature))]
    policy = learner_of(model, LearnerConfig(temperature=temperature, device="cpu"))
    batch = pack(rows, CPU, share_prefixes=True)
    num_tokens = sum(len(row.token_ids) for row in rows)
    assert batch.input_ids.numel() < 0.6 * num_tokens
    inference_logprobs = np.concatenate([row.inference_logprobs for row in batch.rows])
    with torch.no_grad():
        learner_logprobs = policy.forward(batch)[0].numpy()
    assert np.abs(inference_logprobs).max() > 2.0
    assert np.abs(learner_logprobs - inference_logprobs).max() <= 1e-4
    assert np.abs(np.exp(learner_logprobs.astype(float) - inference_logprobs) - 1.0).max() <= 1e-4


def test_the_first_step_on_the_policys_own_tokens_has_ratios_of_one() -> None:
    model = make_model("qwen3")
    rows = [row_of(*pair) for pair in enumerate(turns(model, 1.0))]
    args = TrainingArgs(learning_rate=1e-3)
    config = LearnerConfig(training_args=args, device="cpu", min_tokens_per_micro_batch=0)
    policy = learner_of(model, config)
    optimizer = SummedOptimizer.of(policy.parameters, args)
    trainer = StepTrainer(policy, optimizer, config, groups_per_step=2, max_steps=2)
    batch = pack(rows, CPU)
    with torch.no_grad():
        ratios = (
            policy.forward(batch)[0] - gathered(batch.rows, lambda row: row.inference_logprobs)
        ).exp()
    assert float((ratios - 1.0).abs().max()) <= 1e-4
    measured, drifts = [], []
    for step in range(2):
        trainer.begin(step)
        for index in range(2):
            part = tuple(replace(row) for row in rows[8 * index : 8 * index + 8])
            trainer.add(PreparedGroup(f"g{index}", index, part, "", (1.0, 0.0), ()))
        trainer.work()
        metrics = trainer.finish()
        measured.append(metrics["mismatch_kl"])
        drifts.append(metrics["drift/engine"])
    assert drifts[0] is not None
    assert drifts[0] < 1e-5 < drifts[1]  # mean absolute difference
    assert measured[0] is not None
    assert abs(measured[0]) < 1e-8  # half the squared difference of log-probabilities
    assert measured[1] is not None
    assert measured[1] > 1e-6  # the same tokens after the update
