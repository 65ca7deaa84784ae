"""The drift sentinel: errors of servers are measured, a wrong one is found, its tokens left out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tailrace_learner.adapters.ranks import TorchRanks
from tailrace_learner.adapters.strategies.base import Strategy
from tailrace_learner.adapters.strategies.fsdp2 import Fsdp2Strategy
from tailrace_learner.config import CriticArgs, LearnerConfig, TrainingArgs
from tailrace_learner.core.batch.lineage import Ancestry
from tailrace_learner.core.batch.packing import pack
from tailrace_learner.core.batch.row_builder import TrainingRowBuilder
from tailrace_learner.core.batch.rows import PreparedGroup, TrainingRow
from tailrace_learner.core.mismatch.drift import DRIFT, add_errors, drift_sums, of_sources
from tailrace_learner.core.mismatch.sentinel import Sentinel
from tailrace_learner.core.step.critic_trainer import CriticTrainer
from tailrace_learner.core.step.estimates import Roles
from tailrace_learner.core.step.metric_sums import MetricSums
from tailrace_learner.core.step.optimizer import SummedOptimizer
from tailrace_learner.core.step.run_state import RunState
from tailrace_learner.core.step.step import StepTrainer
from tailrace_protos.control import bound_source, source_of
from tailrace_protos.event import ServerQuarantined
from tailrace_protos.generation import TokenSpan
from tailrace_protos.trajectory import Trajectory, TrajectoryGroup
from tests.provenance import sources_of, spans_of, versions_of
from tests.unit.tailrace_learner.factory import (
    CPU,
    config,
    group,
    make_policy,
    random_group,
    trajectory,
)
from tests.unit.tailrace_learner.ranks import on_ranks
from tests.unit.tailrace_learner.stepping import Stepper, make_critic, weights
from tests.unit.tailrace_learner.test_learner import (
    FakeSource,
    FakeWorld,
    Ready,
    learner,
    steps,
)

GOOD, BAD = "inference-0#aa", "inference-1#bb"
# A large epsilon: Adam would make equal steps of gradients that are nothing but rounding.
ARGS = TrainingArgs(learning_rate=0.02, adam_epsilon=1e-2, max_grad_norm=0.5)


def by(source: str, member: Trajectory) -> Trajectory:
    """The same episode, sampled by one server."""
    rows = [replace(row, spans=spans_of(versions_of(row.spans), source)) for row in member.rows]
    return replace(member, rows=tuple(rows))


def row(current: Sequence[bool], *spans: TokenSpan) -> TrainingRow:
    size = len(current)
    zeros = np.zeros(size, np.float32)
    return TrainingRow(
        "r",
        np.arange(size),
        np.arange(1, size + 1),
        np.arange(size),
        zeros,
        zeros,
        np.zeros(size, np.int64),
        np.array(current),
        spans=spans,
    )


def prepare(members: Sequence[Trajectory], step: int, quarantine: dict[str, int]) -> PreparedGroup:
    """As a learner that has done `step` steps; version v is of step v."""
    builder = TrainingRowBuilder(config(), 4, Ancestry("0-a"), quarantine=quarantine)
    return builder.prepare(group(members), step, {version: ("0-a", version) for version in range(3)})


def test_only_version_matched_tokens_of_known_servers_are_summed() -> None:
    rows = [
        row([True, False, True, True], TokenSpan(1, "a", 2), TokenSpan(1, "b", 2)),
        row([True, True]),  # nobody knows who sampled these
        row([False], TokenSpan(1, "c", 1)),
        row([True], TokenSpan(1, "a", 1)),
    ]
    errors = torch.arange(1.0, 9.0)
    current = np.concatenate([each.is_current for each in rows])
    found = {name: (float(total), n) for name, total, n in drift_sums(rows, errors, current)}
    assert found == {"a": (1.0 + 8.0, 2), "b": (3.0 + 4.0, 2)}


def test_a_step_tells_the_error_of_every_server() -> None:
    members = [by(GOOD, trajectory(0, 1.0)), by(BAD, trajectory(1, 0.0))]
    stepper = Stepper(1)
    told = stepper.step([group(members)], 1).metrics
    rows = {span.source: each for each in stepper.rows for span in each.spans}
    assert told["drift_tokens/inference-0"] == told["drift_tokens/inference-1"] == 3.0
    errors = [told[f"drift/inference-{number}"] for number in range(2)]
    assert set(rows) == {GOOD, BAD}
    assert all(error is not None and error > 0.1 for error in errors)  # the factory's are invented


def test_tokens_of_older_versions_give_no_reading() -> None:
    members = [by(GOOD, trajectory(i, float(i), versions=(0, 0, 0))) for i in range(2)]
    told = Stepper(1).step([group(members)], 1).metrics
    assert not [name for name in told if name.startswith("drift")]


@pytest.mark.parametrize(("share", "found"), [(97, 0), (3, 1)])
@pytest.mark.parametrize("value", [-50.0, -1000.0, -np.inf])
def test_a_token_in_a_hundred_that_is_far_out_makes_no_server_wrong(
    value: float, share: int, found: int
) -> None:
    sentinel = Sentinel(0.1, 256)
    sentinel.begin(3)
    for _ in range(6):
        given = row([True] * 97, TokenSpan(3, BAD, 97))
        learner_logprobs = torch.full((97,), -1.5)
        inference_logprobs = learner_logprobs + 0.01
        inference_logprobs[::share] = value
        sums = MetricSums()
        add_errors(sums, [given], inference_logprobs, learner_logprobs, given.is_current, age=0)
        sentinel.read(of_sources(sums.split(DRIFT).totals()))
    assert len(sentinel.found) == found


@pytest.mark.parametrize(("source", "found"), [(BAD, 1), (bound_source(BAD), 0)])
def test_tokens_that_a_guide_bound_make_no_server_wrong(source: str, found: int) -> None:
    """A tenth had no alternative: the engine says 0, and the free model does not call the tool."""
    sentinel = Sentinel(0.1, 256)
    sentinel.begin(3)
    given = row([True] * 300, TokenSpan(3, GOOD, 100), TokenSpan(3, source, 200))
    learner_logprobs = torch.full((300,), -6.0)
    inference_logprobs = learner_logprobs.clone()
    inference_logprobs[100::10] = 0.0
    sums = MetricSums()
    for _ in range(3):
        add_errors(sums, [given], inference_logprobs, learner_logprobs, given.is_current, age=0)
    sentinel.read(of_sources(sums.split(DRIFT).totals()))
    assert len(sentinel.found) == found


def judged(sentinel: Sentinel, step: int, **sums: tuple[float, int]) -> list[ServerQuarantined]:
    """A step of one mini-batch; `sums`: mean error and number of tokens by name."""
    sentinel.begin(step)
    return read(sentinel, **sums)


def read(sentinel: Sentinel, **sums: tuple[float, int]) -> list[ServerQuarantined]:
    names = {"bad": BAD, "good": GOOD, "s1": "s#1", "s2": "s#2", "s3": "s#3", "old": "old"}
    return sentinel.read({(names[name], 0): (mean * n, n) for name, (mean, n) in sums.items()})


def test_metrics_name_servers_and_not_their_incarnations() -> None:
    sentinel = Sentinel(None, 1)
    judged(sentinel, 0, s1=(0.5, 10), s2=(0.1, 20), old=(0.2, 5))
    read(sentinel, s2=(0.1, 10))
    expected = {"drift/s": 0.2, "drift_tokens/s": 40.0, "drift/old": 0.2, "drift_tokens/old": 5.0}
    assert sentinel.numbers() == pytest.approx(expected)
    sentinel.begin(1)
    assert sentinel.numbers() == {}


def test_a_server_beyond_the_limit_is_quarantined_once_since_its_last_good_reading() -> None:
    sentinel = Sentinel(0.1, 8)
    assert judged(sentinel, 3, bad=(0.01, 8), good=(0.01, 8)) == []
    assert judged(sentinel, 4, good=(0.02, 8)) == []
    found = judged(sentinel, 5, bad=(0.7, 9), good=(0.01, 8))
    assert found == [ServerQuarantined("inference-1", "bb", pytest.approx(0.7), 0.1, 9, 5, 3)]
    assert sentinel.found == found
    assert sentinel.quarantine == {BAD: 3}
    assert judged(sentinel, 6, bad=(0.7, 9), good=(0.01, 8)) == sentinel.found == []
    assert sentinel.quarantine == {BAD: 3}
    assert judged(sentinel, 7, s1=(0.0, 99)) == []


def test_too_few_tokens_wait_for_those_of_later_mini_batches_and_steps() -> None:
    sentinel = Sentinel(0.1, 10)
    assert judged(sentinel, 0, bad=(0.13, 3)) == []
    assert read(sentinel, bad=(0.13, 3)) == []
    (found,) = judged(sentinel, 1, bad=(0.11, 6))
    assert (found.num_tokens, found.mismatch) == (12, pytest.approx(0.12))
    assert (found.step, found.good_step) == (1, -1)


def test_errors_that_no_further_tokens_can_make_good_wait_for_none() -> None:
    sentinel = Sentinel(0.1, 10)
    assert judged(sentinel, 0, bad=(0.3, 3)) == []
    (found,) = read(sentinel, bad=(0.3, 1))
    assert found.num_tokens == 4
    assert judged(sentinel, 1, good=(0.3, 3)) == []
    assert read(sentinel, good=(0.0, 7)) == []
    assert sentinel.num_owed(GOOD) == 0  # judged, and within


def read_ages(sentinel: Sentinel, step: int, *means: float) -> list[ServerQuarantined]:
    """A step in which tokens of age 0, 1, ... are read, 8 of each."""
    sentinel.begin(step)
    return sentinel.read({(BAD, age): (8 * mean, 8) for age, mean in enumerate(means) if mean >= 0})


def test_older_tokens_say_that_their_version_was_good_and_nothing_of_later_ones() -> None:
    sentinel = Sentinel(0.1, 8)
    assert read_ages(sentinel, 5, -1, 0.0) == []
    (found,) = read_ages(sentinel, 7, -1, 0.7)
    assert (found.step, found.good_step) == (7, 4)


def test_a_version_that_was_good_and_is_beyond_the_limit_now_is_not_trusted_any_more() -> None:
    sentinel = Sentinel(0.1, 8)
    assert read_ages(sentinel, 5, 0.0) == []
    (found,) = read_ages(sentinel, 6, -1, 0.7)
    assert (found.step, found.good_step) == (6, 4)


def test_of_several_versions_in_one_reading_those_before_the_wrong_one_are_trusted() -> None:
    sentinel = Sentinel(0.1, 16)
    assert read_ages(sentinel, 4, 0.0, 0.0) == []
    assert read_ages(sentinel, 5, 0.0) == []
    (found,) = read_ages(sentinel, 6, 0.7)
    assert (found.good_step, found.num_tokens) == (4, 16)
    pooled = Sentinel(0.1, 16)
    assert read_ages(pooled, 4, 0.11, 0.0) == []
    (found,) = read_ages(pooled, 6, 0.7, 0.7)
    assert found.good_step == 3


def test_a_good_reading_holds_only_for_steps_that_are_over() -> None:
    sentinel = Sentinel(0.1, 1)
    assert judged(sentinel, 2, bad=(0.0, 5)) == []
    assert judged(sentinel, 3, bad=(0.0, 5)) == []
    (found,) = read(sentinel, bad=(0.7, 5))
    assert (found.step, found.good_step) == (3, 2)
    sentinel.begin(4)
    assert sentinel.quarantine == {BAD: 2}


def test_where_all_servers_differ_none_is_blamed() -> None:
    sentinel = Sentinel(0.1, 6)
    assert judged(sentinel, 0, bad=(0.5, 6), good=(0.6, 6)) == []
    assert sentinel.numbers()["num_servers_beyond_mismatch"] == 2.0
    assert read(sentinel, bad=(0.5, 6), good=(0.6, 2)) == []  # too few, yet as wrong
    assert sentinel.quarantine == {}
    assert len(read(sentinel, bad=(0.5, 6), s1=(0.0, 1))) == 1


def test_a_server_whose_new_start_is_no_better_is_let_be_where_none_was_ever_good() -> None:
    sentinel = Sentinel(0.1, 1)
    assert len(judged(sentinel, 0, s1=(0.5, 6))) == 1
    assert judged(sentinel, 1, s2=(0.5, 6)) == []
    assert sentinel.numbers()["num_servers_beyond_mismatch"] == 1.0
    assert judged(sentinel, 2, s2=(0.5, 6), good=(0.0, 6)) != []
    assert set(sentinel.quarantine) == {"s#1", "s#2"}


def test_a_server_that_was_good_is_started_anew_whenever_it_goes_wrong() -> None:
    sentinel = Sentinel(0.1, 1)
    for step, start in enumerate(("s1", "s2", "s3")):
        assert judged(sentinel, 2 * step, **{start: (0.0, 6)}) == []
        assert len(judged(sentinel, 2 * step + 1, **{start: (0.5, 6)})) == 1


def test_without_a_limit_errors_are_told_and_nothing_is_done() -> None:
    sentinel = Sentinel(None, 1)
    assert judged(sentinel, 0, bad=(5.0, 9)) == []
    assert sentinel.numbers()["drift/inference-1"] == 5.0
    assert sentinel.quarantine == {}


def test_an_error_that_is_no_number_is_not_a_servers() -> None:
    sentinel = Sentinel(0.1, 1)
    assert judged(sentinel, 0, bad=(float("nan"), 9)) == []
    assert len(read(sentinel, bad=(0.7, 9))) == 1


@pytest.mark.parametrize(
    ("key", "value"), [("max_mismatch", 0.0), ("min_mismatch_tokens", 0), ("mismatch_versions", -1)]
)
def test_limits_that_mean_nothing_are_refused(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=key):
        config(**{key: value})


def test_quarantined_tokens_newer_than_the_last_good_reading_are_left_out() -> None:
    versions = (0, 1, 2)
    sources = (GOOD, BAD, bound_source(BAD))
    members = [by(source, trajectory(i, i, versions=versions)) for i, source in enumerate(sources)]
    prepared = prepare(members, step=2, quarantine={BAD: 0})
    assert [len(each.targets) for each in prepared.rows] == [3, 1, 1]
    assert prepared.counts["num_quarantined_tokens"] == 4
    assert [each.spans for each in prepared.rows] == [
        spans_of((0, 1, 2), GOOD),
        spans_of((0,), BAD),
        spans_of((0,), bound_source(BAD)),
    ]


def test_of_a_turn_that_two_servers_sampled_only_one_ones_tokens_are_left_out() -> None:
    member = trajectory(0, 1.0)
    shared = replace(member.rows[0], spans=(TokenSpan(1, BAD, 1), TokenSpan(1, GOOD, 2)))
    members = [replace(member, rows=(shared,)), trajectory(1, 0.0)]
    prepared = prepare(members, step=1, quarantine={BAD: -1})
    first, second = prepared.rows
    assert first.targets.tolist() == [3, 4]
    assert first.spans == (TokenSpan(1, GOOD, 2),)
    assert len(second.targets) == 3
    assert second.spans == (TokenSpan(1, "", 3),)


def mixed(index: int) -> TrajectoryGroup:
    """An episode of each server, and one that both sampled."""
    members = list(random_group(index).members)
    (both,) = members[2].rows
    num_sampled = sum(bytes(both.loss_mask))
    spans = (TokenSpan(1, GOOD, 2), TokenSpan(1, BAD, 2), TokenSpan(1, GOOD, num_sampled - 4))
    both = replace(both, spans=spans)
    last = replace(members[2], rows=(both,))
    return group([by(GOOD, members[0]), by(BAD, members[1]), last], index)


def prepared_by(
    given: TrajectoryGroup, settings: LearnerConfig, quarantine: dict[str, int]
) -> PreparedGroup:
    """As in the first step; the good server says what the policy does, the bad one 1 nat more."""
    builder = TrainingRowBuilder(settings, 4, Ancestry("0-a"), quarantine=quarantine)
    prepared = builder.prepare(given, 0, {1: ("0-a", 0)})
    policy = make_policy()
    for each in prepared.rows:
        wrong = np.array([name == BAD for name in sources_of(each.spans)])
        with torch.no_grad():
            each.inference_logprobs = policy.forward(pack([each], CPU))[0].numpy() + wrong.astype(
                np.float32
            )
    return prepared


def train(
    strategy: Strategy, at_once: int, quarantine: dict[str, int], settings: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, float | None]]:
    """Weights and metrics after a step of four groups, later ones prepared as the learner does it."""
    given = config(**{"training_args": ARGS, "max_mismatch": 0.1, "min_mismatch_tokens": 4} | settings)
    policy = strategy.spread(make_policy())
    critic = None
    if given.critic is not None:
        model = make_critic(make_policy(), given.critic)
        critic = CriticTrainer(model, SummedOptimizer.of(model.parameters, ARGS), given, max_steps=8)
    trainer = StepTrainer(
        policy,
        strategy.make_optimizer(policy, ARGS),
        given,
        groups_per_step=4,
        max_steps=8,
        ranks=strategy.ranks,
        roles=Roles(None, critic),
    )
    trainer.begin(0)
    for start in range(0, 4, at_once):
        found = {
            source_of(each.server_id, each.incarnation): each.good_step for each in trainer.quarantined
        }
        for index in range(start, start + at_once):
            trainer.add(prepared_by(mixed(index), given, quarantine | found))
        trainer.work()
    metrics = trainer.finish()
    parameters = [strategy.whole(parameter) for parameter in policy.model.parameters()]
    parameters += [] if critic is None else [p.detach() for p in critic.critic.parameters]
    return torch.cat([parameter.flatten() for parameter in parameters]).clone(), metrics


WRONG: dict[str, dict[str, Any]] = {
    "plain": {},
    "epochs": {"num_mini_batches": 2, "ppo_epochs": 2},
    "whitened": {"whiten_advantages": True, "num_mini_batches": 2},
    "picking": {"loss": "m2po", "behaviour_correction": "none"},
    "critic": {
        "adv_estimator": "gae",
        "critic": CriticArgs(training_args=ARGS),
        "num_mini_batches": 2,
    },
}


@cache
def left_out_and_trained(case: str) -> Any:
    """Without the wrong server's tokens from the start, and with all of them."""
    settings = WRONG[case]
    left_out = train(Strategy(), 4, {BAD: -1}, settings)
    return left_out, train(Strategy(), 4, {}, settings | {"max_mismatch": None})


