"""Metrics of the learner's work."""

from __future__ import annotations

from prometheus_client import REGISTRY

from tailrace_learner import metrics
from tailrace_learner.adapters.observation import DriftSeries


def exported() -> dict[str, float]:
    family = next(each for each in REGISTRY.collect() if each.name == "tailrace_learner_drift")
    return {sample.labels["server_id"]: sample.value for sample in family.samples}


def test_a_server_that_is_gone_keeps_no_drift_and_one_without_tokens_in_a_step_does() -> None:
    metrics.DRIFT.clear()
    series = DriftSeries()
    series.show({"drift/inference-0": 0.01, "drift/inference-1": 0.4, "loss": 1.0})
    for _ in range(15):
        series.show({"drift/inference-0": 0.02})
    assert exported() == {"inference-0": 0.02, "inference-1": 0.4}
    for _ in range(15):
        series.show({"drift/inference-0": None})
    assert exported() == {"inference-0": 0.02}
    series.show({"drift/inference-1": 0.03})
    assert exported() == {"inference-0": 0.02, "inference-1": 0.03}
