"""Writes `algorithms.md` from the docstrings of the learner's estimators, losses and corrections.

`python docs/make_algorithms.py` writes it, `--check` only says whether it is what the code says.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from tailrace_learner.config import LearnerConfig
from tailrace_learner.config_algorithm import READERS, AdvEstimator, PolicyLoss

PAGE = Path(__file__).with_name("algorithms.md")
CORE = Path(__file__).parents[1] / "services" / "tailrace_learner" / "core"
INTRODUCTION = """# Algorithms

Made from the docstrings by `make docs`; `learner.adv_estimator` and `learner.loss` choose by name.

Notation: token t of row i; `pi` is the current policy, `pi_old` the policy at the start of the step
(proximal), `mu` the policy that sampled, as the engine reported its log-probabilities; A the advantage,
R a return, g a group of episodes of one task. Everything counts policy tokens only: what was inserted
into a conversation is never trained, averaged or discounted through. Episodes that ended by
infra_failure, timeout or cancellation are left out of every statistic.
"""


def page() -> str:
    """The whole page."""
    return "\n".join(_lines()).rstrip() + "\n"


def _lines() -> Iterator[str]:
    yield INTRODUCTION
    yield from _part("Returns", "Before any estimator.", [("Shaping", "algorithms/advantages/shaping")])
    names = [(name, f"algorithms/advantages/{name}") for name in get_args(AdvEstimator)]
    yield from _part("Advantages", "`learner.adv_estimator`", names, "adv_estimator")
    whole = [("Whole-step statistics", "step/step_advantages")]
    yield from _part("After all groups", "Configurations that wait for the whole step.", whole)
    names = [(name, f"algorithms/losses/{name}") for name in (*get_args(PolicyLoss), "sft")]
    yield from _part("Losses", "`learner.loss`; `sft` is for warm starts.", names, "loss")
    rest = [
        ("Aggregation", "algorithms/aggregation"),
        ("Behaviour correction", "algorithms/corrections"),
        ("Divergence from a reference", "algorithms/kl"),
        ("Interpolated proximal policy", "algorithms/proximal"),
    ]
    yield from _part("Around every loss", "", rest)
    critic = [("Value loss", "algorithms/losses/value_clip")]
    yield from _part("The critic", "`learner.critic`, given with `adv_estimator: gae`.", critic)


def _part(title: str, remark: str, entries: Sequence[tuple[str, str]], key: str = "") -> Iterator[str]:
    yield f"## {title}\n"
    if remark:
        yield f"{remark}\n"
    for name, module in entries:
        yield f"### {name}\n"
        tree = ast.parse((CORE / f"{module}.py").read_text())
        yield (ast.get_docstring(tree, clean=False) or "").rstrip() + "\n"
        settings = [
            f"`{setting}`"
            + ("" if (value := getattr(LearnerConfig(), setting)) is None else f" ({value!r})")
            for setting, (selector, readers) in READERS.items()
            if selector == key and name in readers
        ]
        if settings:
            yield f"Settings and defaults: {', '.join(settings)}.\n"


def main() -> int:
    """Write the page, or say whether it is up to date."""
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.is_file() and PAGE.read_text() == page() else 1
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
