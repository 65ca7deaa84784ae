"""The yardstick loop: its sampler computes what the model computes, and it has the demo's settings."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.bench_demo import Point, recipe_of, seconds_to_goal, system_result
from benchmarks.demo_loop import Loop, Recipe
from benchmarks.demo_model import snapshot
from benchmarks.demo_rollout import Episode, play_episodes
from tailrace_cli.experiment import load

ROOT = Path(__file__).parents[3]
SMALL = Recipe(
    groups_per_step=4,
    group_size=4,
    max_steps=2,
    warm_start_steps=2,
    warm_start_episodes=4,
    eval_steps=1,
    eval_interim_tasks=4,
    eval_tasks=8,
)


@pytest.fixture(scope="module")
def loop() -> Loop:
    torch.set_num_threads(1)
    return Loop(SMALL, seed=0)


def largest_error(loop: Loop, episode: Episode) -> float:
    """Between the sampler's log-probabilities and those of the model over the whole episode."""
    ids = torch.tensor([episode.token_ids])
    with torch.no_grad():
        logprobs = torch.log_softmax(loop.model(ids[:, :-1]).logits, -1)[0]
    sampled = np.flatnonzero(episode.loss_mask)
    expected = [logprobs[at - 1, episode.token_ids[at]].item() for at in sampled]
    return float(np.abs(np.array(episode.inference_logprobs)[sampled] - expected).max())


def test_sampled_logprobs_are_those_of_the_model_over_turns_of_unequal_length(loop: Loop) -> None:
    """An untrained model replies invalid, empty and unclosed turns, so rows drift apart."""
    loop.sampler.load(snapshot(loop.model))
    episodes = play_episodes(loop.sampler, loop.renderer, {"max_turns": 5}, range(16))
    assert len({len(episode.token_ids) for episode in episodes}) > 1
    assert max(largest_error(loop, episode) for episode in episodes) < 1e-4


def test_the_sampler_keeps_the_weights_it_loaded(loop: Loop) -> None:
    loop.sampler.load(snapshot(loop.model))
    torch.manual_seed(0)
    before = play_episodes(loop.sampler, loop.renderer, {}, range(8))
    with torch.no_grad():
        loop.model.model.embed_tokens.weight.mul_(2.0)
    torch.manual_seed(0)
    after = play_episodes(loop.sampler, loop.renderer, {}, range(8))
    with torch.no_grad():
        loop.model.model.embed_tokens.weight.mul_(0.5)
    assert [episode.token_ids for episode in before] == [episode.token_ids for episode in after]


@pytest.mark.parametrize("counts_all", [True, False])
def test_tokens_of_groups_of_equal_rewards_divide_the_loss_where_they_count(
    counts_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(replace(SMALL, groups_per_step=2, counts_all=counts_all), seed=0)
    loop.sampler.load(snapshot(loop.model))
    equal, differing = (play_episodes(loop.sampler, loop.renderer, {}, range(4)) for _ in range(2))
    for episode, reward in zip([*equal, *differing], (0, 0, 0, 0, 0, 1, 0, 1), strict=True):
        episode.reward = float(reward)
    divisors: list[tuple[float, ...]] = []
    monkeypatch.setattr("benchmarks.demo_loop.play_episodes", lambda *_: [*equal, *differing])
    monkeypatch.setattr(loop, "_update", lambda rows, optimizer, *given: divisors.append(given))
    loop._step(1, loop._optimizer(1e-3, 0.0), deque([snapshot(loop.model)], maxlen=1))
    counted = [*equal, *differing] if counts_all else differing
    assert divisors == [(sum(sum(one.loss_mask) for one in counted), len(counted))]


def test_a_run_trains_and_reports_its_curve() -> None:
    result = Loop(SMALL, seed=3).run()
    curve = result["curve"]
    assert isinstance(curve, list)
    assert [point["step"] for point in curve] == [0, 1, 2]
    assert curve[0]["rl_s"] == 0.0 < curve[1]["rl_s"] < curve[2]["rl_s"]
    assert result["success_rate"] == curve[-1]["success_rate"]


def test_the_example_experiment_translates_into_a_recipe() -> None:
    experiment = load(ROOT / "examples" / "frozen_lake" / "experiment.yaml")
    recipe = recipe_of(experiment)
    assert recipe.groups_per_step == experiment.run.groups_per_step
    assert recipe.learning_rate == experiment.learner.training_args.learning_rate
    assert recipe.beta2 == experiment.learner.training_args.adam_beta2
    assert (recipe.counts_all, recipe.lag) == (True, 0)


def test_the_systems_time_to_the_goal_starts_with_the_evaluation_before_training() -> None:
    greedy = "eval/greedy/success_rate"
    rows = [
        {"step": 0, "time_s": 20.0, "eval/success_rate": 0.2, greedy: 0.0, "idle/credit": None},
        {"step": 1, "time_s": 25.0, "eval/success_rate": None, greedy: None, "idle/credit": 1.0},
        {"step": 2, "time_s": 30.0, "eval/success_rate": 0.82, greedy: 0.8, "idle/credit": 2.0},
        {"step": 3, "time_s": 33.0, "eval/success_rate": 0.9, greedy: 0.91, "idle/credit": 4.0},
    ]
    found = system_result(rows)
    assert (found["to_goal_with_eval_s"], found["to_goal_step"]) == (10.0, 2)
    assert (found["warm_start_success"], found["success_rate"]) == (0.2, 0.9)
    assert (found["warm_start_greedy"], found["greedy_success_rate"]) == (0.0, 0.91)
    assert found["idle"] == {"credit": 3.0}
    assert found["curve"] == [Point(0, 0.0, 0.2), Point(2, 10.0, 0.82), Point(3, 13.0, 0.9)]


def test_the_time_to_the_goal_is_that_of_the_mean_curve_between_evaluations() -> None:
    lucky = [Point(0, 0.0, 0.0), Point(10, 4.0, 0.81), Point(20, 8.0, 0.79), Point(30, 12.0, 0.9)]
    unlucky = [Point(0, 0.0, 0.2), Point(10, 6.0, 0.69), Point(20, 12.0, 0.79), Point(30, 18.0, 0.84)]
    # Means: 0.75 after 5 s, 0.79 after 10 s, 0.87 after 15 s.
    assert seconds_to_goal([lucky, unlucky]) == pytest.approx(10.0 + 5.0 / 8)
    assert seconds_to_goal([lucky]) == pytest.approx(4.0 * 0.8 / 0.81)


def test_a_mean_curve_below_the_goal_counts_with_its_whole_time() -> None:
    assert seconds_to_goal([[Point(0, 0.0, 0.1), Point(10, 5.0, 0.79)]]) == 5.0
