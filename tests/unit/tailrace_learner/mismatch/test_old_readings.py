"""Servers are read though nearly no token is of the version that a step begins with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tailrace_learner.adapters.ranks import TorchRanks
from tailrace_learner.adapters.strategies.base import Strategy
from tailrace_learner.adapters.strategies.fsdp2 import Fsdp2Strategy
from tailrace_learner.config import LearnerConfig, TrainingArgs
from tailrace_learner.core.batch.lineage import Ancestry
from tailrace_learner.core.batch.packing import pack
from tailrace_learner.core.batch.row_builder import TrainingRowBuilder
from tailrace_learner.core.batch.rows import PreparedGroup, TrainingRow
from tailrace_learner.core.mismatch.old_sample import OldSample
from tailrace_learner.core.mismatch.quarantine import without_wrong
from tailrace_learner.core.model.policy import PolicyModel
from tailrace_learner.core.step.step import StepTrainer
from tailrace_protos.control import source_of
from tailrace_protos.event import ServerQuarantined
from tailrace_protos.generation import TokenSpan
from tailrace_protos.trajectory import TokenRow, TrajectoryGroup
from tests.unit.tailrace_learner.factory import CPU, config, group, make_policy, make_rows, random_group
from tests.unit.tailrace_learner.ranks import on_ranks
from tests.unit.tailrace_learner.stepping import weights

SERVER = "inference-0#aa"
MAX_STALENESS = 2
GROUPS = 8
LIMIT = LearnerConfig().max_mismatch or 0.0
ARGS = TrainingArgs(learning_rate=0.002, max_grad_norm=0.5, adam_epsilon=1e-3)


def dated(row: TokenRow, version: int, source: str) -> TokenRow:
    """The row as sampled by one server from one version."""
    return replace(row, spans=(TokenSpan(version, source, sum(bytes(row.loss_mask))),))


def sampled(given: TrajectoryGroup, version: int, source: str) -> TrajectoryGroup:
    members = [
        replace(member, rows=tuple(dated(row, version, source) for row in member.rows))
        for member in given.members
    ]
    return group(members, given.group_index)


def spoilt(policy: PolicyModel, noise: float) -> PolicyModel:
    """A copy whose tensors are off by noise of so many of their own deviations."""
    wrong = make_policy()
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for mine, theirs in zip(wrong.model.parameters(), policy.model.parameters(), strict=True):
            mine.copy_(theirs)
            if noise and mine.numel() > 1:
                mine += noise * mine.std() * torch.randn(mine.shape, generator=generator)
    return wrong


class Run:
    """A learner's trainer with the versions that it published; step s starts with version s."""

    def __init__(self, strategy: Strategy | None = None, num_old: int | None = None, **settings: Any):
        self.config = config(**{"training_args": ARGS} | settings)
        self._strategy = Strategy() if strategy is None else strategy
        self._policy = self._strategy.spread(make_policy())
        self.versions: list[PolicyModel] = []
        self.events: list[ServerQuarantined] = []
        self._trainer = StepTrainer(
            self._policy,
            self._strategy.make_optimizer(self._policy, self.config.training_args),
            self.config,
            groups_per_step=GROUPS,
            max_steps=100,
            ranks=self._strategy.ranks,
            num_old_versions=self.config.mismatch_versions if num_old is None else num_old,
        )

    @property
    def whole(self) -> torch.Tensor:
        """All weights, in one."""
        whole = [self._strategy.whole(parameter) for parameter in self._policy.model.parameters()]
        return torch.cat([part.flatten() for part in whole]).clone()

    @property
    def rows(self) -> list[TrainingRow]:
        """Tokens that the last step trained."""
        return [row for each in self._trainer.groups for row in each.rows]

    def step(self, *given: tuple[int, str, PolicyModel | None], error: float = 0.0) -> dict[str, Any]:
        """A step on groups of (age, source, the policy that truly sampled), in turn."""
        number = len(self.versions)
        frozen = make_policy()
        torch.nn.utils.vector_to_parameters(self.whole, frozen.model.parameters())
        self.versions.append(frozen)
        self._trainer.begin(number)
        for index in range(GROUPS):
            age, source, policy = given[index % len(given)]
            self._trainer.add(self._group(index, number, max(number - age, 0), source, policy, error))
        self._trainer.work()
        metrics = self._trainer.finish()
        self.events += self._trainer.quarantined
        return metrics

    def _group(
        self, index: int, step: int, version: int, source: str, policy: PolicyModel | None, error: float
    ) -> PreparedGroup:
        given = sampled(random_group(1000 * step + index, num_turns=6), version, source)
        builder = TrainingRowBuilder(self.config, MAX_STALENESS, Ancestry("0-a"))
        prepared = builder.prepare(given, step, {v: ("0-a", v) for v in range(step + 1)})
        if not prepared.rows:
            return prepared
        batch = pack(prepared.rows, CPU)
        with torch.no_grad():
            inference_logprobs = (policy or self.versions[version]).forward(batch)[0].numpy()
        off = error * np.where(np.arange(len(inference_logprobs)) % 2, 1, -1)
        parts = np.split((inference_logprobs + off).astype(np.float32), batch.target_offsets[1:-1])
        for row, part in zip(batch.rows, parts, strict=True):
            row.inference_logprobs = part
        quarantine = {source_of(e.server_id, e.incarnation): e.good_step for e in self.events}
        return without_wrong(prepared, quarantine, step)


