"""Word problems as a conversation: a question, several attempts, and their results.

The answer of a reply follows `####`. After a wrong answer, or a reply without `####`, the model reads a
note and the number of attempts left; both count as attempts.

A model writes the replies, so a comparison takes bounded time for any text. Answers longer than
`MAX_CHARS`, factorials and powers of more than three digits are never right.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec

from tailrace.config import ConfigError, decode_config
from tailrace.data import DatasetEntry, load_dataset
from tailrace.scorers import maths
from tailrace.scorers.answers import boxed
from tailrace.scorers.numbers import quantity
from tailrace_envs.game import Answer, TextGame
from tailrace_envs.maths.config import Equality, MathsConfig
from tailrace_envs.maths.problems import WordProblem, problem_for_seed

INSTRUCTION = (
    "\nThink step by step. Then write the answer, a single number, behind ####, as in: #### 42"
)
NO_ANSWER = "I find no answer behind #### in what you wrote. "
WRONG = "{} is not right. "
MARK = "####"
MAX_CHARS = 64
_EMPHASIS = "*_`"  # of Markdown

_POWER = re.compile(r"\^|\*\*")
_SMALL_POWER = re.compile(r"(?:\^|\*\*)[{(]?-?\d{1,3}(?!\d)")


class MathsText(TextGame):
    """Plays one problem at a time, selected by the seed of `reset`.

    Options are the keys of `MathsConfig`.
    """

    def __init__(self, **options: Any) -> None:
        self.config = decode_config(options, MathsConfig, "env_config")
        super().__init__(self.config.max_attempts)
        self._source = ProblemSource(self.config)
        self._is_right = comparison(self.config.equality)
        self.problem: WordProblem = self._source.problem(0)
        self._num_attempts = 0
        self._is_solved = False

    def begin(self, seed: int) -> str:
        """See `TextGame`."""
        self.problem = self._source.problem(seed)
        self._num_attempts = 0
        self._is_solved = False
        return self.problem.question + (INSTRUCTION if self.config.instructions else "")

    def answer(self, reply: str) -> Answer:
        """See `TextGame`."""
        config = self.config
        stated = extract_answer(reply)
        discount = config.attempt_discount**self._num_attempts
        self._num_attempts += 1
        if stated is None:
            reward = 0.0 - config.invalid_action_penalty
            return Answer(NO_ANSWER + self._left(), reward, is_invalid=True)
        self._is_solved = self._is_right(stated, self.problem.answer)
        if not self._is_solved:
            return Answer(WRONG.format(stated) + self._left(), 0.0)
        numbers = {"num_attempts": float(self._num_attempts)}
        return Answer("That is right.", discount, is_over=True, numbers=numbers)

    def success(self) -> float:
        """See `TextGame`."""
        return float(self._is_solved)

    def _left(self) -> str:
        num_left = self.config.max_attempts - self._num_attempts
        return f"Attempts left: {num_left}."


def extract_answer(reply: str) -> str | None:
    """Text after the last `####`, up to the end of its line, without the marks of bold text or code
    around it; None without it."""
    _, mark, rest = reply.rpartition(MARK)
    answer = rest.strip().partition("\n")[0].strip().rstrip(f" .{_EMPHASIS}").lstrip(f" {_EMPHASIS}")
    return answer if mark and answer else None


def comparison(equality: Equality) -> Callable[[str, str], bool]:
    """Returns the comparison of an answer with the truth; `ConfigError` if its package is missing."""
    if equality == "number":
        return is_same_number
    maths.library()
    return lambda answer, truth: (
        is_same_number(answer, truth) or (_is_quick(answer) and maths.is_equal(answer, truth))
    )


def is_same_number(answer: str, truth: str) -> bool:
    """True if both texts state the same number, compared exactly."""
    if len(answer) > MAX_CHARS:
        return False
    number, wanted = quantity(boxed(answer) or answer), quantity(truth)
    return number is not None and wanted is not None and number.equals(wanted)


def _is_quick(text: str) -> bool:
    """True if evaluating the text takes a short time for sure, in a thread without a time limit."""
    num_powers = len(_POWER.findall(text))
    is_small = num_powers <= 1 and num_powers == len(_SMALL_POWER.findall(text))
    return len(text) <= MAX_CHARS and "!" not in text and is_small


class ProblemSource:
    """Problems of a data set or of the generator: a pure function of (configuration, seed)."""

    def __init__(self, config: MathsConfig) -> None:
        self._config = config
        entry = config.dataset
        self._rows = _rows(msgspec.json.encode(entry)) if entry is not None else ()

    def problem(self, seed: int) -> WordProblem:
        """Problem of a seed. As many consecutive seeds as rows give each row once."""
        if self._rows:
            return self._rows[seed % len(self._rows)]
        config = self._config
        return problem_for_seed(config.num_operations, config.max_number, config.split, seed)


@lru_cache(maxsize=8)
def _rows(entry: bytes) -> tuple[WordProblem, ...]:
    """Reads the rows of a data set, once per process."""
    dataset = load_dataset(msgspec.json.decode(entry, type=DatasetEntry), 0, "dataset")
    return tuple(_row(row.data, row.origin) for row in dataset.rows)


def _row(data: dict[str, object], origin: str) -> WordProblem:
    question, answer = data.get("question"), data.get("answer")
    for key, value in (("question", question), ("answer", answer)):
        if not isinstance(value, str | int | float) or not str(value).strip():
            raise ConfigError(
                f"{origin}: key {key!r} must be text (found {', '.join(sorted(data))}): write a "
                "converter if it has another name"
            )
    truth = str(answer).rpartition(MARK)[2].strip()
    return WordProblem(str(question).strip(), truth)
