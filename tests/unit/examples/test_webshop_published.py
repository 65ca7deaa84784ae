"""The WebShop example on published files: training and evaluation shop in the same catalogue."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tailrace_cli.experiment import load
from tailrace_cli.validation import check_experiment
from tailrace_envs.webshop.environment import WebShopText

EXAMPLE = Path(__file__).parents[3] / "examples" / "webshop" / "published.yaml"
NUM_PRODUCTS = 60  # more than the generated shop has


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files in the published form, in the folder that the example reads."""
    asins = [f"B{number:09d}" for number in range(NUM_PRODUCTS)]
    items = [
        {"asin": asin, "name": f"lamp {asin}", "pricing": "$9.99", "query": "lamp"} for asin in asins
    ]
    notes = {asin: {"attributes": ["bright"]} for asin in asins}
    wish = {
        "instruction": "a bright lamp",
        "instruction_attributes": ["bright"],
        "instruction_options": [],
    }
    contents = {
        "items_shuffle": items,
        "items_ins_v2": notes,
        "items_human_ins": {asin: [wish] for asin in asins},
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    monkeypatch.setenv("TAILRACE_WEBSHOP", str(tmp_path))
    return tmp_path


def test_training_and_evaluation_shop_among_all_products_of_the_same_files(files: Path) -> None:
    experiment = load(EXAMPLE)
    check_experiment(experiment)
    (train,), (held_out,) = experiment.scheduler.tags, experiment.scheduler.eval_tags
    entries = experiment.agents.custom_envs
    assert entries[held_out].env_config == {**entries[train].env_config, "split": "held_out"}
    envs = [WebShopText(**entries[tag].env_config) for tag in (train, held_out)]
    assert envs[0].shop is envs[1].shop
    assert len(envs[0].shop.products) == NUM_PRODUCTS
    goals = [env.shop.goals_of(env.config.split) for env in envs]
    assert {goal.digest for goal in goals[0]}.isdisjoint(goal.digest for goal in goals[1])
    assert len(goals[0]) + len(goals[1]) == NUM_PRODUCTS
    assert {goal.options for split in goals for goal in split} == {()}
    for env in envs:
        observation, _ = env.reset(seed=0)
        assert "Instruction: a bright lamp, and price lower than" in observation
