"""Rows in the learner's own log: one line per step."""

from tailrace.config import RunConfig
from tailrace.log import get_logger
from tailrace_learner.ports import MetricsRow, known_numbers

log = get_logger(__name__)

_KEYS = ("reward_mean", "success_rate", "eval/success_rate", "loss", "grad_norm", "tokens_per_s")


class ConsoleTracker:
    """Logs the known numbers among `keys` of every step; `["*"]` logs all of them."""

    def __init__(self, run: RunConfig, *, keys: tuple[str, ...] = _KEYS) -> None:
        self._keys = keys

    def write(self, row: MetricsRow) -> None:
        """Log one line."""
        step, numbers = known_numbers(row)
        keys = numbers if self._keys == ("*",) else self._keys
        log.info("metrics", step=step, **{key: numbers[key] for key in keys if key in numbers})

    def flush(self) -> None:
        """Do nothing: a line is written at once."""

    def close(self) -> None:
        """Do nothing: there is nothing to close."""