NOW: tuple[int, str, PolicyModel | None] = (0, SERVER, None)
OLD: tuple[int, str, PolicyModel | None] = (1, SERVER, None)
OLDER: tuple[int, str, PolicyModel | None] = (2, SERVER, None)


@pytest.mark.parametrize("settings", [{}, {"num_mini_batches": 2, "ppo_epochs": 2}])
def test_tokens_of_the_version_before_are_read_under_its_own_weights(settings: dict[str, Any]) -> None:
    run = Run(**settings)
    first = run.step(NOW, error=0.03)
    assert first["drift/inference-0"] == pytest.approx(0.03, abs=1e-5)
    moved = run.whole
    told = run.step(OLD, error=0.03)
    assert not torch.allclose(moved, weights(list(run.versions[0].model.parameters())), atol=1e-3)
    assert told["drift/inference-0"] == pytest.approx(0.03, abs=1e-5)
    assert told["drift_tokens/inference-0"] >= 4
    assert told["mismatch_kl"] == pytest.approx(0.03**2 / 2, rel=0.1)


def test_reading_older_tokens_changes_nothing_that_is_trained() -> None:
    with_readings, without, is_read = Run(num_old=2), Run(num_old=0), 0
    assert torch.equal(with_readings.whole, without.whole)
    for run in (with_readings, without):
        run.step(NOW)
    for _ in range(3):
        told, other = (run.step(OLD, OLDER) for run in (with_readings, without))
        is_read += "drift/inference-0" in told
        assert "drift/inference-0" not in other
        assert torch.equal(with_readings.whole, without.whole)
    assert is_read


def test_with_the_weights_of_two_steps_before_tokens_of_that_age_are_read() -> None:
    one, two = Run(mismatch_versions=1), Run(mismatch_versions=2)
    told = [[run.step(OLDER, error=0.02) for _ in range(4)][-1] for run in (one, two)]
    assert "drift/inference-0" not in told[0]
    assert told[1]["drift/inference-0"] == pytest.approx(0.02, abs=1e-5)


def test_tokens_of_a_step_without_an_update_are_read_under_its_weights() -> None:
    run = Run(num_old=1)
    for _ in range(3):
        run.step(OLD)
    assert run.step((3, SERVER, None))["num_trained_tokens"] == 0  # all too old
    assert run.step(OLD, error=0.02)["drift/inference-0"] == pytest.approx(0.02, abs=1e-5)


def test_servers_that_are_always_behind_are_read_every_few_steps() -> None:
    run = Run()
    run.step(NOW)
    run.step(NOW)
    steps = [run.step(OLD, (1, "inference-1#bb", None), (2, "inference-2#cc", None)) for _ in range(8)]
    for first in range(5):
        for server in ("inference-0", "inference-1", "inference-2"):
            four = steps[first : first + 4]
            known = [told[f"drift/{server}"] for told in four if f"drift/{server}" in told]
            assert known
            assert max(known) < 1e-5
    assert run.events == []