@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("case", WRONG)
def test_a_step_with_a_wrong_servers_tokens_trains_as_one_without_them(case: str, at_once: int) -> None:
    found, told = train(Strategy(), at_once, {}, WRONG[case])
    (expected, known), (both, _) = left_out_and_trained(case)
    assert float((found - expected).abs().max()) <= 1e-6
    drift = {name: told.pop(name) for name in list(told) if name.startswith("drift")}
    assert drift["drift/inference-1"] == pytest.approx(1.0, abs=1e-4)
    for of_good in (drift, known):
        assert of_good["drift/inference-0"] == pytest.approx(0.0, abs=1e-4)
    assert told["num_quarantined_tokens"] == known["num_quarantined_tokens"] != 0
    for name, value in told.items():
        assert value == (known[name] and pytest.approx(known[name], 1e-4, 1e-6)), name
    assert float((found - both).abs().max()) > 1e-3


EPOCHS = {"num_mini_batches": 2, "ppo_epochs": 2}
LATER = {"max_mismatch": 0.95}  # as much as the wrong server's tokens are off, almost
FOUND_LATER = EPOCHS | LATER | {"min_mismatch_tokens": 28}  # by the second mini-batch, after an update


def train_sharded(ranks: TorchRanks) -> Any:
    return [train(Fsdp2Strategy(ranks, CPU), 1, {}, given) for given in (EPOCHS, FOUND_LATER)]


