"""Supervised steps on demonstrations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tailrace.config import ChatArgs, ConfigError
from tailrace_learner.adapters import user_functions
from tailrace_learner.adapters.model_source import scratch_card
from tailrace_learner.config import WarmStart
from tailrace_learner.core.batch.rows import TrainingRow, demonstration_row
from tailrace_learner.core.step.optimizer import SummedOptimizer
from tailrace_learner.core.step.warm_start import (
    DivergedError,
    TooFewDemonstrationsError,
    checked,
    warm_start,
)
from tests.unit.tailrace_learner.factory import VOCABULARY, config, make_policy
from tests.unit.tailrace_learner.stepping import weights
from tests.unit.tailrace_learner.test_checkpoints import SCRATCH

WARM = WarmStart(demonstrations="unused:here", num_steps=12, batch_size=4, learning_rate=1e-2)


def demonstrations(num_rows: int) -> Iterator[TrainingRow]:
    """Two random ids, then always the same one, which is to be learnt."""
    rng = np.random.default_rng(0)
    for index in range(num_rows):
        ids = np.append(rng.integers(0, VOCABULARY, 2), 7)
        row = demonstration_row(str(index), ids, np.array([0, 0, 1], dtype=np.uint8))
        assert row is not None
        yield row


def started(
    rows: Iterator[TrainingRow], warm: WarmStart = WARM, **settings: object
) -> tuple[list[tuple[int, float]], float, torch.Tensor]:
    """What was told of each step, the last loss, and the weights."""
    policy, told = make_policy(), list[tuple[int, float]]()
    optimizer = SummedOptimizer.of(policy.parameters, warm.training_args)
    last = warm_start(
        policy, rows, warm, config(**settings), lambda *step: told.append(step), optimizer
    )
    return told, last, weights(policy.parameters)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (([1, 2, 3], [0, 1]), r"shape \(3,\) with a loss_mask of shape \(2,\)"),
        (([[1, 2]], [[0, 1]]), r"token_ids of shape \(1, 2\)"),
        (([1, 107, 3], [0, 1, 1]), "token id 107, which the model lacks"),
        (([1, -2, 3], [0, 1, 1]), "token id -2"),
        (([1] * 65, [1] * 65), "65 tokens, and the model reads 64"),
    ],
)
def test_rows_that_the_model_cannot_read_are_the_users_mistake(
    row: object, reason: str, user_module: Callable[[str, str], str]
) -> None:
    """Only the first row is read by `tailrace validate`."""
    user_module("my_demonstrations", f"def rows(renderer, **given): yield [1], [0]; yield {row}")
    scratch = msgspec.structs.replace(
        SCRATCH, config=SCRATCH.config | {"max_position_embeddings": 64, "vocab_size": 107}
    )
    card = scratch_card(scratch)
    warm = msgspec.structs.replace(WARM, demonstrations="my_demonstrations:rows")
    with pytest.raises(ConfigError, match=f"^learner.warm_start.demonstrations raised .*{reason}"):
        list(user_functions.demonstrations(warm, card, ChatArgs(), 0))


def test_the_loss_falls_and_every_step_is_told() -> None:
    told, last, _ = started(demonstrations(48))
    assert [step for step, _ in told] == list(range(1, 13))
    assert last == told[-1][1]
    assert last < 0.5 * told[0][1]


def test_no_row_is_seen_twice_and_no_more_are_taken_than_needed() -> None:
    rows = demonstrations(100)
    started(rows)
    assert next(rows).row_id == str(WARM.num_steps * WARM.batch_size)


def test_the_loss_is_a_mean_over_tokens_whatever_the_run_trains_with() -> None:
    *_, plain = started(demonstrations(48))
    *_, other = started(
        demonstrations(48),
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
    short = msgspec.structs.replace(WARM, num_steps=3)
    *_, found = started(demonstrations(12), msgspec.structs.replace(short, **change))
    assert not torch.equal(found, started(demonstrations(12), short)[-1])


def test_too_few_demonstrations_are_an_error_that_counts_them() -> None:
    with pytest.raises(TooFewDemonstrationsError, match="47 usable rows of 48") as caught:
        started(demonstrations(47))
    assert (caught.value.num_rows, caught.value.num_needed) == (47, 48)


def test_a_start_whose_loss_is_no_number_is_an_error_that_says_what_to_change() -> None:
    """All updates after the first are thrown away, and the run would train a broken model."""
    far = msgspec.structs.replace(WARM, learning_rate=1e30, warmup_steps=0)
    _, last, _ = started(demonstrations(48), far)
    with pytest.raises(DivergedError, match=r"learner\.warm_start diverged.* lower learning_rate"):
        checked(last)
    assert checked(0.5) == 0.5
