"""A word problem as a conversation: the question, answers, and whether they are right.

The answer of a reply stands behind `####`. A wrong one is answered by the news and how many attempts
are left; one without `####` by a note, and it counts as an attempt.
"""

from __future__ import annotations

from typing import Any

from tailrace.config import decode_config
from tailrace_envs.game import Answer, TextGame
from tailrace_envs.maths.answers import comparison, said_answer
from tailrace_envs.maths.config import MathsConfig
from tailrace_envs.maths.problems import Problem
from tailrace_envs.maths.source import ProblemSource

INSTRUCTION = (
    "\nThink step by step. Then write the answer, a single number, behind ####, as in: #### 42"
)
NO_ANSWER = "I find no answer behind #### in what you wrote. "
WRONG = "{} is not right. "


class MathsText(TextGame):
    """One problem at a time, chosen by the seed of `reset`. Options are the keys of `MathsConfig`."""

    def __init__(self, **options: Any) -> None:
        self.config = decode_config(options, MathsConfig, "env_config")
        super().__init__(self.config.max_attempts)
        self._source = ProblemSource(self.config)
        self._is_right = comparison(self.config.equality)
        self.problem: Problem = self._source.problem(0)
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
        said = said_answer(reply)
        discount = config.attempt_discount**self._num_attempts
        self._num_attempts += 1
        if said is None:
            reward = 0.0 - config.invalid_action_penalty
            return Answer(NO_ANSWER + self._left(), reward, is_invalid=True)
        self._is_solved = self._is_right(said, self.problem.answer)
        if not self._is_solved:
            return Answer(WRONG.format(said) + self._left(), 0.0)
        numbers = {"num_attempts": float(self._num_attempts)}
        return Answer("That is right.", discount, is_over=True, numbers=numbers)

    def success(self) -> float:
        """See `TextGame`."""
        return float(self._is_solved)

    def _left(self) -> str:
        num_left = self.config.max_attempts - self._num_attempts
        return f"Attempts left: {num_left}."
