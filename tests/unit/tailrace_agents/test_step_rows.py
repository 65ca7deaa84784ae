"""Episodes whose turns are rows: what the policy sees, and what is trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tailrace.ledger import Ledger
from tailrace_agents.core.episode import EpisodeResult
from tailrace_agents.core.model import EnvView
from tailrace_agents.core.transcript import EnvTranscript
from tailrace_protos.base import as_float32, as_int32, as_int64, as_uint8
from tailrace_protos.chat import ChatMessage
from tailrace_protos.episode import Outcome
from tailrace_protos.generation import TokenSpan
from tailrace_protos.session import ExportStyle
from tests.unit.tailrace.policy.fakes import generation
from tests.unit.tailrace_agents.env_world import LIMITS, play_env
from tests.unit.tailrace_agents.fakes import (
    ListJournal,
    ScriptedPolicy,
    StairsEnv,
    renderer,
)

REPLIES = ("Right", "Left", "Right", "Right")
VIEWS = ["PFFF\n", "FFFF\nPFFF\n", "FFFF\nPFFF\n", "FFFF\nFFFF\nPFFF\n"]


async def play(
    policy: ScriptedPolicy, history_turns: int | None = None, **options: Any
) -> EpisodeResult:
    view = EnvView(ExportStyle.STEP, history_turns)
    return await play_env(StairsEnv(), renderer(), policy, seed=0, view=view, **options)


def said(first: int, turn: int) -> list[int]:
    """The window of `turn` that begins with the observation of turn `first`, behind the very first."""
    opening = VIEWS[0] if first else ""
    ids = renderer().observation_ids(opening + VIEWS[first], True).tolist()
    for k in range(first, turn):
        ids += renderer().reply_ids(REPLIES[k]).tolist()
        ids += renderer().observation_ids(VIEWS[k + 1], False).tolist()
    return ids


@pytest.mark.parametrize(
    ("history_turns", "firsts"),
    [(None, [0, 0, 0, 0]), (2, [0, 0, 0, 1]), (1, [0, 0, 1, 2]), (0, [0, 1, 2, 3])],
)
async def test_the_policy_sees_so_many_turns_and_the_newest_observation(
    history_turns: int | None, firsts: list[int]
) -> None:
    policy = ScriptedPolicy(*REPLIES)
    result = await play(policy, history_turns)
    assert result.outcome is Outcome.OK
    assert policy.prompts == [said(first, turn) for turn, first in enumerate(firsts)]


@pytest.mark.parametrize("history_turns", [None, 0, 1, 9])
async def test_a_row_is_what_the_policy_saw_and_said_in_one_turn(history_turns: int | None) -> None:
    policy = ScriptedPolicy(*REPLIES, version=7)
    result = await play(policy, history_turns)
    rows = result.transcript.rows(2.5)
    assert result.transcript.num_nonfinite == 0
    assert len(rows) == 4
    for turn, (row, prompt) in enumerate(zip(rows, policy.prompts, strict=True)):
        reply = renderer().reply_ids(REPLIES[turn]).tolist()
        assert as_int32(row.token_ids).tolist() == prompt + reply
        assert as_uint8(row.loss_mask).tolist() == [0] * len(prompt) + [1] * len(reply)
        assert row.spans == (TokenSpan(7, "", len(reply)),)
        logprobs = [0.0] * len(prompt) + [-0.5] * len(reply)
        assert as_float32(row.inference_logprobs).tolist() == logprobs
        assert as_int32(row.turn_ends).tolist() == [len(prompt) + len(reply)]
        assert (row.first_turn, row.row_id, row.reward) == (turn, str(turn), 2.5)
    rewards = [float(as_float32(row.turn_rewards)[0]) for row in rows]
    assert tuple(rewards) == result.transcript.turn_rewards
    names = [int(as_int64(row.turn_hashes)[0]) for row in rows]
    assert names[1] == names[2]  # the same view
    assert len(set(names)) == 3


async def test_all_history_asks_what_a_whole_episode_asks() -> None:
    whole, stepwise = ScriptedPolicy(*REPLIES), ScriptedPolicy(*REPLIES)
    await play_env(StairsEnv(), renderer(), whole, seed=0)
    result = await play(stepwise)
    assert stepwise.prompts == whole.prompts
    assert len(result.transcript) > 0


async def test_the_longest_window_is_bounded_not_the_episode() -> None:
    room = len(said(3, 3)) + len(renderer().reply_ids("Right"))
    limits = LIMITS._replace(max_episode_tokens=room)
    assert (await play(ScriptedPolicy(*REPLIES), 0, limits=limits)).outcome is Outcome.OK
    cut = await play(ScriptedPolicy(*REPLIES), None, limits=limits)
    assert cut.outcome is Outcome.POLICY_FAILURE


async def test_a_resumed_episode_has_the_rows_of_an_uninterrupted_one() -> None:
    journal = ListJournal()
    whole = await play(ScriptedPolicy(*REPLIES), 1, journal=journal)
    policy = ScriptedPolicy(*REPLIES[2:])
    resumed = await play(policy, 1, journal=ListJournal(journal.records[:2]))
    assert resumed.num_replayed_turns == 2
    for one, other in zip(resumed.transcript.rows(1.0), whole.transcript.rows(1.0), strict=True):
        assert np.array_equal(as_int32(one.token_ids), as_int32(other.token_ids))
        assert np.array_equal(as_uint8(one.loss_mask), as_uint8(other.loss_mask))


async def test_an_unanswered_turn_and_an_episode_that_never_began_have_no_row() -> None:
    for style in (ExportStyle.STEP, ExportStyle.CONCAT):
        transcript = EnvTranscript(Ledger(renderer()), style)
        assert transcript.rows(0.0) == ()
        prompt = transcript.ledger.prepare_tokens(np.array([1, 2], np.int32))
        transcript.ledger.record(prompt, generation([3]), ChatMessage("assistant", "x"), "0")
        assert transcript.rows(0.0) == ()
