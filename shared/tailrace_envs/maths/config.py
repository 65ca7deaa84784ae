"""The keys of `env_config` for `env_type: maths`."""

from __future__ import annotations

from typing import Literal

from tailrace.config import Config
from tailrace.data.config import DatasetEntry

Split = Literal["train", "held_out", "all"]
Equality = Literal["number", "expression"]


class MathsConfig(Config, frozen=True, kw_only=True):
    """The keys of `env_config` for `env_type: maths`."""

    dataset: DatasetEntry | None = None
    """Rows with `question` and `answer`, whose last line is `#### 18` (or that is the answer itself);
    other names by `converter`. null: problems are generated."""

    split: Split = "train"
    """Which generated problems seeds choose from: `train`, `held_out` (never a train problem) or
    `all`. The split of a data set is `dataset.split`."""

    num_operations: int = 3
    """Calculations in a generated problem."""

    max_number: int = 20
    """The largest number that a generated problem tells."""

    max_attempts: int = 2
    """Answers that may be given; the last wrong one ends the episode."""

    attempt_discount: float = 1.0
    """The reward of the right answer is this to the power of the attempts before it."""

    equality: Equality = "expression"
    """When an answer is right. `number`: it is the same number. `expression`: or math-verify finds it
    equal (`1/2` and `\\frac{1}{2}`, `\\sqrt{4}` and `2`); needs the extra `math`."""

    invalid_action_penalty: float = 0.0
    """Subtracted from the reward of a turn whose reply has no `####` with an answer behind it."""

    instructions: bool = True
    """End the first observation with how to answer."""

    def __post_init__(self) -> None:
        for key in ("num_operations", "max_attempts"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1")
        if not 5 <= self.max_number <= 10_000:
            raise ValueError("max_number must be 5 to 10000")
        if not 0.0 <= self.attempt_discount <= 1.0:
            raise ValueError("attempt_discount must be 0 to 1")
        if self.invalid_action_penalty < 0:
            raise ValueError("invalid_action_penalty must not be negative: it is subtracted")
        if self.dataset is not None and self.split != "train":
            raise ValueError("split is for generated problems: set dataset.split instead")
