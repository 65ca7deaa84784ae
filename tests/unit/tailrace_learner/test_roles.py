"""The reference and the critic of a run: new, kept in checkpoints, and the same after a resume."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tailrace.config import ConfigError, RunConfig
from tailrace_learner.adapters.checkpoints import CheckpointFolder
from tailrace_learner.adapters.strategies.base import Strategy
from tailrace_learner.adapters.worker import Worker
from tailrace_learner.config import CriticArgs, FromScratch, LearnerConfig, ReferenceArgs, TrainingArgs
from tailrace_learner.core.step.run_state import first_state
from tests.unit.tailrace_learner.factory import prepared_group, random_group
from tests.unit.tailrace_learner.test_checkpoints import SCRATCH

ARGS = TrainingArgs(learning_rate=1e-2)
KL: dict[str, Any] = {"init_kl_coef": 0.1, "target_kl": 0.01, "kl_horizon": 10}
GAE: dict[str, Any] = {"adv_estimator": "gae", "critic": CriticArgs(training_args=ARGS)}


def settings(**given: Any) -> LearnerConfig:
    base = {"from_scratch": SCRATCH, "device": "cpu", "min_tokens_per_micro_batch": 0}
    return LearnerConfig(**{**base, "training_args": ARGS, **given})


class Run:
    """A learner without its surroundings."""

    def __init__(self, folder: Path, config: LearnerConfig, checkpoint: str = "", **run: Any) -> None:
        self.run = RunConfig(exp_name="unit", seed=3, output_dir=str(folder), groups_per_step=1, **run)
        self.config = config
        self.worker = Worker(self.run, config, Strategy())
        self.worker.load(checkpoint)
        self.worker.restore(checkpoint)
        self.store = CheckpointFolder(self.run.run_dir)
        self.kl_coef: float | None = None

    def train(self, steps: range) -> dict[str, float | None]:
        metrics: dict[str, float | None] = {}
        for step in steps:
            self.worker.begin(step)
            self.worker.add(prepared_group(random_group(step), self.config))
            self.worker.work()
            metrics = self.worker.finish()
        self.kl_coef = metrics.get("kl_coef")
        return metrics

    def save(self, step: int) -> str:
        state = msgspec.structs.replace(
            first_state(), step=step, reference=self.worker.reference, kl_coef=self.kl_coef
        )
        return str(self.store.write(self.worker.snapshot(), state))

    def resumed(self, path: str, **changes: Any) -> Run:
        config = msgspec.structs.replace(self.config, **changes)
        return Run(Path(self.run.output_dir), config, path)

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.worker.loaded.model.parameters()])


@cache
def plain_run(folder: Path) -> tuple[Run, str]:
    """A run without other models that did one step, and its checkpoint."""
    run = Run(folder, settings())
    run.train(range(1))
    return run, run.save(1)


@pytest.fixture
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, str]:
    return plain_run(tmp_path_factory.getbasetemp() / "roles")


@pytest.mark.parametrize("shared", [False, True])
def test_training_with_a_critic_continues_bit_for_bit(tmp_path: Path, shared: bool) -> None:
    critic = CriticArgs(training_args=ARGS, shared=shared)
    run = Run(tmp_path, settings(adv_estimator="gae", critic=critic))
    run.train(range(3))
    path = run.save(3)
    wanted = run.train(range(3, 6))
    resumed = run.resumed(path)
    found = resumed.train(range(3, 6))
    assert torch.equal(resumed.weights(), run.weights())
    assert found == wanted


def test_a_resumed_run_has_the_reference_of_its_start_and_the_weight_it_had(tmp_path: Path) -> None:
    run = Run(tmp_path, settings(**KL))
    first = run.train(range(1))
    assert first["kl"] == pytest.approx(0.0, abs=1e-9)  # the policy is where it started
    run.train(range(1, 3))
    path = run.save(3)
    wanted = run.train(range(3, 5))
    resumed = run.resumed(path)
    found = resumed.train(range(3, 5))
    assert wanted["kl"] > 1e-4  # type: ignore[operator]
    assert wanted["kl_coef"] != 0.1
    assert found == wanted


def test_other_weights_in_the_references_place_are_noticed(tmp_path: Path) -> None:
    run = Run(tmp_path, settings(**KL))
    run.train(range(1))
    path = run.save(1)
    other = settings(from_scratch=msgspec.structs.replace(SCRATCH, init_std=0.2), **KL)
    Run(tmp_path, other)  # a new run of the same name keeps its own start there
    with pytest.raises(ConfigError, match="reference when it began"):
        run.resumed(path)


def test_a_reference_of_its_own_is_where_the_path_says(tmp_path: Path) -> None:
    elsewhere = Run(tmp_path / "other", settings(**KL))
    elsewhere.train(range(2))
    reference = ReferenceArgs(pretrain=elsewhere.save(2))
    run = Run(tmp_path, settings(reference=reference, **KL))
    assert run.train(range(1))["kl"] > 1e-4  # type: ignore[operator]
    assert run.worker.reference is not None
    assert run.worker.reference.source == reference.pretrain


def test_a_pretrained_run_needs_no_copy_of_its_start(tmp_path: Path, plain: tuple[Run, str]) -> None:
    _, pretrain = plain
    run = Run(tmp_path, settings(from_scratch=None, **KL, **GAE), pretrain=pretrain)
    assert run.train(range(1))["kl"] == pytest.approx(0.0, abs=1e-9)
    assert not (run.run.run_dir / "start").exists()


def test_a_reference_wanted_later_must_be_named_where_nobody_kept_the_start(
    plain: tuple[Run, str],
) -> None:
    run, path = plain
    with pytest.raises(ConfigError, match=r"learner\.reference\.pretrain: the run began without"):
        run.resumed(path, **KL)
    run.resumed(path, reference=ReferenceArgs(pretrain=path), **KL)


def test_a_checkpoint_without_a_critic_or_of_another_is_refused(
    tmp_path: Path, plain: tuple[Run, str]
) -> None:
    run, path = plain
    with pytest.raises(ConfigError, match="has no critic"):
        run.resumed(path, **GAE)
    valued = Run(tmp_path, settings(**GAE))
    with pytest.raises(ConfigError, match="another critic"):
        valued.resumed(valued.save(1), critic=CriticArgs(shared=True))


def test_a_critic_begins_as_the_policy_or_as_its_path_says(tmp_path: Path) -> None:
    run = Run(tmp_path, settings(**GAE))
    assert run.worker._critic is not None
    trunk = run.worker._critic.critic.trunk.model.state_dict()
    policy = run.worker.loaded.model.base_model.state_dict()
    assert all(torch.equal(tensor, policy[name]) for name, tensor in trunk.items())
    run.train(range(2))
    path = run.save(2)
    args = CriticArgs(training_args=ARGS, pretrain=path)
    other = Run(tmp_path / "b", settings(adv_estimator="gae", critic=args))
    assert other.worker._critic is not None
    found = other.worker._critic.critic.trunk.model.state_dict()
    assert all(torch.equal(t, policy[name]) for name, t in found.items())


def of_size(vocab_size: int) -> FromScratch:
    return msgspec.structs.replace(SCRATCH, config={**SCRATCH.config, "vocab_size": vocab_size})


def test_a_teacher_of_the_same_tokens_may_have_more_vectors(tmp_path: Path) -> None:
    teacher = Run(tmp_path / "other", settings(from_scratch=of_size(300)))
    reference = ReferenceArgs(pretrain=teacher.save(0))
    assert Run(tmp_path, settings(reference=reference, **KL)).train(range(1))["kl"] > 0.0  # type: ignore[operator]


def test_a_model_of_other_tokens_or_fewer_vectors_is_refused(tmp_path: Path) -> None:
    other = Run(tmp_path / "other", settings())
    reference = ReferenceArgs(pretrain=other.save(0))
    with pytest.raises(
        ConfigError, match=r"learner\.reference\.pretrain: .* has vectors for \d+ tokens"
    ):
        Run(tmp_path, settings(from_scratch=of_size(300), reference=reference, **KL))
    tokenizer = Path(reference.pretrain) / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    ids = content["model"]["vocab"]
    first, second = list(ids)[:2]
    ids[first], ids[second] = ids[second], ids[first]
    tokenizer.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"learner\.reference\.pretrain: the policy's token \d+, '"):
        Run(tmp_path, settings(reference=reference, **KL))
