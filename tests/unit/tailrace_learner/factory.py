"""Small models, rows and trajectories for the learner's tests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch.nn.functional import rms_norm
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.batch.lineage import Ancestry
from tailrace_learner.core.batch.row_builder import TrainingRowBuilder
from tailrace_learner.core.batch.rows import PreparedGroup, TrainingRow
from tailrace_learner.core.cpu.fast_layer import use_cpu_kernels
from tailrace_learner.core.model import attention
from tailrace_learner.core.model.policy import PolicyModel
from tailrace_protos.base import as_float32, pack_float32, pack_int32, pack_int64, pack_uint8
from tailrace_protos.episode import EnvTask, Outcome
from tailrace_protos.trajectory import TokenRow, Trajectory, TrajectoryGroup
from tests.provenance import spans_of

VOCABULARY = 31
CPU = torch.device("cpu")

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
CONFIGS = {
    "qwen3": lambda: Qwen3Config(**_SIZES, head_dim=8, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**_SIZES, tie_word_embeddings=False),
    "llama": lambda: LlamaConfig(**_SIZES),
}


def make_model(family: str = "qwen3", implementation: str = attention.IMPLEMENTATION) -> Any:
    attention.register()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](), attn_implementation=implementation)
    return model.train()


def make_policy(family: str = "qwen3", *, temperature: float = 1.0, fast: bool = True) -> PolicyModel:
    model = make_model(family)
    if fast:
        use_cpu_kernels(model)
    return PolicyModel(model, CPU, temperature, logprob_chunk_tokens=7)


def make_double_policy() -> PolicyModel:
    """A policy that computes in float64."""
    policy = make_policy(fast=False)
    policy.model.double()
    for module in policy.model.modules():
        if hasattr(module, "variance_epsilon"):  # the model's own norms round to float32
            size, epsilon = module.weight.shape, module.variance_epsilon
            module.forward = partial(rms_norm, normalized_shape=size, weight=module.weight, eps=epsilon)
    return policy


def make_rows(num_rows: int, seed: int = 0, max_len: int = 20) -> list[TrainingRow]:
    """Ragged rows with holes in their masks, near-policy log-probabilities and random advantages."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(num_rows):
        episode = rng.integers(0, VOCABULARY, rng.integers(3, max_len))
        targets = 1 + np.flatnonzero(rng.random(len(episode) - 1) < 0.5)
        targets = targets if len(targets) else np.array([1])
        size = len(targets)
        rows.append(
            TrainingRow(
                row_id=str(index),
                token_ids=episode[: targets[-1]],
                targets=targets,
                target_ids=episode[targets],
                inference_logprobs=rng.normal(-3.0, 1.0, size).astype(np.float32),
                advantages=rng.normal(0.0, 1.0, size).astype(np.float32),
                staleness=rng.integers(0, 3, size),
                is_current=rng.random(size) < 0.5,
            )
        )
    return rows


def config(**settings: Any) -> LearnerConfig:
    return LearnerConfig(**{"min_tokens_per_micro_batch": 0, **settings})


def of_aggregation(name: str) -> dict[str, Any]:
    """Settings that choose an aggregation, with a divisor where it reads one."""
    settings: dict[str, Any] = {"loss_aggregation": name}
    return settings | ({"loss_norm_tokens": 13} if name == "seq_mean_token_sum_norm" else {})


def trajectory(
    member: int,
    reward: float,
    *,
    outcome: Outcome = Outcome.OK,
    versions: Sequence[int] = (1, 1, 1),
    logprobs: Sequence[float] = (-1.0, -2.0, -0.5),
    token_ids: NDArray[np.int32] | None = None,
    group_id: str = "g0",
) -> Trajectory:
    """Two inserted tokens, then one sampled token per version."""
    num_sampled = len(versions)
    ids = np.arange(2 + num_sampled, dtype=np.int32) if token_ids is None else token_ids
    return Trajectory(
        episode_id=f"{group_id}.{member}",
        group_id=group_id,
        member=member,
        attempt=0,
        phase="train",
        task=EnvTask("lake", 1),
        outcome=outcome,
        reason="",
        reward=reward,
        metrics={"success": float(reward > 0)},
        started_unix_s=0.0,
        finished_unix_s=1.0,
        rows=(
            TokenRow(
                token_ids=pack_int32(ids),
                loss_mask=pack_uint8([0, 0] + [1] * num_sampled),
                inference_logprobs=pack_float32([0.0, 0.0, *logprobs]),
                spans=spans_of(versions),
                turn_ends=pack_int32([len(ids)]),
                turn_rewards=pack_float32([reward]),
                reward=reward,
            ),
        ),
    )


