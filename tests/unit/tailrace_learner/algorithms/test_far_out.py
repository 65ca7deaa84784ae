"""One log-probability that is far out: other tokens keep their gradients, no number is infinite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.algorithms import CORRECTIONS, LOSSES, BatchTokens, LossInputs
from tailrace_learner.core.algorithms.corrections import corrected
from tailrace_learner.core.algorithms.kl import KL_ESTIMATORS
from tailrace_learner.core.algorithms.losses.spans import Spans
from tailrace_learner.core.algorithms.proximal import interpolated
from tailrace_learner.core.model.policy import PolicyModel
from tailrace_learner.core.step.metric_sums import k3
from tailrace_protos.base import as_float32, as_uint8, pack_float32
from tailrace_protos.trajectory import TrajectoryGroup
from tests.unit.tailrace_learner.algorithms.loss_formulas import CORRECTED, NONE, SETTINGS
from tests.unit.tailrace_learner.factory import group, random_group
from tests.unit.tailrace_learner.stepping import Stepper

FAR = (-20.0, -50.0, -90.0, -1000.0, -1e4)
# Losses with a ratio of a whole row or turn: one token may change the others of its row.
BY_SPAN = {"gspo", "segment", "gmpo", "topr", "kimi15"}
LOGPROBS = ("learner_logprobs", "proximal_logprobs", "inference_logprobs")


def settings_of() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every loss with every correction that it takes, with bounds and without."""
    for loss, settings in SETTINGS.items():
        if loss in LOSSES:
            yield loss, {"loss": loss, **(NONE if LOSSES[loss].off_policy else {})}
            for correction in [NONE] if LOSSES[loss].off_policy else CORRECTED.values():
                yield loss, {"loss": loss, **correction, **settings}
    yield "ppo_clip", {"tis_cap": float("inf")}
    yield "decoupled_ppo", {"loss": "decoupled_ppo", "tis_cap": float("inf"), **NONE}


ALL = list(settings_of())


def made(rng: np.random.Generator, size: int = 97) -> LossInputs:
    """Rows of 1 to 20 tokens, near each other; some advantages are 0."""
    cuts = np.sort(rng.choice(np.arange(1, size), 9, replace=False))
    rows = Spans(np.diff(np.concatenate(([0], cuts, [size]))))
    current = rng.normal(-1.5, 0.5, size)
    start = current + rng.normal(0.0, 0.1, size)
    sampled = start + rng.normal(0.0, 0.1, size)
    advantages = np.where(rng.random(size) < 0.1, 0.0, rng.normal(0.0, 1.0, size))
    picked = (rng.random(size) < 0.2).astype(float)
    tensors = [torch.tensor(each, dtype=torch.float64) for each in (current, start, sampled)]
    return LossInputs(*tensors, torch.tensor(advantages), rows, rows, torch.tensor(picked))


def gradient(inputs: LossInputs, config: LearnerConfig) -> torch.Tensor:
    """Of the corrected loss, by log pi [M]."""
    current = inputs.learner_logprobs.detach().clone().requires_grad_()
    given = replace(inputs, learner_logprobs=current)
    terms = config.policy_loss(given, config)
    weights, _ = corrected(given, config)
    assert torch.isfinite(terms.per_token).all()
    (weights * terms.per_token).sum().backward()
    assert current.grad is not None
    return current.grad


def changed(inputs: LossInputs, name: str, token: int, value: float) -> LossInputs:
    values = getattr(inputs, name).clone()
    values[token] = value
    return replace(inputs, **{name: values})


