"""Algorithms of a file outside of the repository train; declarations name the keys that are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tailrace_learner.config import LearnerConfig
from tailrace_learner.config_algorithm import AlgorithmConfig
from tailrace_learner.core.algorithms import CORRECTIONS, ESTIMATORS, LOSSES, BatchTokens, LossInputs
from tailrace_learner.core.algorithms.losses.spans import Spans
from tailrace_learner.core.batch.group_returns import NO_LIMITS, group_returns
from tailrace_learner.core.batch.packing import pack
from tests.unit.tailrace_learner.factory import CPU, random_group
from tests.unit.tailrace_learner.stepping import Stepper

GROUPS = [random_group(index, num_members=4) for index in range(2)]
OWN = """
import numpy as np

from tailrace_learner.core.algorithms import (
    Correction, Estimator, Loss, LossTerms, compared,
)

def least(returns, config):
    return compared(returns, lambda group: (float(group.returns.min()), 1.0))

def linear(inputs, config):
    cost = -config.kimi_tau * inputs.advantages * inputs.learner_logprobs
    return LossTerms(cost * inputs.is_picked, {"own_fraction": inputs.is_picked.sum()})

def better(tokens, config):
    return tokens.advantages > 0

def half(inputs, config):
    return inputs.inference_logprobs.new_full(inputs.inference_logprobs.shape, 0.5), {}

def nothing(inputs, config):
    return None

NO_ADVANTAGES = Estimator(nothing)
NO_TERMS = Loss(nothing)
LEAST = Estimator(least, compares_group=True)
LINEAR = Loss(linear, reads=("kimi_tau",), selects=better)
HALF = Correction(half)
"""


@pytest.fixture
def own(user_module: Callable[[str, str], str]) -> str:
    return user_module("own_algorithms_of_a_user", OWN)


def test_an_estimator_a_loss_and_a_correction_of_a_users_file_train(own: str) -> None:
    settings = {
        "adv_estimator": f"{own}:LEAST",
        "loss": f"{own}:LINEAR",
        "behaviour_correction": f"{own}:HALF",
        "kimi_tau": 0.3,
    }
    stepper = Stepper(len(GROUPS), **settings)
    before = [parameter.detach().clone() for parameter in stepper.policy.parameters]
    metrics = stepper.step(GROUPS, 1).metrics
    for prepared, given in zip(stepper.trainer.groups, GROUPS, strict=True):
        least = min(member.reward for member in given.members)
        for row, member in zip(prepared.rows, given.members, strict=True):
            np.testing.assert_allclose(row.advantages, member.reward - least, rtol=1e-5)
            assert row.is_picked is not None
            np.testing.assert_array_equal(row.is_picked, row.advantages > 0)
    after = [parameter.detach().clone() for parameter in stepper.policy.parameters]
    for parameter, old in zip(stepper.policy.parameters, before, strict=True):
        parameter.data.copy_(old)
    rows = stepper.rows
    logprobs = [stepper.policy.forward(pack([row], CPU))[0].detach().numpy() for row in rows]
    sums = [float((row.advantages * log).sum()) for row, log in zip(rows, logprobs, strict=True)]
    count = sum(len(row.targets) for row in rows)
    assert metrics["loss"] == pytest.approx(-0.5 * 0.3 * sum(sums) / count, rel=1e-4)
    picked = sum(float(row.is_picked.sum()) for row in rows)
    assert metrics["own_fraction"] == pytest.approx(picked / count)
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("key", "name", "remedy"),
    [
        ("adv_estimator", "NO_ADVANTAGES", "returned NoneType: let it return Advantages"),
        ("loss", "NO_TERMS", "returned NoneType: let it return LossTerms"),
    ],
)
def test_a_function_that_returns_something_else_is_named(
    key: str, name: str, remedy: str, own: str
) -> None:
    with pytest.raises(TypeError, match=f"learner.{key} '{own}:{name}' {remedy}"):
        Stepper(len(GROUPS), **{key: f"{own}:{name}"}).step(GROUPS, 1)


class Recorder:
    """A configuration that remembers the keys that are read."""

    def __init__(self, config: LearnerConfig) -> None:
        self.config = config
        self.read: set[str] = set()

    def __getattr__(self, key: str) -> object:
        self.read.add(key)
        return getattr(self.config, key)


def tensors(seed: int) -> LossInputs:
    rng = np.random.default_rng(seed)
    log = [torch.tensor(rng.normal(-1.5, 0.5, 12)) for _ in range(3)]
    picked = torch.tensor(rng.random(12) < 0.5, dtype=torch.float64)
    spans = Spans(np.array([5, 7]))
    return LossInputs(*log, torch.tensor(rng.normal(size=12)), spans, spans, picked)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_declares_the_keys_that_it_reads(name: str) -> None:
    found, recorder = LOSSES[name], Recorder(LearnerConfig())
    found.fn(tensors(0), recorder)
    if found.selects is not None:
        rng = np.random.default_rng(1)
        found.selects(BatchTokens(*rng.normal(size=(4, 40)), rng.random(40)), recorder)
    assert recorder.read == set(found.reads)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_correction_declares_the_keys_that_it_reads(name: str) -> None:
    recorder = Recorder(LearnerConfig())
    CORRECTIONS[name].fn(tensors(0), recorder)
    assert recorder.read == set(CORRECTIONS[name].reads)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_declares_the_keys_that_it_reads(name: str) -> None:
    recorder = Recorder(LearnerConfig())
    ESTIMATORS[name].fn(group_returns(GROUPS[0], NO_LIMITS, Counter()), recorder)
    assert recorder.read == set(ESTIMATORS[name].reads)
    assert recorder.read <= set(AlgorithmConfig.__struct_fields__)
