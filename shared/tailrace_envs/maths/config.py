"""Keys of `env_config` for `env_type: maths`."""

from typing import Literal

from tailrace.config import Config
from tailrace.data.config import DatasetEntry
from tailrace_envs.rewards import check_rewards
from tailrace_envs.splits import Split

Equality = Literal["number", "expression"]


class MathsConfig(Config, frozen=True, kw_only=True):
    """The keys of `env_config` for `env_type: maths`."""

    dataset: DatasetEntry | None = None
    """Rows with `question` and `answer`; the last line of `answer` is like `#### 18`, or `answer` is
    the bare answer. A `converter` maps other key names. null: problems are generated."""

    split: Split = "train"
    """Generated problems that seeds select from: `train`, `held_out` (never a train problem) or `all`.
    The split of a data set is `dataset.split`."""

    num_operations: int = 3
    """Number of calculations in a generated problem."""

    max_number: int = 20
    """Largest number in the text of a generated problem."""

    max_attempts: int = 2
    """Number of answers that the model may give; the last wrong one ends the episode."""

    attempt_discount: float = 1.0
    """The reward of the right answer is this value to the power of the number of earlier attempts."""

    equality: Equality = "expression"
    """Rule for a right answer. `number`: the same number. `expression`: the same number, or equal by
    math-verify (`1/2` and `\\frac{1}{2}`, `\\sqrt{4}` and `2`); needs the extra `math`."""

    invalid_action_penalty: float = 0.0
    """Penalty that is subtracted from the reward of a reply without `####` and an answer after it."""

    instructions: bool = True
    """The first observation ends with instructions on the form of an answer."""

    def __post_init__(self) -> None:
        for key in ("num_operations", "max_attempts"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1")
        if not 5 <= self.max_number <= 10_000:
            raise ValueError("max_number must be 5 to 10000")
        if not 0.0 <= self.attempt_discount <= 1.0:
            raise ValueError("attempt_discount must be 0 to 1")
        check_rewards(self)
        if self.dataset is not None and self.split != "train":
            raise ValueError("split is for generated problems: set dataset.split instead")
