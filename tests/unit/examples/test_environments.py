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


def test_the_example_is_valid_and_evaluates_what_it_never_trains_on(experiment: Experiment) -> None:
    check_experiment(experiment)
    entries = experiment.agents.custom_envs
    (train,), (held_out,) = experiment.scheduler.tags, experiment.scheduler.eval_tags
    assert entries[held_out].env_config == {**entries[train].env_config, "split": "held_out"}
    assert entries[train].env_config.get("split", "train") == "train"


def test_demonstrations_fit_the_limits_of_the_example(experiment: Experiment, tmp_path: Path) -> None:
    scratch, warm = experiment.learner.from_scratch, experiment.learner.warm_start
    assert scratch is not None
    assert warm is not None
    folder: Path = load_object(scratch.tokenizer, "tokenizer")(tmp_path)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    renderer = Renderer.from_model_card(ModelCard(config_json=b"{}", tokenizer_files=files))
    play = load_object(warm.demonstrations, "demonstrations")
    (tag,) = experiment.scheduler.tags
    entry = experiment.agents.custom_envs[tag]
    options: dict[str, Any] = dict(warm.options)
    options.pop("random_moves", None)
    assert options == entry.env_config
    num_fitting = 0
    for token_ids, mask in play(renderer, seed=0, num_episodes=50, **warm.options):
        runs = "".join(map(str, mask)).replace("0", " ").split()
        assert max(map(len, runs)) <= entry.max_tokens_per_step
        num_fitting += len(token_ids) <= experiment.agents.max_episode_tokens
    assert num_fitting >= 45  # the others waste their budget


def test_the_environments_of_the_example_are_there(experiment: Experiment) -> None:
    for entry in experiment.agents.custom_envs.values():
        assert make_env(entry.env_type, entry.env_config).reset(seed=0)[0]