@pytest.mark.parametrize(("loss", "settings"), ALL)
def test_gradients_of_other_tokens_stay(loss: str, settings: dict[str, Any]) -> None:
    """All where no ratio is of a row; else those of other rows.

    An impossible log-probability of an engine changes its row as an equal one does: not at all.
    """
    config, rng = LearnerConfig(**settings), np.random.default_rng(3)
    # Here a token's own weight multiplies a loss that other tokens have a gradient through.
    is_coupled = loss in {"gmpo", "kimi15"} and config.correction_level == "token"
    by_row = loss in BY_SPAN or config.correction_level == "sequence" or config.geometric_mask
    for number in range(18):
        name = LOGPROBS[number % 3]
        if name == LOGPROBS[0]:
            inputs = made(rng)
            before = gradient(inputs, config)
        token, value = int(rng.integers(97)), (*FAR, 20.0)[number // 3]
        far = changed(inputs, name, token, value)
        if number % 2 and name == "learner_logprobs":  # as in a step's first pass
            far = changed(far, "proximal_logprobs", token, value)
        found = gradient(far, config)
        assert torch.isfinite(found).all()
        owners = np.repeat(np.arange(10), inputs.rows.lengths)
        others = torch.from_numpy(owners != owners[token] if by_row else np.arange(97) != token)
        torch.testing.assert_close(found[others], before[others], rtol=1e-12, atol=1e-12)
        if name == "inference_logprobs" and value <= -50 and not is_coupled:
            equal = changed(inputs, name, token, float(inputs.proximal_logprobs[token]))
            if LOSSES[loss].off_policy:
                equal = changed(inputs, name, token, float(inputs.learner_logprobs[token]))
            rest = torch.arange(97) != token
            wanted = gradient(equal, config)
            torch.testing.assert_close(found[rest], wanted[rest], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_numbers_are_finite_with_all_tokens_far_out(name: str, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(5)
    corrections = [NONE] if LOSSES[name].off_policy else CORRECTED.values()
    for settings in corrections:
        config = LearnerConfig(loss=name, **settings)  # type: ignore[arg-type]
        for _ in range(5):
            drawn = [torch.tensor(rng.choice([*FAR, -1.0, 0.0], 97), dtype=dtype) for _ in range(3)]
            made_up = replace(made(rng), **dict(zip(LOGPROBS, drawn, strict=True)))
            assert torch.isfinite(gradient(made_up, config)).all()


@pytest.mark.parametrize("name", [name for name in LOSSES if LOSSES[name].selects])
def test_the_same_tokens_are_picked_beside_an_impossible_one(name: str) -> None:
    rng, config = np.random.default_rng(7), LearnerConfig(loss=name, **SETTINGS[name])  # type: ignore[arg-type]
    selects = LOSSES[name].selects
    assert selects is not None
    for value in FAR[1:]:
        current = rng.normal(-1.5, 0.5, 97)
        tokens = BatchTokens(
            current,
            current,
            current + rng.normal(0.0, 0.3, 97),
            rng.normal(0.5, 1.0, 97),
            rng.random(97),
        )
        far, equal = tokens.inference_logprobs.copy(), tokens.inference_logprobs.copy()
        far[11], equal[11] = value, current[11]
        picked, wanted = (
            np.flatnonzero(selects(replace(tokens, inference_logprobs=each), config)).tolist()
            for each in (far, equal)
        )
        assert picked == wanted or name == "m2po"
        assert len(set(picked) ^ set(wanted)) <= 1  # m2po: a mean over one token less


def test_clamped_tokens_of_an_explicit_case() -> None:
    """log rho is 48.5 and 998.5: `tis` truncates both, and a clamped ratio has no gradient."""
    inputs = LossInputs(
        torch.tensor([-1.5, -1.5, -1.5], requires_grad=True),
        torch.tensor([-1.5, -1.5, -50.0]),
        torch.tensor([-50.0, -1000.0, -50.0]),
        torch.tensor([1.0, -1.0, -1.0]),
        Spans(np.array([3])),
        Spans(np.array([3])),
    )
    assert CORRECTIONS["tis"](inputs, LearnerConfig())[0].tolist() == [2.0, 2.0, 1.0]
    terms = LOSSES["ppo_clip"](inputs, LearnerConfig())
    assert terms.per_token.tolist() == pytest.approx([-1.0, 1.0, np.exp(20.0)])
    terms.per_token.sum().backward()
    assert inputs.learner_logprobs.grad is not None
    assert inputs.learner_logprobs.grad.tolist() == [-1.0, 1.0, 0.0]
    terms = LOSSES["dppo_tv"](inputs, LearnerConfig(loss="dppo_tv", dppo_cap=7.0, **NONE))  # type: ignore[arg-type]
    assert terms.per_token.tolist() == [0.0, 7.0, 7.0]
    assert int(terms.counts["behaviour_truncated_fraction"]) == 3


def test_an_engine_that_says_impossible_is_one_that_is_far_out() -> None:
    """-inf is masked before (`num_nonfinite_tokens`); a loss is finite with it all the same."""
    inputs = made(np.random.default_rng(9))
    for loss, settings in ALL:
        config = LearnerConfig(**settings)
        found, wanted = (
            gradient(changed(inputs, "inference_logprobs", 40, value), config)
            for value in (-np.inf, -1e4)
        )
        others = torch.arange(97) != 40
        torch.testing.assert_close(found[others], wanted[others], rtol=1e-12, atol=1e-12, msg=loss)
        assert torch.isfinite(found).all()


def test_divergences_and_interpolation_far_out() -> None:
    current = torch.tensor([-1000.0, -1.0, -1.0], requires_grad=True)
    ref = torch.tensor([-1.0, -1000.0, -2.0])
    ends = {
        "k1": ([-20.0, 20.0], [1.0, 1.0]),
        "k2": ([200.0, 200.0], [-20.0, 20.0]),
        "k3": ([np.exp(20.0) - 21.0, 19.0], [0.0, 1.0]),
        "abs": ([20.0, 20.0], [-1.0, 1.0]),
    }
    assert set(ends) == set(KL_ESTIMATORS)
    for name, (values, slopes) in ends.items():
        found = KL_ESTIMATORS[name](current, ref)
        assert found[:2].tolist() == pytest.approx(values, rel=1e-6)
        (slope,) = torch.autograd.grad(found.sum(), current)
        assert slope[:2].tolist() == pytest.approx(slopes, rel=1e-6)
    assert k3(torch.tensor([-1000.0]), torch.tensor([-1.0])).item() == pytest.approx(np.exp(20.0) - 21)
    found = interpolated(current, torch.tensor([-1.0, -1000.0, -50.0]), torch.tensor([0.5, 0.5, 0.0]))
    assert found.tolist() == [-500.5, -1.0, -1.0]


GROUPS = [random_group(index) for index in range(3)]
OWN = """
from tailrace_learner.core.algorithms import Correction, Loss, LossTerms

def plain(inputs, config):
    ratio = (inputs.learner_logprobs - inputs.inference_logprobs).exp()
    return LossTerms(-ratio * inputs.advantages)

def inverse(inputs, config):
    return (inputs.proximal_logprobs - inputs.inference_logprobs).exp(), {}

PLAIN = Loss(plain, off_policy=True)
INVERSE = Correction(inverse)
"""


def with_engine_logprob(given: TrajectoryGroup, value: float) -> TrajectoryGroup:
    """The group with another log-probability at the third sampled token of its first row."""
    (row,) = given.members[0].rows
    logprobs = as_float32(row.inference_logprobs).copy()
    logprobs[np.flatnonzero(as_uint8(row.loss_mask))[2]] = value
    rows = (msgspec.structs.replace(row, inference_logprobs=pack_float32(logprobs)),)
    return group(
        [msgspec.structs.replace(given.members[0], rows=rows), *given.members[1:]], given.group_index
    )


def token_gradients(
    value: float | None, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> tuple[np.ndarray, dict[str, Any]]:
    """Gradient by log pi of every token of a step [M], in one pass, and the step's metrics."""
    stepper = Stepper(len(GROUPS), **settings)
    forward, seen = PolicyModel.forward, []

    def remembered(policy: PolicyModel, batch: Any) -> Any:
        learner_logprobs, entropy = forward(policy, batch)
        if learner_logprobs.requires_grad:
            learner_logprobs.retain_grad()
            seen.append((batch.rows, learner_logprobs))
        return learner_logprobs, entropy

    monkeypatch.setattr(PolicyModel, "forward", remembered)
    first = GROUPS[0] if value is None else with_engine_logprob(GROUPS[0], value)
    metrics = stepper.step([first, *GROUPS[1:]], len(GROUPS)).metrics
    monkeypatch.setattr(PolicyModel, "forward", forward)
    rows, learner_logprobs = seen[-1]
    parts = np.split(learner_logprobs.grad.numpy(), np.cumsum([len(row.targets) for row in rows])[:-1])
    order = np.argsort([row.row_id for row in rows])
    assert all(torch.isfinite(grads).all() for grads in stepper.grads)
    return np.concatenate([parts[index] for index in order]), metrics


STEPS: list[dict[str, Any]] = [
    *({"loss": name, **(NONE if LOSSES[name].off_policy else {})} for name in LOSSES),
    {"loss": "ppo_clip", "proximal_logprobs": "interpolate"},
    {"behaviour_correction": "mis"},
    {"behaviour_correction": "icepop"},
    {"proximal_logprobs": "interpolate", "ppo_epochs": 2},
    {"correction_level": "sequence", "geometric_mask": 0.9},
    *({"init_kl_coef": 0.3, "kl_estimator": name} for name in KL_ESTIMATORS),
    *(
        {"init_kl_coef": 0.3, "kl_estimator": name, "kl_in": "reward", "adv_estimator": "reinforce"}
        for name in KL_ESTIMATORS
    ),
    {"loss": "own_far_out:PLAIN", **NONE},
    {"behaviour_correction": "own_far_out:INVERSE"},
]


@pytest.mark.parametrize("settings", STEPS, ids=lambda s: "-".join(map(str, s.values())))
def test_a_step_trains_beside_one_impossible_engine_logprob(
    settings: dict[str, Any],
    user_module: Callable[[str, str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    user_module("own_far_out", OWN)
    before, _ = token_gradients(None, monkeypatch, **settings)
    for value in (-1000.0,) if settings.get("loss") else (-50.0, -1000.0):
        found, metrics = token_gradients(value, monkeypatch, **settings)
        assert metrics["num_skipped_updates"] == 0
        assert metrics["num_clamped_tokens"] == 1
        assert metrics["num_quarantined_tokens"] == 0
        assert all(np.isfinite(number) for number in metrics.values() if number is not None)
        if settings.get("ppo_epochs"):
            continue
        num_changed = np.count_nonzero(~np.isclose(found, before, rtol=1e-4, atol=1e-7))
        if settings.get("loss") == "m2po":  # a mean over one token less
            assert num_changed <= 3
        elif "sequence" in settings.values() or settings.get("loss") in BY_SPAN:
            ends = len(as_uint8(GROUPS[0].members[0].rows[0].loss_mask).nonzero()[0])
            np.testing.assert_allclose(found[ends:], before[ends:], rtol=1e-4, atol=1e-7)
        elif "reward" in settings.values():  # it costs nothing, nor do those before it for it
            assert 0 < num_changed <= 3
        else:
            assert num_changed <= 1
