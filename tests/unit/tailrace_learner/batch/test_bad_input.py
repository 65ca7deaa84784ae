"""Bad input: what cannot be used is left out and counted, and the step is that of the rest."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tailrace.config import ConfigError, section_config
from tailrace_learner.config import CriticArgs, LearnerConfig
from tailrace_learner.config_registry import ESTIMATORS
from tailrace_learner.core.batch.group_returns import RowLimits, limits_of
from tailrace_learner.core.batch.lineage import Ancestry
from tailrace_learner.core.batch.row_builder import TrainingRowBuilder
from tailrace_protos.base import (
    as_float32,
    as_int32,
    as_uint8,
    pack_float32,
    pack_int32,
    pack_int64,
)
from tailrace_protos.episode import Outcome
from tailrace_protos.generation import TokenSpan
from tailrace_protos.trajectory import MAX_REWARD, Trajectory, TrajectoryGroup
from tailrace_protos.weights import ModelCard
from tests.unit.tailrace_learner.factory import VOCABULARY, config, group, random_group
from tests.unit.tailrace_learner.stepping import Stepper, weights

LIMITS = RowLimits(max_tokens=64, vocabulary=VOCABULARY)
BOOK = {1: ("0-a", 0)}


def settings_of(name: str) -> dict[str, Any]:
    critic = {"critic": CriticArgs()} if name == "gae" else {}
    return {"adv_estimator": name, **critic}


def prepare(given: TrajectoryGroup, limits: RowLimits = LIMITS, **settings: Any) -> Any:
    return TrainingRowBuilder(config(**settings), 4, Ancestry("0-a"), limits).prepare(given, 0, BOOK)


def spoilt(member: Trajectory, **fields: Any) -> Trajectory:
    """The member with other fields in its only row."""
    return replace(member, rows=(replace(member.rows[0], **fields),))


def bad_members(member: Trajectory) -> dict[str, Trajectory]:
    """Flaws of a member, by the count that shows them."""
    row = member.rows[0]
    rewards = as_float32(row.turn_rewards).copy()
    rewards[0] = np.nan
    return {
        "num_nonfinite_rewards": replace(member, reward=math.nan),
        "num_nonfinite_rewards/huge": replace(member, reward=-1e30),
        "num_nonfinite_rewards/row": spoilt(member, reward=math.inf),
        "num_nonfinite_rewards/turn": spoilt(member, turn_rewards=pack_float32(rewards)),
        **{
            f"num_malformed_episodes/{kind}": spoilt(member, **fields)
            for kind, fields in malformed(member).items()
        },
    }


def malformed(member: Trajectory) -> dict[str, dict[str, Any]]:
    """Fields of a row that cannot be what they should, by the flaw and the field."""
    row = member.rows[0]
    num_tokens, num_turns = len(row.token_ids) // 4, len(row.turn_ends) // 4
    num_sampled = sum(bytes(row.loss_mask))
    logprobs = as_float32(row.inference_logprobs).copy()
    logprobs[np.flatnonzero(as_uint8(row.loss_mask))[-1]] = 5.0
    ends = as_int32(row.turn_ends).copy()
    late, early = ends.copy(), ends.copy()
    late[-1], early[0] = num_tokens + 1, -1
    part = {
        f"bytes/{name}": {name: bytes(getattr(row, name))[:-1]}
        for name in (
            "token_ids",
            "inference_logprobs",
            "turn_ends",
            "turn_rewards",
            "turn_hashes",
        )
    }
    return part | {
        "lengths/mask": {"loss_mask": bytes(3)},
        "lengths/turns": {"turn_ends": pack_int32([1])},
        "lengths/hashes": {"turn_hashes": pack_int64(np.arange(num_turns + 1))},
        "lengths/returns": {"turn_returns": pack_float32(np.zeros(num_turns + 1, np.float32))},
        "token_ids/high": {"token_ids": pack_int32(np.full(num_tokens, VOCABULARY))},
        "token_ids/negative": {"token_ids": pack_int32(np.full(num_tokens, -1))},
        "logprobs/positive": {"inference_logprobs": pack_float32(logprobs)},
        "turn_ends/descending": {"turn_ends": pack_int32(ends[::-1])},
        "turn_ends/high": {"turn_ends": pack_int32(late)},
        "turn_ends/negative": {"turn_ends": pack_int32(early)},
        "spans/none, as in records of old": {"spans": ()},
        "spans/too few": {"spans": (TokenSpan(1, "s", num_sampled - 1),)},
        "spans/too many": {"spans": (*row.spans, TokenSpan(1, "s", 1))},
        "spans/negative": {"spans": (*row.spans, TokenSpan(1, "s", -1), TokenSpan(1, "s", 1))},
    }


KINDS = list(bad_members(random_group(0).members[0]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_bad_member_leaves_the_sample_and_is_counted(name: str, kind: str) -> None:
    members = random_group(3, num_members=4).members
    whole = group([*members[:-1], replace(members[-1], is_greedy=name == "remax")])
    bad = bad_members(whole.members[0])[kind]
    settings = settings_of(name)
    found = prepare(group([bad, *whole.members[1:]]), **settings)
    rest = prepare(group(whole.members[1:]), **settings)
    assert found.counts[kind.partition("/")[0]] == 1
    if kind.startswith("num_malformed_episodes"):
        assert found.counts["/".join(kind.split("/")[:2])] == 1
    assert found.counts["num_invalid_episodes"] == 1
    assert found.rewards == rest.rewards
    assert len(found.rows) == len(rest.rows) > 0
    for row, other in zip(found.rows, rest.rows, strict=True):
        np.testing.assert_array_equal(row.advantages, other.advantages)


@pytest.mark.parametrize("kind", list(malformed(random_group(0).members[0])))
def test_what_versions_a_malformed_member_names_can_be_asked(kind: str) -> None:
    whole = random_group(3)
    bad = spoilt(whole.members[0], **malformed(whole.members[0])[kind])
    asked = TrainingRowBuilder(config(), 4, Ancestry("0-a")).unknown_versions(
        group([bad, *whole.members[1:]]), {}
    )
    assert asked == {1}


def test_rows_of_an_episode_that_failed_are_not_read() -> None:
    whole = random_group(3, num_members=4)
    fields = malformed(whole.members[0])["bytes/turn_ends"]
    failed = replace(spoilt(whole.members[0], **fields), outcome=Outcome.INFRA_FAILURE)
    found = prepare(group([failed, *whole.members[1:]]))
    assert len(found.rows) == 3
    assert "num_malformed_episodes" not in found.counts


def test_turns_may_be_empty_and_a_certain_token_rounded() -> None:
    whole = random_group(3)
    row = whole.members[0].rows[0]
    ends = as_int32(row.turn_ends).copy()
    ends[0] = ends[1]
    logprobs = np.where(as_uint8(row.loss_mask), 1e-6, 0.0)
    member = spoilt(
        whole.members[0], turn_ends=pack_int32(ends), inference_logprobs=pack_float32(logprobs)
    )
    found = prepare(group([member, *whole.members[1:]]))
    assert found.counts["num_invalid_episodes"] == 0
    assert len(found.rows) == 3


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_empty_group_teaches_nothing_and_is_counted(name: str) -> None:
    found = prepare(TrajectoryGroup("g", 0, ()), **settings_of(name))
    assert found.rows == ()
    assert found.counts["num_groups_too_few_valid"] == 1
    stepper = Stepper(2, **settings_of(name))
    before = weights(stepper.policy.parameters)
    empty = TrajectoryGroup("g", 0, ())
    metrics = stepper.step([empty, empty], 1).metrics
    assert torch.equal(weights(stepper.policy.parameters), before)
    assert metrics["num_groups_too_few_valid"] == 2


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_largest_rewards_make_an_update(name: str) -> None:
    members = random_group(3, num_members=4).members
    rewards = as_float32(members[0].rows[0].turn_rewards).copy()
    rewards[-1] = -MAX_REWARD
    largest = spoilt(members[0], reward=-MAX_REWARD, turn_rewards=pack_float32(rewards))
    greedy = replace(members[-1], is_greedy=name == "remax")
    given = group([replace(largest, reward=-MAX_REWARD), *members[1:-1], greedy])
    metrics = Stepper(1, **settings_of(name)).step([given], 1).metrics
    assert metrics["num_nonfinite_rewards"] == 0
    assert (metrics["num_updates"], metrics["num_skipped_updates"]) == (1, 0)
    assert all(math.isfinite(number) for number in metrics.values() if number is not None)


def test_a_row_longer_than_the_model_reads_is_dropped_and_counted() -> None:
    whole = random_group(3)
    lengths = [len(member.rows[0].token_ids) // 4 for member in whole.members]
    limits = RowLimits(max_tokens=max(lengths) - 1)
    found, all_rows = prepare(whole, limits), prepare(whole)
    kept = [row for row, length in zip(all_rows.rows, lengths, strict=True) if length < max(lengths)]
    assert found.counts["num_overlong_rows"] == lengths.count(max(lengths))
    assert [row.row_id for row in found.rows] == [row.row_id for row in kept]
    for row, other in zip(found.rows, kept, strict=True):  # the episode still is in the baseline
        np.testing.assert_array_equal(row.advantages, other.advantages)


def test_the_models_card_says_what_it_reads() -> None:
    card = ModelCard(b'{"max_position_embeddings": 128, "vocab_size": 31}', {})
    assert limits_of(card) == RowLimits(max_tokens=128, vocabulary=31)
    assert limits_of(ModelCard(b"{}", {})) == RowLimits()
    nested = b'{"text_config": {"vocab_size": 31, "max_position_embeddings": 128}}'
    assert limits_of(ModelCard(nested, {})) == RowLimits(max_tokens=128, vocabulary=31)


def test_bad_groups_between_good_ones_change_no_update() -> None:
    good = [random_group(index) for index in range(2)]
    bad = group([bad_members(random_group(9).members[0])["num_nonfinite_rewards"]], 9)

    def trained(groups: list[TrajectoryGroup]) -> tuple[torch.Tensor, dict[str, float | None]]:
        stepper = Stepper(len(groups))
        stepped = stepper.step(groups, 1)
        return weights(stepped.policy.parameters), stepped.metrics

    clean, _ = trained(good)
    found, metrics = trained([good[0], bad, TrajectoryGroup("e", 8, ()), good[1]])
    torch.testing.assert_close(found, clean, rtol=1e-4, atol=1e-6)
    assert metrics["num_nonfinite_rewards"] == 1
    assert metrics["num_skipped_updates"] == 0


@pytest.mark.parametrize(
    ("section", "named"),
    [
        (
            {"adv_estimator": "gigopo"},
            "learner.adv_estimator: 'gigopo' is none of gae, gigpo, grpo.*'gigpo'",
        ),
        ({"loss": "ppo"}, "learner.loss: 'ppo' is none of.*did you mean 'ppo_clip'"),
        ({"kl_estimator": "k4"}, "learner.kl_estimator: 'k4' is none of abs, k1, k2, k3"),
        ({"adv_estimater": "grpo"}, "adv_estimator"),
        ({"critic": {"value_clop": 1}}, "value_clip"),
    ],
)
def test_an_unknown_name_is_refused_at_the_start_with_its_key(
    section: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)experiment\.yaml.*{named}"):
        section_config({"learner": section}, "learner", LearnerConfig, "experiment.yaml")
