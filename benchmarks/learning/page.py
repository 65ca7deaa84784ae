"""`docs/results.md` and its pictures, from what `benchmarks/results` holds.

`learning.json` has the runs, `gpu.json` the figures of a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks.learning.recipes import RECIPES, ROOT, SEEDS, Recipe
from benchmarks.learning.runs import Outcome
from benchmarks.learning.verdict import MAX_RUN_S
from benchmarks.results import RESULTS_DIR, Target

PAGE = ROOT / "docs" / "results.md"
PICTURES = ROOT / "docs" / "results"
_MARK = {True: "holds", False: "**missed**"}

_HEAD = """# Results of learning

`make results` writes this page. Every run is `tailrace train` with all services on two CPU cores,
without a GPU. The model is that of the demo: half a million random weights and a short warm start on
random replies, which teaches to read the task and the format of an answer, not to win. Success is
measured on held-out tasks, sampled at temperature 1 and greedy, before reinforcement learning and after
the last step, beside that of simple players on the same tasks. Held-out lakes differ in two cells or more
from every train lake and its mirror images and rotations; held-out Sokoban levels have other walls;
held-out WebShop goals are of products that training never shows; held-out sums are other questions. The commit is that of the code that
ran; -dirty: with changes that were not committed. Seconds with <= are those of a run beside other work, which slows it:
alone it would have taken at most as long, and how long is not known. Those of commits 033b5228,
65283f75, afb23423, d13cd8d9, d4d0a222 and 490032ce are of days on which the shared machine had about half its usual speed or less.

| environment | algorithm | seed | sampled before | greedy before | sampled after | greedy after | best simple player | seconds, warm start included | commit |
|---|---|---|---|---|---|---|---|---|---|
"""  # noqa: E501


def write(outcomes: Sequence[Outcome], targets: Sequence[Target]) -> None:
    """Writes the page, and a picture for each recipe with runs."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    for recipe in _known(outcomes):
        _draw(recipe, _of(recipe, outcomes))
    PAGE.write_text(text(outcomes, targets), encoding="utf-8")


def text(outcomes: Sequence[Outcome], targets: Sequence[Target]) -> str:
    """Returns the text of the page."""
    known = _known(outcomes)
    rows = [_row(recipe, outcome) for recipe in known for outcome in _of(recipe, outcomes)]
    bounds = [_bounds(unknown)] if (unknown := _of_unknown_time(outcomes)) else []
    lacks = _lacks(outcomes)
    missing = ["Not run yet with these settings:", "", *lacks] if lacks else []
    goals = ["Goals:", "", *map(_goal, targets)] if targets else []
    sections = [_section(recipe, _of(recipe, outcomes)[0].baselines) for recipe in known]
    of_gpu = _of_gpu(json.loads((RESULTS_DIR / "gpu.json").read_text(encoding="utf-8")))
    parts = (rows, bounds, missing, goals, sections, of_gpu)
    return _HEAD + "\n\n".join(map("\n".join, filter(None, parts)))