@pytest.mark.heavy
def test_all_ranks_leave_out_a_wrong_servers_tokens() -> None:
    expected = train(Strategy(), 1, {BAD: -1}, EPOCHS)
    later = train(Strategy(), 1, {}, FOUND_LATER)
    assert float((expected[0] - later[0]).abs().max()) > 1e-4
    for trained in on_ranks(2, train_sharded):
        for found, one in zip(trained, (expected, later), strict=True):
            assert float((found[0] - one[0]).abs().max()) <= 1e-6
            assert found[1]["num_quarantined_tokens"] == one[1]["num_quarantined_tokens"]


def test_what_was_trained_before_a_reading_stays_and_later_epochs_leave_it_out() -> None:
    settings = LATER | {"num_mini_batches": 4, "min_mismatch_tokens": 12}
    _, told = train(Strategy(), 4, {}, settings)
    _, known = train(Strategy(), 4, {BAD: -1}, settings)
    assert 0 < (told["num_quarantined_tokens"] or 0) < (known["num_quarantined_tokens"] or 0)
    _, epochs = train(Strategy(), 4, {}, settings | {"ppo_epochs": 2})
    assert epochs["num_quarantined_tokens"] == known["num_quarantined_tokens"]


def test_a_mini_batch_of_nothing_but_wrong_tokens_changes_nothing() -> None:
    given = config(training_args=ARGS, max_mismatch=0.1, min_mismatch_tokens=1)
    policy = make_policy()
    before = weights(policy.parameters)
    trainer = StepTrainer(
        policy, SummedOptimizer.of(policy.parameters, ARGS), given, groups_per_step=1, max_steps=8
    )
    trainer.begin(0)
    members = [by(BAD, member) for member in random_group(0).members]
    trainer.add(prepared_by(group(members), given, {}))
    trainer.work()
    told = trainer.finish()
    assert (told["num_trained_tokens"], told["loss"]) == (0, None)
    assert told["drift/inference-1"] == pytest.approx(1.0, abs=1e-4)
    assert torch.equal(weights(policy.parameters), before)


