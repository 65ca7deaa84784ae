"""Groups and trajectories as tests need them."""

from __future__ import annotations

import time

import numpy as np

from tailrace.store import GroupRecord
from tailrace_protos.base import pack_float32, pack_int32, pack_uint8
from tailrace_protos.chat import ChatMessage
from tailrace_protos.episode import EnvTask, Outcome
from tailrace_protos.generation import FinishReason, TokenSpan
from tailrace_protos.journal import CallRecord, EnvStep
from tailrace_protos.session import LedgerNode
from tailrace_protos.subjects import Phase
from tailrace_protos.trajectory import TokenRow, Trajectory
from tests.provenance import spans_of


def group(index: int, *, members: int = 2, min_valid: int = 2, phase: Phase = "train") -> GroupRecord:
    return GroupRecord(
        group_id=f"{phase}-{index}",
        group_index=index,
        phase=phase,
        tasks=tuple(EnvTask("frozen_lake", index) for _ in range(members)),
        deadline_unix_s=time.time() + 60,
        min_valid=min_valid,
        step=0,
    )


def trajectory(
    record: GroupRecord,
    member: int,
    *,
    outcome: Outcome = Outcome.OK,
    num_tokens: int = 6,
    attempt: int = 0,
) -> Trajectory:
    """Two renderer tokens, then sampled ones of versions 3 and 4."""
    sampled = num_tokens - 2
    versions = [3] * (sampled // 2) + [4] * (sampled - sampled // 2)
    return Trajectory(
        episode_id=record.episode_id(member),
        group_id=record.group_id,
        member=member,
        attempt=attempt,
        phase=record.phase,
        task=record.tasks[member],
        outcome=outcome,
        reason="" if outcome is Outcome.OK else "made so",
        reward=1.5,
        metrics={"success": 1.0},
        started_unix_s=10.0,
        finished_unix_s=12.0,
        rows=(
            TokenRow(
                token_ids=pack_int32(np.arange(num_tokens) + member),
                loss_mask=pack_uint8([0, 0] + [1] * sampled),
                inference_logprobs=pack_float32([0.0, 0.0] + [-0.25] * sampled),
                spans=spans_of(versions),
                turn_ends=pack_int32([num_tokens]),
                turn_rewards=pack_float32([1.5]),
                reward=1.5,
            ),
        ),
    )


def turn(number: int) -> CallRecord:
    node = LedgerNode(
        completion_id=str(number),
        parent_id=str(number - 1) if number else "",
        messages=(ChatMessage("user", "where?"),),
        inserted_ids=pack_int32([number, 1]),
        token_ids=pack_int32([7, 8, 9]),
        inference_logprobs=pack_float32([-0.5, -0.25, -0.125]),
        spans=(TokenSpan(2, "", 1), TokenSpan(3, "", 2)),
        finish_reason=FinishReason.STOP,
        reply=ChatMessage("assistant", "left"),
    )
    return CallRecord(number, node, step=EnvStep(0.0, False, False))
