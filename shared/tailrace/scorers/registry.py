"""All built-in scorers, and the choice of one by a row's `data_source`."""

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from tailrace.config import ConfigError
from tailrace.scorers import maths, texts
from tailrace.scorers.answers import NoTruthError, last_reply, truth_of
from tailrace.scorers.code import program_tests
from tailrace_protos.chat import ChatMessage
from tailrace_protos.episode import EnvTask

SCORE_ADDRESS = "tailrace.scorers.registry:score"


class UnknownSourceError(ValueError):
    """No scorer is known for a row's data source."""


class ScorerSpec(NamedTuple):
    """One scorer: its function, if it needs nothing else, the sources that it scores, its options."""

    function: Callable[..., float] | None
    sources: tuple[str, ...]  # patterns for the words of a data source
    options: frozenset[str] = frozenset()
    place: Literal["process", "sandbox", "judge"] = "process"
    unless: tuple[str, ...] = ()  # patterns for words of sources that it does not score all the same

    def scores(self, words: Sequence[str]) -> bool:
        """Tells whether the words of a data source name one that this scorer scores."""
        return _any_fits(words, self.sources) and not _any_fits(words, self.unless)


_STRICT = frozenset({"strict"})

SCORERS: dict[str, ScorerSpec] = {
    "gsm8k": ScorerSpec(maths.gsm8k, ("gsm8k*", "gsm", "svamp*", "asdiv*", "multiarith*"), _STRICT),
    "aime": ScorerSpec(maths.aime, ("aime*",), _STRICT, unless=("amc*", "numina*")),
    "mcq": ScorerSpec(
        texts.mcq,
        ("mmlu*", "gpqa*", "arc", "mathqa*", "medqa*", "medmcqa*", "csqa*", "commonsense*",
         "openbookqa*", "hellaswag*", "truthfulqa*", "supergpqa*"),
        _STRICT,
    ),
    "code": ScorerSpec(
        None,
        ("code*", "apps", "taco", "humaneval*", "mbpp*", "livecodebench*", "leetcode*", "primecode*"),
        frozenset({"partial", "max_tests", "timeout_s"}),
        "sandbox",
    ),
    "em": ScorerSpec(
        texts.em,
        ("nq", "triviaqa*", "trivia", "hotpotqa*", "hotpot", "popqa*", "2wiki*", "musique*",
         "bamboogle*", "searchr1*"),
    ),
    "f1": ScorerSpec(texts.f1, ("squad*", "drop", "narrativeqa*", "quac*")),
    "json_schema": ScorerSpec(texts.json_schema, ("jsonschema*",)),
    "math": ScorerSpec(
        maths.math,
        ("math*", "*math", "olympiad*", "minerva*", "numina*", "deepscaler*", "amc*",
         "omni*", "orz*", "dapo*"),
        _STRICT,
    ),
    "judge": ScorerSpec(None, (), place="judge"),
}  # fmt: skip


def scorer_for(source: str, sources: Mapping[str, str]) -> str:
    """Name of the scorer of a data source; the user's `sources` (patterns) come before our own."""
    lowered = source.lower()
    for pattern, name in sources.items():
        if fnmatchcase(lowered, pattern.lower()):
            return name
    if lowered in SCORERS:
        return lowered
    words = [word for word in re.split(r"[^a-z0-9]+", lowered) if word]
    for name, spec in SCORERS.items():
        if spec.scores(words):
            return name
    if not source:
        raise UnknownSourceError(
            "the row has no data_source: set data_source of its data set, or `scorer` of the reward"
        )
    raise UnknownSourceError(
        f"no scorer is known for the data source {source!r}: map it under `sources` of the reward to "
        f"one of {', '.join(SCORERS)}"
    )


def _any_fits(words: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(word, pattern) for word in words for pattern in patterns)


def check_truth(scorer: str, row: Mapping[str, Any]) -> None:
    """Raises `ValueError` if a row has no truth that the scorer can read."""
    function = SCORERS[scorer].function
    if scorer == "code":
        program_tests("pass", row, 1)
    elif function is maths.math:  # comparing would import sympy
        maths.answers_of(_truth(row))
    elif function is not None:
        function("Answer: A", _truth(row), row)


def score(
    task: EnvTask,
    messages: Sequence[ChatMessage],
    metrics: Mapping[str, float],
    *,
    scorer: str,
    options: Mapping[str, Any] | None = None,
) -> float:
    """Scores an episode of a row by a scorer that needs nothing but the reply."""
    function = SCORERS[scorer].function
    assert function is not None, f"{scorer} does not run in this process"
    return function(last_reply(messages), _truth(task.row), task.row, **(options or {}))


def prepare() -> None:
    """Imports what takes long, if it is installed, before the first call."""
    with contextlib.suppress(ConfigError):
        maths.library()


def _truth(row: Mapping[str, Any]) -> Any:
    has_schema = any(row.get(key) is not None for key in ("json_schema", "schema"))
    try:
        return truth_of(row)
    except NoTruthError:
        if has_schema:
            return None
        raise
