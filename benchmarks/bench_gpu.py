"""The engines and the learner on one GPU: `make bench-gpu`.

Each part runs in a process of its own: what an engine does behind our protocol
(`benchmarks.gpu.engine`) and whole steps of the learner (`benchmarks.gpu.learner`). Rivals:
transformers' `generate` in static batches for the engines, a padded Hugging Face step for the
learner. A part that ends with an error has a row that says so. With `--parts` only these are
measured; the rows of the others stay, if they are of the same GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.results import RESULTS_DIR, Cell, Results

ENGINES = ("torch", "vllm")
PARTS = (
    "torch generate",
    *(f"{engine} {what}" for engine in ENGINES for what in ("tokens", "updates")),
    *(f"learner {side}" for side in ("padded", "packed", "shared")),
)
PACKAGES = ("tailrace", "torch", "transformers", "vllm")
_LIMIT_S = 600.0
Row = dict[str, Cell]


def measured(what: str) -> Row:
    """The row of a part."""
    kind, name = what.split()
    module = "benchmarks.gpu.learner" if kind == "learner" else "benchmarks.gpu.engine"
    argv = [sys.executable, "-m", module, *([name] if kind == "learner" else [kind, name])]
    try:
        ended = subprocess.run(argv, capture_output=True, text=True, timeout=_LIMIT_S, check=True)
    except subprocess.TimeoutExpired:
        return {"what": what, "failed": f"not ended after {_LIMIT_S:g} s"}
    except subprocess.CalledProcessError as error:
        sys.stderr.write(str(error.stderr)[-4000:])
        return {"what": what, "failed": (str(error.stderr).strip().splitlines() or ["?"])[-1][:200]}
    return {"what": what, **json.loads(ended.stdout.strip().splitlines()[-1])}


def known(gpu: str) -> dict[str, Row]:
    """Rows of earlier runs on a GPU of this name."""
    path = RESULTS_DIR / "gpu.json"
    if not path.exists():
        return {}
    content = json.loads(path.read_text())
    return {row["what"]: row for row in content["rows"]} if content["settings"]["gpu"] == gpu else {}


def add_targets(results: Results, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Targets of the parts that have figures."""
    for engine in ENGINES:
        if found := rows.get(f"{engine} updates"):
            share = found["tokens_per_s_learner"] / found["tokens_per_s"]
            results.at_least(f"{engine}: share of tokens/s while versions are staged", share, 0.9)
    if (padded := rows.get("learner padded")) and (shared := rows.get("learner shared")):
        ratio = shared["tokens_per_s"] / padded["tokens_per_s"]
        results.at_least("learner: tokens/s with shared prefixes, times padded", ratio, 3.0)
        of_estimate = shared["peak_gib"] / shared["estimate_gib"]
        results.at_most("learner: peak of memory, times the estimate", of_estimate, 1.05)


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = [each for each in PARTS if not each.startswith("vllm")]
    parser.add_argument("--parts", nargs="*", default=default, choices=PARTS)
    parts = parser.parse_args().parts
    if not torch.cuda.is_available():
        raise SystemExit("bench-gpu: torch sees no CUDA device: run it on a machine with a GPU")
    gpu = torch.cuda.get_device_name()
    results = Results("gpu", PACKAGES, gpu=gpu)
    rows = known(gpu) | {each: measured(each) for each in parts}
    for what in PARTS:
        if what in rows:
            results.add(**rows[what])
    add_targets(results, {what: row for what, row in rows.items() if "failed" not in row})
    results.show()
    results.write()
    return max(results.exit_code, int(any("failed" in row for row in rows.values())))


if __name__ == "__main__":
    sys.exit(main())