def test_where_few_rows_can_be_read_sources_take_turns() -> None:
    names = ["a#1", "b#1", "c#1", "d#1"]
    rows = make_rows(40)
    for row, name in zip(rows, ["a#1"] * 37 + names[1:], strict=True):
        row.spans = (TokenSpan(1, name, len(row.targets)),)
        row.staleness[:], row.is_current[:] = 1, False
        row.is_own = np.ones(len(row.targets), np.bool_)
    last_read: dict[str, int] = {}
    found = []
    for step in range(12):
        chosen = OldSample(rows, lambda name: 256, 20.0, last_read, step).of_age(1)
        assert sum(len(row.token_ids) for row in chosen) <= 20
        found.append({span.source for row in chosen for span in row.spans})
    for step in range(8):
        assert set().union(*found[step : step + 4]) == set(names)


@pytest.mark.parametrize(("noise", "within_steps"), [(1.0, 2), (0.1, 6)], ids=["ruined", "mildly"])
def test_with_defaults_a_lone_server_that_goes_wrong_is_found_within_its_next_readings(
    noise: float, within_steps: int
) -> None:
    run = Run()
    first_wrong = 3
    for _ in range(first_wrong + 1):
        run.step(OLD, OLDER)
    while not run.events and len(run.versions) < 20:
        step = len(run.versions)
        wrong = spoilt(run.versions[step - 1], noise)
        told = run.step((1, SERVER, wrong), OLDER if step == first_wrong + 1 else (2, SERVER, wrong))
    (found,) = run.events
    assert found.step <= first_wrong + within_steps
    assert found.good_step < first_wrong
    assert found.mismatch > found.max_mismatch == LIMIT
    assert told["num_quarantined_tokens"] > 0
    assert all((found.step - row.staleness <= found.good_step).all() for row in run.rows)
    assert run.step((1, SERVER, wrong))["num_trained_tokens"] == 0


def never_applied(learning_rate: float) -> tuple[Run, dict[str, Any], float]:
    """After steps of tokens that claim a version but are of the one before: last metrics, the error."""
    run = Run(
        training_args=replace(ARGS, learning_rate=learning_rate),
        min_mismatch_tokens=16,
        max_mismatch=LIMIT,
    )
    run.step(NOW)
    run.step(OLD)
    for step in range(2, 8):
        told = run.step((1, SERVER, run.versions[step - 2]))
        if run.events:
            break
    apart = []
    policies = (run.versions[-2], run.versions[-3])
    for row in run.rows:
        with torch.no_grad():
            one, other = (policy.forward(pack([row], CPU))[0] for policy in policies)
        apart.append((one - other).abs())
    return run, told, float(torch.cat(apart).mean()) if apart else 0.0


def test_a_server_that_never_applied_a_version_is_found_where_that_is_beyond_the_limit() -> None:
    run, told, _ = never_applied(learning_rate=0.05)
    (found,) = run.events
    assert found.mismatch > LIMIT
    assert found.good_step == 0
    assert told["num_trained_tokens"] == 0


def test_a_version_that_was_never_applied_is_measured_where_it_is_within_the_limit() -> None:
    run, told, apart = never_applied(learning_rate=0.0005)
    assert run.events == []
    assert 1e-4 < apart < LIMIT
    assert told["drift/inference-0"] == pytest.approx(apart, rel=0.5)


def on_shards(ranks: TorchRanks) -> Any:
    run = Run(Fsdp2Strategy(ranks, CPU), 2, max_tokens_per_micro_batch=40, min_mismatch_tokens=24)
    told = [run.step(OLD, (1, "inference-1#bb", None), OLDER, error=0.02) for _ in range(2)]
    return [{name: each[name] for name in each if name.startswith("drift")} for each in told], run.whole


def test_all_ranks_of_sharded_weights_read_the_same_sample_as_one_rank() -> None:
    one = Run(num_old=2, max_tokens_per_micro_batch=40, min_mismatch_tokens=24)
    for _ in range(2):
        told = one.step(OLD, (1, "inference-1#bb", None), OLDER, error=0.02)
    known = {name: told[name] for name in told if name.startswith("drift")}
    assert any(name.startswith("drift/") for name in known)
    for each, whole in on_ranks(2, on_shards):
        assert each[-1] == pytest.approx(known, abs=1e-5)
        assert float((whole - one.whole).abs().max()) <= 1e-5
