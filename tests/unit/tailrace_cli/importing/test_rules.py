"""Settings of other systems whose meaning depends on others: pieces of configurations, one by one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import yaml

from tailrace.config.settings import value_at
from tailrace_cli.importing.convert import convert
from tailrace_cli.importing.systems import SYSTEMS
from tests.unit.tailrace_cli.importing import areal_pieces, roll_pieces, verl_pieces


def cases(**of_systems: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Every case after the name of its system."""
    return [(system, *case) for system, pieces in of_systems.items() for case in pieces]


@pytest.mark.parametrize(
    ("system", "piece", "expected"),
    cases(roll=roll_pieces.PIECES, verl=verl_pieces.PIECES, areal=areal_pieces.PIECES),
)
def test_settings_mean_what_they_mean_together(
    system: str, piece: str, expected: dict[str, Any]
) -> None:
    imported = convert(SYSTEMS[system], yaml.safe_load(piece))
    assert {key: value_at(imported.content, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("system", "piece", "name", "reason"),
    cases(roll=roll_pieces.UNMAPPED, verl=verl_pieces.UNMAPPED, areal=areal_pieces.UNMAPPED),
)
def test_what_contradicts_or_has_no_meaning_is_unmapped_with_the_reason(
    system: str, piece: str, name: str, reason: str
) -> None:
    unmapped = convert(SYSTEMS[system], yaml.safe_load(piece)).unmapped
    assert list(unmapped) == [name]
    assert reason in unmapped[name]


@pytest.mark.parametrize(
    ("system", "piece", "name", "reason"),
    cases(roll=roll_pieces.IDLE, verl=verl_pieces.IDLE, areal=areal_pieces.IDLE),
)
def test_what_is_switched_off_or_changes_nothing_is_said_to_have_no_effect(
    system: str, piece: str, name: str, reason: str
) -> None:
    imported = convert(SYSTEMS[system], yaml.safe_load(piece))
    assert [key for key in imported.idle if key.endswith(name) and reason in imported.idle[key]]
    assert not imported.unmapped


@pytest.mark.parametrize("piece", verl_pieces.REPEATED)
def test_what_says_again_what_another_setting_says_is_not_listed(piece: str) -> None:
    imported = convert(SYSTEMS["verl"], yaml.safe_load(piece))
    assert not imported.unmapped


def test_weights_of_rows_of_the_current_policy_are_not_mapped() -> None:
    correction = {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "sequence"}
    unmapped = convert(SYSTEMS["verl"], {"algorithm": {"rollout_correction": correction}}).unmapped
    assert "weights of tokens alone" in unmapped["algorithm.rollout_correction.rollout_is"]
    assert "algorithm.rollout_correction.bypass_mode" in unmapped
