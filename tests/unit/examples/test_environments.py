"""The examples with environments are complete, and their tiny models can say all that they need to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tailrace.chat import Renderer
from tailrace.import_path import load_object
from tailrace_cli.experiment import Experiment, load
from tailrace_cli.validation import check_experiment
from tailrace_envs import make_env
from tailrace_protos.weights import ModelCard

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module", params=["sokoban", "webshop"])
def experiment(request: pytest.FixtureRequest) -> Experiment:
    return load(EXAMPLES / request.param / "experiment.yaml")


def without_variants(env_config: dict[str, Any]) -> dict[str, Any]:
    """Keys that are the same in every environment of the example."""
    # The evaluation has the published reward.
    others = ("catalogue", "max_pulls", "reward_exponent")
    return {key: value for key, value in env_config.items() if key not in others}


def test_the_example_is_valid_and_evaluates_what_it_never_trains_on(experiment: Experiment) -> None:
    check_experiment(experiment)
    entries = experiment.agents.custom_envs
    (held_out,) = (entries[tag].env_config for tag in experiment.scheduler.eval_tags)
    for tag in experiment.scheduler.tags:
        train = entries[tag].env_config
        assert train.get("split", "train") == "train"
        assert without_variants(held_out) == {**without_variants(train), "split": "held_out"}


def test_no_shop_of_the_training_has_a_product_of_the_evaluation() -> None:
    """Also among the results of searches, whatever the catalogue."""
    experiment = load(EXAMPLES / "webshop" / "experiment.yaml")
    entries = experiment.agents.custom_envs
    (held_out,) = experiment.scheduler.eval_tags
    env: Any = make_env("webshop", entries[held_out].env_config)
    wanted = {goal.product.title for goal in env.shop.goals_of("held_out")}
    shown = set()
    for tag in experiment.scheduler.tags:
        shop: Any = make_env("webshop", entries[tag].env_config)
        everything = " ".join(product.title for product in shop.shop.products)
        shown |= {product.title for product in shop.shop.find(everything, 1000, "train")}
    assert len(shown) > 20
    assert not wanted & shown


def test_demonstrations_fit_the_limits_of_the_example(experiment: Experiment, tmp_path: Path) -> None:
    scratch, warm = experiment.learner.from_scratch, experiment.learner.warm_start
    assert scratch is not None
    assert warm is not None
    folder: Path = load_object(scratch.tokenizer, "tokenizer")(tmp_path)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    renderer = Renderer.from_model_card(ModelCard(config_json=b"{}", tokenizer_files=files))
    play = load_object(warm.demonstrations, "demonstrations")
    entries = [experiment.agents.custom_envs[tag] for tag in experiment.scheduler.tags]
    options: dict[str, Any] = dict(warm.options)
    history_turns, variants = options.pop("history_turns", None), options.pop("variants", [{}])
    assert [{**options, **variant} for variant in variants] == [one.env_config for one in entries]
    assert {history_turns} == {one.history_turns for one in entries}
    num_fitting = num_rows = 0
    for token_ids, mask in play(renderer, seed=0, num_episodes=50, **warm.options):
        runs = "".join(map(str, mask)).replace("0", " ").split()
        assert max(map(len, runs)) <= entries[0].max_tokens_per_step
        num_fitting += len(token_ids) <= experiment.agents.max_episode_tokens
        num_rows += 1
    assert num_fitting >= 0.9 * num_rows  # the others waste their budget


def test_the_environments_of_the_example_are_there(experiment: Experiment) -> None:
    for entry in experiment.agents.custom_envs.values():
        assert make_env(entry.env_type, entry.env_config).reset(seed=0)[0]
