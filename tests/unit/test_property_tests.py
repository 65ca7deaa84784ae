"""Tests of properties take as long as they take, also where the environment does not say `CI`."""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def test_no_example_has_a_deadline_or_is_drawn_too_slowly() -> None:
    assert settings.default is not None
    assert settings.default.deadline is None
    assert HealthCheck.too_slow in settings.default.suppress_health_check
