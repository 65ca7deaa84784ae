"""The benchmark of learning: recipes that run, a verdict that can fail, a page made of the rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks import bench_learning
from benchmarks.bench_learning import wanted
from benchmarks.learning import page
from benchmarks.learning.recipes import RECIPES, ROOT, Recipe
from benchmarks.learning.runs import NoCheckpointError, Outcome, last_checkpoint
from benchmarks.learning.verdict import judge
from benchmarks.results import RESULTS_DIR, Results
from tailrace_cli.experiment import load, locate
from tailrace_cli.validation import check_experiment

WRITTEN: dict[str, Any] = json.loads((RESULTS_DIR / "learning.json").read_text(encoding="utf-8"))
OUTCOMES = [Outcome.of_cells(row) for row in WRITTEN["rows"]]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_every_recipe_is_a_valid_experiment(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    (tmp_path / "config.json").write_text("{}")
    model = [f"pretrain={tmp_path}"] if recipe.begins_with else []
    experiment = load(locate(recipe.experiment, None, None), [*recipe.overrides, *model])
    check_experiment(experiment)


def test_a_recipe_begins_with_the_last_checkpoint_of_the_same_seed(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match=r"lake_4x4_view with seed 2: run it first"):
        last_checkpoint(tmp_path, "lake_4x4_view", 2)
    for name in ("lake_4x4_view_2/checkpoints/step_90", "lake_4x4_view_2/checkpoints/step_200"):
        (tmp_path / name).mkdir(parents=True)
    assert last_checkpoint(tmp_path, "lake_4x4_view", 2).name == "step_200"


def test_what_a_recipe_begins_with_runs_before_it() -> None:
    names = [recipe.name for recipe in RECIPES]
    begun = [recipe for recipe in RECIPES if recipe.begins_with]
    assert begun
    for recipe in begun:
        assert names.index(recipe.begins_with) < names.index(recipe.name)


def made_up(recipe: str, seed: int = 1, took_s: float = 100.0) -> Outcome:
    sampled, greedy = ((0, 0.05), (10, 0.9)), ((0, 0.0), (10, 0.95))
    players = {"random": 0.01, "avoid the next hole": 0.8}
    return Outcome(recipe, seed, sampled, greedy, players, took_s, took_s, "now", "any")


WAITING_1 = ("slow_lake_synchronous", 1)
GOOD = [
    *(
        made_up(recipe.name, seed)
        for recipe in RECIPES
        if not recipe.name.startswith("slow_lake")
        for seed in (1, 2)
    ),
    *(made_up("slow_lake_synchronous", seed, took_s=200.0) for seed in (1, 2)),
    *(made_up("slow_lake_asynchronous", seed) for seed in (1, 2)),
]


def missed(outcomes: list[Outcome]) -> list[str]:
    """Targets that the verdict counts as missed."""
    results = Results("learning", [])
    judge(results, outcomes)
    assert results.exit_code == int(any(not target.holds for target in results.targets))
    return [target.what for target in results.targets if not target.holds]


def changed(recipe: str, seed: int, **changes: Any) -> list[Outcome]:
    return [
        replace(one, **changes) if (one.recipe, one.seed) == (recipe, seed) else one for one in GOOD
    ]


def test_a_table_that_keeps_every_promise_holds() -> None:
    assert missed(GOOD) == []


def test_an_interrupted_series_goes_on_with_the_runs_that_it_has_not_measured() -> None:
    names = ["webshop_gigpo", "lake_grpo"]
    lake, shop = (next(one for one in RECIPES if one.name == name) for name in ("lake_grpo", names[0]))
    assert list(wanted(names, [1, 2], {})) == [(lake, 1), (shop, 1), (lake, 2), (shop, 2)]
    assert list(wanted(names, [1, 2], {("lake_grpo", 1)})) == [(shop, 1), (lake, 2), (shop, 2)]


def test_a_run_with_other_settings_than_todays_is_not_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench_learning, "RESULTS_DIR", tmp_path)
    lake = next(one for one in RECIPES if one.name == "lake_grpo")
    today = replace(made_up("lake_grpo", 1), settings=lake.settings)
    stale = replace(made_up("lake_grpo", 2), settings="other")
    gone = replace(made_up("lake_of_old", 1), settings="other")
    rows = [one.cells() for one in (today, stale, gone)]
    (tmp_path / "learning.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")
    assert bench_learning.measured() == [today]


def test_one_seed_that_learnt_too_little_misses() -> None:
    gain = "lake_gigpo: gain of greedy success, worst seed"
    ahead = "lake_gigpo: greedy success over the best simple player"
    assert missed(changed("lake_gigpo", 2, greedy=((0, 0.6), (10, 0.89)))) == [gain]
    assert missed(changed("lake_gigpo", 2, greedy=((0, 0.3), (10, 0.79)))) == [ahead]
    assert missed(changed("lake_gigpo", 2, greedy=((0, 0.5), (10, 0.81)))) == []
    assert missed(changed("lake_gigpo", 2, greedy=((0, 0.5), (10, 0.8)))) == [ahead], "a tie"


def test_less_noise_of_the_samples_alone_is_no_gain() -> None:
    """What the sampled curve alone would call learning."""
    denoised = changed("lake_gigpo", 1, curve=((0, 0.23), (10, 0.95)), greedy=((0, 0.95), (10, 0.96)))
    assert missed(denoised) == ["lake_gigpo: gain of greedy success, worst seed"]


def test_one_run_that_took_too_long_misses() -> None:
    late = changed("webshop_gigpo", 1, total_s=601.0)
    assert missed(late) == ["webshop_gigpo: seconds of the slowest run"]


def test_asynchrony_must_be_faster_and_cost_no_success() -> None:
    slower = [
        replace(one, training_s=150.0) if one.recipe == "slow_lake_asynchronous" else one
        for one in GOOD
    ]
    ratio = "asynchronous training against synchronous, in wall time"
    assert missed(slower) == [ratio]
    results = Results("learning", [])
    judge(results, [replace(one, others=0.5) for one in slower])  # other work ran beside them
    assert not any(target.what.startswith(ratio) for target in results.targets)
    results = Results("learning", [])
    judge(results, [replace(one, others=0.5 * (one.seed == 2)) for one in GOOD])
    assert f"{ratio}, of seed 1 alone" in [target.what for target in results.targets]
    on_a_slow_day = [
        replace(one, training_s=3 * one.training_s) if one.seed == 2 else one for one in slower
    ]
    assert missed([one for one in on_a_slow_day if (one.recipe, one.seed) != WAITING_1]) == [ratio]
    worse = [
        replace(one, curve=((0, 0.05), (10, 0.8))) if one.recipe == "slow_lake_asynchronous" else one
        for one in GOOD
    ]
    assert missed(worse) == ["success lost by asynchrony, in mean"]


def test_a_page_says_both_curves_and_the_simple_players(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(page, "PAGE", tmp_path / "results.md")
    monkeypatch.setattr(page, "PICTURES", tmp_path / "results")
    results = Results("learning", [])
    judge(results, GOOD)
    page.write(GOOD, results.targets)
    text = (tmp_path / "results.md").read_text(encoding="utf-8")
    assert "| grpo, dapo loss | 1 | 0.050 | 0.000 | 0.900 | 0.950 | 0.800 | 100 | unknown |" in text
    assert "Simple players: random 0.010, avoid the next hole 0.800." in text
    assert "Not run yet with these settings:\n\n- `lake_grpo` with seed 3\n- `lake_ppo` with" in text
    without_8x8 = [one for one in GOOD if one.recipe != "lake_8x8_view"]
    assert "- `lake_8x8_view` with seed 1, 2, 3. Seeds 1 and 2 began" in page.text(without_8x8, [])
    all_run = [replace(one, seed=seed) for one in GOOD if one.seed == 1 for seed in (1, 2, 3)]
    assert "Not run yet" not in page.text(all_run, results.targets)
    for recipe in RECIPES:
        picture = (tmp_path / "results" / f"{recipe.name}.svg").read_text(encoding="utf-8")
        assert "seed 1, greedy" in picture
        assert "avoid the next hole" in picture


def test_a_page_says_which_commits_were_dirty_and_which_times_are_not_known() -> None:
    dirty = replace(made_up("lake_grpo"), commit=f"{'0a1b' * 10}-dirty")
    late = replace(made_up("lake_ppo", took_s=700.0), commit="0a1b" * 10, others=0.6)
    text = page.text([dirty, late, made_up("webshop_gigpo", took_s=700.0)], [])
    assert "| 100 | 0a1b0a1b-dirty |" in text
    assert "| <= 700 | 0a1b0a1b |" in text
    assert "would take more than 600 s alone: `lake_ppo` 1 (<= 700, 60%). The goals" in text
    assert "It is not known" not in page.text([dirty], [])


def test_the_file_and_the_page_say_what_the_rows_say() -> None:
    results = Results("learning", [])
    judge(results, OUTCOMES)
    assert msgspec.to_builtins(results.targets) == WRITTEN["targets"]
    assert page.PAGE.read_text(encoding="utf-8") == page.text(OUTCOMES, results.targets)
    for recipe in {outcome.recipe for outcome in OUTCOMES}:
        assert (page.PICTURES / f"{recipe}.svg").is_file()


def test_a_row_that_is_read_and_written_stays_as_it_is(tmp_path: Path) -> None:
    for outcomes in (OUTCOMES, GOOD):
        results = Results("learning", [])
        for outcome in outcomes:
            results.add(**outcome.cells())
        again = json.loads(results.write(tmp_path).read_text())["rows"]
        assert [Outcome.of_cells(row) for row in again] == outcomes
    assert replace(GOOD[0], commit="abc").cells()["commit"] == "abc"


def test_seconds_beside_other_work_are_an_upper_bound_that_only_a_short_run_needs() -> None:
    seconds = "webshop_gigpo: seconds of the slowest run"
    long, short = (
        [replace(one, others=0.3, total_s=took_s) for one in GOOD] for took_s in (900.0, 500.0)
    )
    judged = []
    for outcomes in (long, short):
        results = Results("learning", [])
        judge(results, outcomes)
        judged.append({target.what: target.holds for target in results.targets}.get(seconds))
    assert judged == [None, True]
    results = Results("learning", [])
    judge(results, [one if one.seed == 1 else other for one, other in zip(short, long, strict=True)])
    left_out = f"{seconds}, without 1 of 2 beside other work"
    assert left_out in {target.what for target in results.targets}
    assert "| <= 500 |" in page.text(short, [])