def _of_unknown_time(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Runs beside other work that took longer than the goal."""
    return [one for one in outcomes if not one.had_machine and one.total_s > MAX_RUN_S]


def _bounds(outcomes: Sequence[Outcome]) -> str:
    named = (f"`{one.recipe}` {one.seed} (<= {one.total_s:.0f}, {one.others:.0%})" for one in outcomes)
    return (
        f"It is not known whether these runs, each with the share of the machine's processor time that "
        f"other work took meanwhile, would take more than {MAX_RUN_S:.0f} s alone: {', '.join(named)}. "
        "The goals on seconds leave them out."
    )


def _commit(outcome: Outcome) -> str:
    commit, dirty, _ = outcome.commit.partition("-dirty")
    return f"{commit[:8]}{dirty}" or "unknown"


def _of_gpu(content: Mapping[str, Any]) -> list[str]:
    """Every figure of `make bench-gpu`."""
    machine, versions = content["machine"], content["versions"]
    head = (
        f"## On one {content['settings']['gpu']}\n\n"
        f"`make bench-gpu`, with {machine['cores']} CPU cores and torch {versions['torch']}; what each "
        "part does stands in `benchmarks/gpu`.\n\n"
        "| part | figures |\n|---|---|"
    )
    rows = []
    for row in content["rows"]:
        shown = (f"{key} {value:g}" for key, value in row.items() if isinstance(value, float))
        rows.append(f"| {row['what']} | {row.get('failed') or ', '.join(shown)} |")
    goals = [_goal(Target(**target)) for target in content["targets"]]
    return [head, *rows, "", *goals, ""]


def _lacks(outcomes: Sequence[Outcome]) -> list[str]:
    """Recipes of which a seed was not run, with these seeds."""
    missing = []
    for recipe in RECIPES:
        seeds = sorted({*SEEDS} - {outcome.seed for outcome in _of(recipe, outcomes)})
        remark = f". {recipe.remark}" if recipe.remark and len(seeds) == len(SEEDS) else ""
        missing += (
            [f"- `{recipe.name}` with seed {', '.join(map(str, seeds))}{remark}"] if seeds else []
        )
    return missing


def _known(outcomes: Sequence[Outcome]) -> list[Recipe]:
    return [recipe for recipe in RECIPES if _of(recipe, outcomes)]


def _of(recipe: Recipe, outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.recipe == recipe.name]


def _goal(target: Target) -> str:
    return f"- {_MARK[target.holds]}: {target.what}: {target.value:g} (goal {target.goal})"


def _row(recipe: Recipe, outcome: Outcome) -> str:
    cells = (
        recipe.environment,
        recipe.algorithm,
        str(outcome.seed),
        f"{outcome.curve[0][1]:.3f}",
        f"{outcome.greedy[0][1]:.3f}",
        f"{outcome.curve[-1][1]:.3f}",
        f"{outcome.greedy[-1][1]:.3f}",
        f"{outcome.best_baseline:.3f}",
        f"{'' if outcome.had_machine else '<= '}{outcome.total_s:.0f}",
        _commit(outcome),
    )
    return f"| {' | '.join(cells)} |"


def _section(recipe: Recipe, baselines: Mapping[str, float]) -> str:
    picture = _picture(recipe)
    players = ", ".join(f"{name} {success:.3f}" for name, success in baselines.items())
    model = [f"pretrain=runs/{recipe.begins_with}/checkpoints/step_<N>"] if recipe.begins_with else []
    settings = [*map(_quoted, recipe.overrides), *model, "seed=1"]
    command = " ".join(["tailrace train", recipe.experiment, *settings])
    begins = f"It begins with the last checkpoint of `{recipe.begins_with}`.\n\n"
    remark = f"{recipe.remark}\n\n" if recipe.remark else ""
    return (
        f"## {recipe.environment}: {recipe.algorithm}\n\n```bash\n{command}\n```\n\n"
        f"{begins if recipe.begins_with else ''}{remark}"
        f"Simple players: {players}.\n\n"
        f"![held-out success by optimizer step]({picture.relative_to(PAGE.parent)})\n"
    )


def _quoted(override: str) -> str:
    return f"'{override}'" if " " in override else override


def _picture(recipe: Recipe) -> Path:
    return PICTURES / f"{recipe.name}.svg"


def _draw(recipe: Recipe, outcomes: Sequence[Outcome]) -> None:
    figure = Figure(figsize=(6.4, 3.0), layout="constrained")
    axes = figure.add_subplot()
    for number, outcome in enumerate(outcomes):
        for how, style, curve in (("sampled", "-", outcome.curve), ("greedy", "--", outcome.greedy)):
            label = f"seed {outcome.seed}, {how}"
            axes.plot(*zip(*curve, strict=True), style, color=f"C{number}", label=label, linewidth=1.3)
    for name, success in outcomes[0].baselines.items():
        axes.axhline(success, color="grey", linewidth=0.7, linestyle=":")
        axes.annotate(name, (0, success), fontsize=6, color="grey")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("held-out success")
    axes.set_ylim(0.0, 1.0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    with rc_context({"svg.hashsalt": recipe.name}):  # names in the file are the same each time
        figure.savefig(_picture(recipe), metadata={"Date": None})
