"""Supervised steps on demonstrations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tailrace_learner.config import WarmStart
from tailrace_learner.core.batch.rows import TrainingRow, demonstration_row
from tailrace_learner.core.step.warm_start import TooFewDemonstrationsError, warm_start
from tests.unit.tailrace_learner.factory import VOCABULARY, config, make_policy
from tests.unit.tailrace_learner.stepping import weights

WARM = WarmStart(demonstrations="unused:here", num_steps=12, batch_size=4, learning_rate=1e-2)


def demonstrations(num_rows: int) -> Iterator[TrainingRow]:
    """Two random ids, then always the same one, which is to be learnt."""
    rng = np.random.default_rng(0)
    for index in range(num_rows):
        ids = np.append(rng.integers(0, VOCABULARY, 2), 7)
        row = demonstration_row(str(index), ids, np.array([0, 0, 1], dtype=np.uint8))
        assert row is not None
        yield row


def test_the_loss_falls_and_every_step_is_told() -> None:
    told: list[tuple[int, float]] = []
    last = warm_start(
        make_policy(), demonstrations(48), WARM, config(), lambda step, loss: told.append((step, loss))
    )
    assert [step for step, _ in told] == list(range(1, 13))
    assert last == told[-1][1]
    assert last < 0.5 * told[0][1]


def test_no_row_is_seen_twice_and_no_more_are_taken_than_needed() -> None:
    rows = demonstrations(100)
    warm_start(make_policy(), rows, WARM, config(), lambda step, loss: None)
    assert next(rows).row_id == str(WARM.num_steps * WARM.batch_size)


def test_the_loss_is_a_mean_over_tokens_whatever_the_run_trains_with() -> None:
    def train(**settings: object) -> torch.Tensor:
        policy = make_policy()
        given = config(**settings)
        warm_start(policy, demonstrations(48), WARM, given, lambda step, loss: None)
        return weights(policy.parameters)

    plain = train()
    other = train(
        loss_aggregation="seq_mean_token_sum",
        entropy_loss_coef=0.5,
        behaviour_correction="tis",
        max_tokens_per_micro_batch=5,
        min_tokens_per_micro_batch=0,
    )
    start = weights(make_policy().parameters)
    assert (plain - other).norm() < 1e-3 * (plain - start).norm()


@pytest.mark.parametrize(
    "change",
    [{"learning_rate": 1e-3}, {"warmup_steps": 0}, {"weight_decay": 0.5}, {"max_grad_norm": 0.01}],
    ids=lambda change: next(iter(change)),
)
def test_every_key_of_its_optimizer_changes_what_is_learnt(change: dict[str, Any]) -> None:
    def trained(warm: WarmStart) -> torch.Tensor:
        policy = make_policy()
        warm_start(policy, demonstrations(12), warm, config(), lambda step, loss: None)
        return weights(policy.parameters)

    short = msgspec.structs.replace(WARM, num_steps=3)
    assert not torch.equal(trained(short), trained(msgspec.structs.replace(short, **change)))


def test_too_few_demonstrations_are_an_error_that_counts_them() -> None:
    with pytest.raises(TooFewDemonstrationsError, match="47 usable rows of 48") as caught:
        warm_start(make_policy(), demonstrations(47), WARM, config(), lambda step, loss: None)
    assert (caught.value.num_rows, caught.value.num_needed) == (47, 48)
