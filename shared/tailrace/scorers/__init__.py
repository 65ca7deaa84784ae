"""Built-in scorers: rewards for known kinds of answers, chosen by name or by a row's data source.

Each is `scorer(reply, truth, row, **options) -> float` from 0 to 1: the last reply without its
thoughts, the true answer, the row. `docs/scorers.md` describes them.
"""

from tailrace.scorers.answers import NoTruthError, final_answer, last_reply, truth_of
from tailrace.scorers.maths import aime, gsm8k, is_equal, math
from tailrace.scorers.registry import SCORERS, UnknownSourceError, scorer_for
from tailrace.scorers.texts import em, f1, json_schema, mcq

__all__ = [
    "SCORERS",
    "NoTruthError",
    "UnknownSourceError",
    "aime",
    "em",
    "f1",
    "final_answer",
    "gsm8k",
    "is_equal",
    "json_schema",
    "last_reply",
    "math",
    "mcq",
    "scorer_for",
    "truth_of",
]
