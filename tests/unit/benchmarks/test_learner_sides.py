"""The rows of the learner's benchmark are what it says, and its padded side does the learner's work."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.learner import sides, task
from tailrace_learner.core.model import attention


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


def summed_grads(model: Any) -> dict[str, torch.Tensor]:
    """By name, filled by each backward pass with what is summed so far."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():

        def keep(one: torch.Tensor, name: str = name) -> None:
            assert one.grad is not None
            found[name] = one.grad.clone()

        parameter.register_post_accumulate_grad_hook(keep)
    return found


def sampled_nearby(model: Any, sample: task.Sample, rng: np.random.Generator) -> task.Sample:
    """The sample as if a policy near the model had said it: no ratio reaches a clip."""
    ids = torch.from_numpy(np.concatenate((sample.prompt, sample.completion)))
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids[None, :-1]).logits[0], -1).gather(1, ids[1:, None])
    own = logprobs[-len(sample.completion) :, 0].numpy()
    return sample._replace(logprobs=own + rng.uniform(-0.1, 0.1, len(own)).astype(np.float32))


@pytest.mark.parametrize("shares", [True, False])
def test_both_sides_have_the_same_loss_and_gradients(shares: bool) -> None:
    plain, packed = sides.make_model("sdpa"), sides.make_model(attention.IMPLEMENTATION)
    rng = np.random.default_rng(0)
    samples = [sampled_nearby(plain, sample, rng) for sample in task.grouped_samples(1, 10)]
    with torch.no_grad():
        loss = float(sides.padded_loss(plain, samples))
    wanted, found = summed_grads(plain), summed_grads(packed)
    sides.padded_step(samples, plain)()  # two passes
    metrics = sides.packed_step(samples, share_prefixes=shares, model=packed)()
    assert isinstance(metrics, dict)
    count = sum(len(sample.completion) for sample in samples)
    assert metrics["loss"] == pytest.approx(loss / count, rel=1e-4)
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert float((found[name] / count - grad).norm() / grad.norm()) < 1e-4, name


def test_digits_are_counted_among_all_characters() -> None:
    assert task.digit_share("a1 2") == 0.5
    assert task.digit_share("") == 0.0
    assert task.digit_share(task.text_of([49, 255, 50, task.END_ID])) == pytest.approx(2 / 3)


def test_both_models_are_the_same() -> None:
    plain, packed = sides.make_model("sdpa"), sides.make_model(attention.IMPLEMENTATION)
    for left, right in zip(plain.parameters(), packed.parameters(), strict=True):
        assert left.equal(right)
