"""Where problems come from: a data set in memory, or the generator."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from tailrace.config import ConfigError
from tailrace.data import DatasetEntry, load_dataset
from tailrace_envs.maths.answers import MARK
from tailrace_envs.maths.config import MathsConfig
from tailrace_envs.maths.problems import Problem, problem_for_seed


class ProblemSource:
    """Problems by seed: a pure function of (configuration, seed)."""

    def __init__(self, config: MathsConfig) -> None:
        self._config = config
        entry = config.dataset
        self._rows = _rows(msgspec.json.encode(entry)) if entry is not None else ()

    def problem(self, seed: int) -> Problem:
        """Seeds walk through the rows, so as many consecutive seeds as rows give each row once."""
        if self._rows:
            return self._rows[seed % len(self._rows)]
        config = self._config
        return problem_for_seed(config.num_operations, config.max_number, config.split, seed)


@lru_cache(maxsize=8)
def _rows(entry: bytes) -> tuple[Problem, ...]:
    """The rows of a data set, read once per process."""
    dataset = load_dataset(msgspec.json.decode(entry, type=DatasetEntry), 0, "dataset")
    return tuple(_row(row.data, row.origin) for row in dataset.rows)


def _row(data: dict[str, object], origin: str) -> Problem:
    question, answer = data.get("question"), data.get("answer")
    for key, value in (("question", question), ("answer", answer)):
        if not isinstance(value, str | int | float) or not str(value).strip():
            raise ConfigError(
                f"{origin}: key {key!r} must be text (found {', '.join(sorted(data))}): write a "
                "converter if it has another name"
            )
    truth = str(answer).rpartition(MARK)[2].strip()
    return Problem(str(question).strip(), truth)