def ready(index: int, version: int, rewards: dict[str, float]) -> Ready:
    """A group with one episode of each source."""
    members = [
        by(source, trajectory(i, reward, versions=(version,) * 3, group_id=f"g{index}"))
        for i, (source, reward) in enumerate(rewards.items())
    ]
    return Ready(f"{index}-0", 100, group(members, index))


@pytest.mark.parametrize("max_mismatch", [1e-9, None])
async def test_a_learner_tells_of_a_wrong_server_and_trains_none_of_its_tokens(
    max_mismatch: float | None,
) -> None:
    entries = [ready(0, 1, {BAD: 0.0, "": 1.0}), ready(1, 2, {BAD: 0.0, "": 1.0})]
    world = FakeWorld()
    settings: dict[str, Any] = {"groups_per_step": 1, "min_mismatch_tokens": 3}
    one = learner(FakeSource(entries), world, max_mismatch=max_mismatch, **settings)
    await one.run_forever()
    found = [event for event in world.events if isinstance(event, ServerQuarantined)]
    first, second = (step.metrics for step in steps(world))
    assert first["drift/inference-1"] > 0.01
    assert world.saved[-1].quarantine == one.state.quarantine == ({BAD: -1} if found else {})
    if max_mismatch is None:
        assert found == []
        assert (first["num_quarantined_tokens"], first["num_trained_tokens"]) == (0, 6)
        assert (second["num_quarantined_tokens"], second["num_trained_tokens"]) == (0, 6)
    else:
        assert [(event.server_id, event.incarnation, event.good_step) for event in found] == [
            ("inference-1", "bb", -1)
        ]
        assert (first["num_quarantined_tokens"], first["num_trained_tokens"]) == (3, 3)
        assert (second["num_quarantined_tokens"], second["num_trained_tokens"]) == (3, 3)
        assert "drift/inference-1" not in second


async def test_a_resumed_learner_still_leaves_a_wrong_servers_tokens_out() -> None:
    world = FakeWorld(book={5: ("0-a", 0)})
    state = RunState(step=0, lineage="0-a", quarantine={BAD: -1})
    one = learner(
        FakeSource([ready(0, 5, {BAD: 0.0, "": 1.0})]),
        world,
        state=state,
        groups_per_step=1,
        max_steps=1,
    )
    await one.run_forever()
    (step,) = steps(world)
    assert step.metrics["num_quarantined_tokens"] == 3


def test_the_default_limit_lies_between_arithmetic_and_wrong_weights() -> None:
    limit = LearnerConfig().max_mismatch
    assert limit is not None
    assert 0.02 < limit < 0.3
