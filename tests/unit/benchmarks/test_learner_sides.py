"""The rows of the learner's benchmark are what it says, and its padded side does the learner's work."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.learner import sides, task
from tailrace_learner.core import attention


def test_prompts_of_groups_are_three_quarters_of_all_tokens() -> None:
    samples = task.grouped_samples()
    assert len(samples) == 64
    assert len({sample.prompt.tobytes() for sample in samples}) == 8
    prompts = sum(len(sample.prompt) for sample in samples)
    assert prompts / task.num_tokens(samples) == pytest.approx(0.75, abs=0.01)


def test_ragged_completions_have_a_long_tail_and_no_prompt_twice() -> None:
    samples = task.ragged_samples()
    sizes = [len(sample.completion) for sample in samples]
    assert max(sizes) > 4 * np.median(sizes)
    assert len({sample.prompt.tobytes() for sample in samples}) == len(samples)


def test_the_padded_loss_is_that_of_each_row_alone() -> None:
    model = sides.make_model("sdpa")
    samples = task.ragged_samples(5)
    alone = sum(float(sides.padded_loss(model, [sample]).detach()) for sample in samples)
    together = float(sides.padded_loss(model, samples).detach())
    assert together == pytest.approx(alone, rel=1e-4)
    assert abs(alone) > 1e-3


@pytest.mark.parametrize("shares", [True, False])
def test_the_learners_side_trains_every_completion_token(shares: bool) -> None:
    samples = task.grouped_samples(1, 4)
    metrics = sides.packed_step(samples, share_prefixes=shares)()
    assert isinstance(metrics, dict)
    assert metrics["num_trained_tokens"] == sum(len(sample.completion) for sample in samples)
    assert metrics["num_skipped_updates"] == 0


def test_digits_are_counted_among_all_characters() -> None:
    assert task.digit_share("a1 2") == 0.5
    assert task.digit_share("") == 0.0
    assert task.digit_share(task.text_of([49, 255, 50, task.END_ID])) == pytest.approx(2 / 3)


def test_both_models_are_the_same() -> None:
    plain, packed = sides.make_model("sdpa"), sides.make_model(attention.IMPLEMENTATION)
    for left, right in zip(plain.parameters(), packed.parameters(), strict=True):
        assert left.equal(right)
