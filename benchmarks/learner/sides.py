"""One optimizer step over the same rows: padded as plain trainers pad, packed, with shared prefixes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.learner.task import MODEL, PAD_ID, ROWS_PER_PASS, Sample
from tailrace_learner.adapters.hf_model import prepared
from tailrace_learner.config import LearnerConfig, TrainingArgs
from tailrace_learner.core.batch.rows import PreparedGroup, TrainingRow
from tailrace_learner.core.model import attention
from tailrace_learner.core.model.policy import PolicyModel
from tailrace_learner.core.step.optimizer import SummedOptimizer
from tailrace_learner.core.step.step import StepTrainer

Step = Callable[[], object]
CLIP = 0.2


def make_model(implementation: str) -> Any:
    """Seeded random weights."""
    attention.register()
    torch.manual_seed(0)
    config = Qwen3Config(**MODEL)
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation).train()


def row_of(index: int, sample: Sample) -> TrainingRow:
    """The learner's row of a sample."""
    token_ids = np.concatenate((sample.prompt, sample.completion))
    size = len(sample.completion)
    return TrainingRow(
        row_id=str(index),
        token_ids=token_ids[:-1],
        targets=np.arange(len(sample.prompt), len(token_ids)),
        target_ids=sample.completion,
        inference_logprobs=sample.logprobs,
        advantages=np.full(size, sample.advantage, np.float32),
        staleness=np.zeros(size, np.int64),
        is_current=np.ones(size, np.bool_),
    )


def packed_step(samples: Sequence[Sample], *, share_prefixes: bool, model: Any = None) -> Step:
    """The learner's own step, of a new model unless one is given."""
    args = TrainingArgs(learning_rate=1e-6)
    config = LearnerConfig(share_prefixes=share_prefixes, training_args=args)
    model = prepared(model or make_model(attention.IMPLEMENTATION), config)
    policy = PolicyModel(model, torch.device("cpu"), 1.0, config.logprob_chunk_tokens)
    optimizer = SummedOptimizer.of(policy.parameters, args)
    trainer = StepTrainer(policy, optimizer, config, groups_per_step=1, max_steps=1000)
    return step_of(trainer, samples)


def step_of(trainer: StepTrainer, samples: Sequence[Sample]) -> Step:
    """A step of the learner's trainer over these rows."""
    rows = tuple(row_of(index, sample) for index, sample in enumerate(samples))

    def step() -> object:
        trainer.begin(0)
        trainer.add(PreparedGroup("g", 0, rows, "", (1.0,), ()))
        trainer.work()
        return trainer.finish()

    return step


def padded_step(samples: Sequence[Sample], model: Any = None) -> Step:
    """Rows in the order of arrival, eight a pass, padded to the pass's longest; plain Hugging Face."""
    return padded_step_of(model or make_model("sdpa"), samples, padded_loss)


def padded_step_of(
    model: Any, samples: Sequence[Sample], loss_of: Callable[[Any, Sequence[Sample]], Tensor]
) -> Step:
    """A step with the summed loss of eight rows a pass."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    count = sum(len(sample.completion) for sample in samples)

    def step() -> object:
        for start in range(0, len(samples), ROWS_PER_PASS):
            torch.autograd.backward(loss_of(model, samples[start : start + ROWS_PER_PASS]) / count)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return None

    return step


def padded_loss(model: Any, samples: Sequence[Sample]) -> Tensor:
    """The clipped loss, summed over completion tokens."""
    rows = [np.concatenate((sample.prompt, sample.completion)) for sample in samples]
    ids = _pad([torch.from_numpy(row) for row in rows], PAD_ID)
    seen = _pad([torch.ones(len(row), dtype=torch.long) for row in rows], 0)
    old = _pad([_after_prompt(sample, sample.logprobs) for sample in samples], 0.0)[:, 1:]
    mask = _pad([_after_prompt(s, np.ones_like(s.logprobs)) for s in samples], 0.0)[:, 1:]
    logits = model(input_ids=ids, attention_mask=seen, use_cache=False).logits[:, :-1]
    log_all = torch.log_softmax(logits, dim=-1)
    entropy = -(log_all.detach().exp() * log_all.detach()).sum(-1)
    assert bool(entropy.isfinite().all())
    learner_logprobs = log_all.gather(-1, ids[:, 1:, None])[..., 0]
    ratio = torch.exp(learner_logprobs - old)
    advantages = torch.tensor([sample.advantage for sample in samples])[:, None]
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -(gain * mask).sum()


def _after_prompt(sample: Sample, values: NDArray[np.float32]) -> Tensor:
    """[P + C] zeros, then `values`."""
    return torch.from_numpy(np.concatenate((np.zeros(len(sample.prompt), np.float32), values)))


def _pad(rows: list[Tensor], value: float) -> Tensor:
    return pad_sequence(rows, batch_first=True, padding_value=value)