def episode_of_rows(member: int, reward: float, rows: Sequence[TokenRow]) -> Trajectory:
    """An episode of several rows."""
    return replace(trajectory(member, reward), rows=tuple(rows))


def token_row(
    row_id: str, reward: float, mask: Sequence[int], first_id: int = 0, version: int = 1
) -> TokenRow:
    """Consecutive ids; log-probability -1 where sampled."""
    flags = np.array(mask)
    return TokenRow(
        token_ids=pack_int32(first_id + np.arange(len(mask))),
        loss_mask=pack_uint8(mask),
        inference_logprobs=pack_float32(np.where(flags, -1.0, 0.0)),
        spans=spans_of([version] * int(flags.sum())),
        turn_ends=pack_int32([len(mask)]),
        turn_rewards=pack_float32([reward]),
        reward=reward,
        row_id=row_id,
    )


def group(members: Sequence[Trajectory], index: int = 0) -> TrajectoryGroup:
    return TrajectoryGroup(group_id=members[0].group_id, group_index=index, members=tuple(members))


def random_row(
    rng: np.random.Generator,
    row_id: str,
    num_turns: int,
    first_turn: int = -1,
    prompt: Sequence[int] = (),
) -> TokenRow:
    """Turns of a few inserted and a few sampled tokens; near-policy log-probabilities."""
    mask = [0] * len(prompt)
    ends = []
    for _ in range(num_turns):
        mask += [0] * int(rng.integers(1, 4)) + [1] * int(rng.integers(1, 5))
        ends.append(len(mask))
    sampled = np.array(mask)
    rewards = rng.normal(size=num_turns).astype(np.float32)
    return TokenRow(
        token_ids=pack_int32([*prompt, *rng.integers(0, VOCABULARY, len(mask) - len(prompt))]),
        loss_mask=pack_uint8(mask),
        inference_logprobs=pack_float32(np.where(sampled, rng.normal(-3.4, 0.3, len(mask)), 0.0)),
        spans=spans_of([1] * int(sampled.sum())),
        turn_ends=pack_int32(ends),
        turn_rewards=pack_float32(rewards),
        reward=float(rewards.sum()),
        row_id=row_id,
        first_turn=first_turn,
        turn_hashes=pack_int64(np.arange(num_turns) % 2),
    )


def random_group(
    index: int, *, num_members: int = 3, num_turns: int = 3, step_rows: bool = False
) -> TrajectoryGroup:
    """Episodes of several turns on one prompt, each one row or a row for every turn."""
    rng = np.random.default_rng(index)
    prompt = rng.integers(0, VOCABULARY, 11).tolist()
    members = []
    for member in range(num_members):
        if step_rows:
            rows = [random_row(rng, str(k), 1, k, prompt) for k in range(num_turns)]
        else:
            rows = [random_row(rng, "", num_turns, prompt=prompt)]
        total = float(sum(as_float32(row.turn_rewards).sum() for row in rows))
        made = trajectory(member, total, group_id=f"g{index}")
        members.append(replace(made, rows=tuple(replace(row, reward=total) for row in rows)))
    return group(members, index)


def prepared_group(given: TrajectoryGroup, settings: LearnerConfig) -> PreparedGroup:
    """As the learner prepares it in its first step, all tokens being fresh."""
    builder = TrainingRowBuilder(settings, 4, Ancestry("0-a"))
    return builder.prepare(given, 0, {1: ("0-a", 0)})
