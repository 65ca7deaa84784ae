"""Functions that users name: demonstrations of a warm start, and metrics of their own."""

import math
from collections.abc import Iterator

from tailrace.chat import Renderer, TemplateError
from tailrace.config import ChatArgs, ConfigError
from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.log import get_logger
from tailrace_learner.adapters.model_source import (
    DEMONSTRATIONS_KEY,
    demonstration_arrays,
    demonstration_pairs,
)
from tailrace_learner.config import LearnerConfig, WarmStart
from tailrace_learner.config_registry import METRICS, Metric
from tailrace_learner.core.algorithms.metrics import Metrics, StepData
from tailrace_learner.core.batch.rows import TrainingRow, demonstration_row
from tailrace_learner.core.step.step import MetricFunction
from tailrace_protos.weights import ModelCard

log = get_logger(__name__)

_SPARE_SHARE = 0.1  # of spare rows: those with an empty mask are left out


def demonstrations(
    warm: WarmStart, card: ModelCard, chat: ChatArgs, seed: int
) -> Iterator[TrainingRow]:
    """Yield usable rows; `ConfigError` if the function fails or yields something else."""
    num_episodes = round(warm.num_steps * warm.batch_size * (1.0 + _SPARE_SHARE))
    try:
        renderer = Renderer.from_model_card(card, chat)
    except TemplateError as error:
        raise ConfigError(f"{DEMONSTRATIONS_KEY}: {error}") from error
    pairs = demonstration_pairs(warm, renderer, seed, num_episodes)
    for index in range(num_episodes):
        try:
            with foreign_code(DEMONSTRATIONS_KEY):
                pair = next(pairs, None)
                if pair is None:
                    return
                row = demonstration_row(f"demo-{index}", *demonstration_arrays(pair, card))
        except ForeignCodeError as error:
            raise ConfigError(str(error)) from error
        if row is not None:
            yield row


def own_metrics(config: LearnerConfig) -> list[MetricFunction]:
    """Metrics that the experiment names, as functions of a step's data that never raise."""
    return [_OwnMetric(name, METRICS.find(name), config) for name in config.metrics]


class _OwnMetric:
    """A user's metric; a failure costs its numbers of that step and is logged once in a row."""

    def __init__(self, name: str, metric: Metric, config: LearnerConfig) -> None:
        self._name = name
        self._metric = metric
        self._config = config
        self._has_failed = False

    def __call__(self, step: StepData) -> Metrics:
        """Compute finite numbers by name; a number that is not finite is unknown."""
        try:
            with foreign_code(f"learner.metrics: {self._name}"):
                found = self._metric.fn(step, self._config)
                numbers = {str(name): _number(value) for name, value in found.items()}
        except ForeignCodeError as error:
            if not self._has_failed:
                remedy = "correct the function; it returns a dict of numbers by name"
                log.error("metric fails", step=step.step, error=str(error), remedy=remedy)
            self._has_failed = True
            return {}
        self._has_failed = False
        return numbers


def _number(value: object) -> float | None:
    number = math.nan if value is None else float(value)  # type: ignore[arg-type]
    return number if math.isfinite(number) else None
