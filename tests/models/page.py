"""Writes `docs/models.md`: `python -m tests.models.page [NAME...]` judges all entries, or some anew."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import transformers

from tests.models.judge import Verdict, verdict
from tests.models.zoo import ZOO

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_HEAD = """# Models

Learner and engine run models of transformers. Both check at load, on the weights that they get, that
the fast way gives what the plain model gives, and take a slower way where it does not; what they cannot
compute they refuse by name. So a model that is not listed here gets a right way too. The checks compare
a short and a long sequence, past the model's special lengths (window, chunk, first context).

The table is what `make test-models` finds on tiny random models of transformers {version}:
log-probabilities and gradients are those of the plain model, row by row. A name after a colon is a
variant.

- **Learner** (`learner.model_args.forward`). *Shared prefixes*: rows packed into one pass, common
  beginnings once. *Packed*: without the latter. *One row at a time*: the plain model; slower. *Below a
  special length*: longer rows go by themselves.
- **LoRA**: the same, with adapters in all linear layers (`learner.lora.target_modules: [all-linear]`)
  but those of one weight.
- **Engine** (`inference.forward`). *Yes*: continuous batching over paged keys and values. *One sequence
  at a time*: the plain model with its own cache; slow with many running requests. *Below a special
  length*: the model changes there for earlier tokens too, so that no engine could sample what the
  learner trains; sequences end before it.

The learner logs its way as `path of rows` with the reason that no faster one is right; the run's event
`model_prepared` holds both. Routers get no auxiliary loss: training leaves their balance as it is.
Weights in float8 or MXFP4 are read as float32; models that are quantized otherwise are refused.

| model type | learner | LoRA | engine |
|---|---|---|---|
"""


def line(name: str, found: Verdict) -> str:
    """Row of the table."""
    return f"| `{name}` | {found.learner} | {found.lora} | {found.engine} |"


def head() -> str:
    """The page above its rows."""
    return _HEAD.format(version=transformers.__version__)


def lines_of(text: str) -> dict[str, str]:
    """Rows of a page by the name of their entry."""
    return {found[1]: found[0] for found in re.finditer(r"^\| `([^`]+)` \|.*$", text, re.MULTILINE)}


def main() -> None:
    """Judges entries and writes the page."""
    known = lines_of(PAGE.read_text()) if PAGE.is_file() and sys.argv[1:] else {}
    for name in sys.argv[1:] or ZOO:
        known[name] = line(name, verdict(name))
    PAGE.write_text(head() + "\n".join(known[name] for name in ZOO if name in known) + "\n")


if __name__ == "__main__":
    main()
