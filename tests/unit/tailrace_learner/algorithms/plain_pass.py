"""Inputs of a loss for some rows, by plain forwards of one row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.batch.rows import TrainingRow
from tailrace_learner.core.model.policy import PolicyModel
from tests.unit.tailrace_learner.algorithms.loss_formulas import Array, Tokens, interpolated


def plain_outputs(policy: PolicyModel, row: TrainingRow) -> tuple[torch.Tensor, torch.Tensor]:
    """log pi and entropy of one row by the model's own logits."""
    ids = torch.from_numpy(row.token_ids)[None]
    policy.model.set_attn_implementation("eager")
    logits = policy.model(input_ids=ids, use_cache=False).logits[0, row.targets - 1]
    policy.model.set_attn_implementation("tailrace_packed")
    log_all = torch.log_softmax(logits, -1)
    chosen = log_all[torch.arange(len(row.targets)), torch.from_numpy(row.target_ids)]
    return chosen, -(log_all.exp() * log_all).sum(-1)


def flat(rows: Sequence[TrainingRow], name: str) -> Any:
    return np.concatenate([getattr(row, name) for row in rows])


def tokens_of(rows: Sequence[TrainingRow], learner_logprobs: Array, given: LearnerConfig) -> Tokens:
    """All trained tokens; `rows` know log pi_old, unless it is interpolated, and what was picked."""
    inference_logprobs = flat(rows, "inference_logprobs").astype(float)
    if given.proximal_logprobs == "interpolate":
        proximal_logprobs = interpolated(learner_logprobs, inference_logprobs, flat(rows, "staleness"))
    else:
        proximal_logprobs = flat(rows, "proximal_logprobs").astype(float)
    owners = np.repeat(np.arange(len(rows)), [len(row.targets) for row in rows])
    return Tokens(
        p=learner_logprobs,
        o=proximal_logprobs,
        m=inference_logprobs,
        a=flat(rows, "advantages").astype(float),
        rows=owners,
        turns=owners if rows[0].turns is None else 100 * owners + flat(rows, "turns"),
        picked=np.zeros(len(owners), np.bool_)
        if rows[0].is_picked is None
        else flat(rows, "is_picked") == 1,
    )


def shares(rows: Sequence[TrainingRow], given: LearnerConfig) -> Array:
    """The weight of each token in the sum of losses."""
    sizes = np.array([len(row.targets) for row in rows])
    of_rows = {
        "seq_mean_token_mean": 1 / sizes,
        "seq_mean_token_sum_norm": np.full(len(rows), 1 / max(given.loss_norm_tokens, 1)),
    }.get(given.loss_aggregation, np.ones(len(rows)))
    return np.repeat(of_rows, sizes)
