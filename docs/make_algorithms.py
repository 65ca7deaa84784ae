"""Writes `algorithms.md` from the docstrings of the learner's estimators, losses and corrections.

`python docs/make_algorithms.py` writes it; `--check` exits with 1 if it differs from the code.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tailrace_learner.config import LearnerConfig
from tailrace_learner.config_registry import CORRECTIONS, ESTIMATORS, LOSSES, AlgorithmRegistry

PAGE = Path(__file__).with_name("algorithms.md")
CORE = Path(__file__).parents[1] / "services" / "tailrace_learner" / "core"
INTRODUCTION = """# Algorithms

`make docs` writes this page from the docstrings. `learner.adv_estimator` and `learner.loss` choose by
name; [own_algorithm.md](own_algorithm.md) shows how to add your own.

Notation: t is a token of row i, `pi` the current policy, `pi_old` the policy at the start of the step
(proximal), `mu` the policy that sampled, by the log-probabilities that the engine reported. A is the
advantage, R a return, g a group of episodes of one task. Only policy tokens count: tokens that were
inserted into a conversation are not trained, averaged or discounted. Episodes that ended by
infra_failure, timeout or cancellation are in no statistic. A group has no learning signal if all its
returns are equal.
"""


def page() -> str:
    """Returns the whole page."""
    return "\n".join(_lines()).rstrip() + "\n"


def _lines() -> Iterator[str]:
    yield INTRODUCTION
    yield from _part("Returns", "Before any estimator.", {"Shaping": "algorithms/advantages/shaping"})
    yield from _part("Advantages", "`learner.adv_estimator`", _files(ESTIMATORS), ESTIMATORS)
    whole = {"Whole-step statistics": "step/step_advantages"}
    yield from _part("After all groups", "Computations that need the whole step.", whole)
    losses = _files(LOSSES) | {"sft": "algorithms/losses/sft"}
    yield from _part("Losses", "`learner.loss`; `sft` is for warm starts.", losses, LOSSES)
    corrections = {"Formulas": "algorithms/corrections"} | dict.fromkeys(CORRECTIONS, "")
    remark = "`learner.behaviour_correction`, for every loss."
    yield from _part("Behaviour correction", remark, corrections, CORRECTIONS)
    rest = {
        "Aggregation": "algorithms/aggregation",
        "Log-ratios": "algorithms/ratios",
        "Divergence from a reference": "algorithms/kl",
        "Interpolated proximal policy": "algorithms/proximal",
    }
    yield from _part("For every loss", "", rest)
    critic = {"Value loss": "algorithms/losses/value_clip"}
    yield from _part("The critic", "`learner.critic`, for `adv_estimator: gae`.", critic)


def _files(registry: AlgorithmRegistry[Any]) -> dict[str, str]:
    """Modules of the algorithms of a registry, by name."""
    paths = {name: registry.path(name).partition(":")[0] for name in registry}
    return {name: path.replace(".", "/").partition("core/")[2] for name, path in paths.items()}


def _part(
    title: str, remark: str, modules: Mapping[str, str], registry: AlgorithmRegistry[Any] | None = None
) -> Iterator[str]:
    yield f"## {title}\n"
    if remark:
        yield f"{remark}\n"
    defaults = LearnerConfig()
    for name, module in modules.items():
        yield f"### {name}\n"
        declared = registry[name] if registry is not None and name in registry else None
        if module:
            text = ast.get_docstring(ast.parse((CORE / f"{module}.py").read_text()), clean=False)
        else:  # several in one file
            text = declared and inspect.getdoc(declared.fn)
        yield (text or "").rstrip() + "\n"
        keys = declared.keys if declared is not None else ()
        settings = [
            f"`{key}`" + ("" if (value := getattr(defaults, key)) is None else f" ({value!r})")
            for key in defaults.__struct_fields__
            if key in keys
        ]
        if settings:
            yield f"Settings and defaults: {', '.join(settings)}.\n"


def main() -> int:
    """Writes the page, or checks that it is up to date."""
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.is_file() and PAGE.read_text() == page() else 1
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
