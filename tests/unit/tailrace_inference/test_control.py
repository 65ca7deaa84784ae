"""Being told to leave: by anybody, or by one who means this start of the process."""

from __future__ import annotations

import pytest

from tailrace_inference.handlers import ControlHandler
from tailrace_protos.control import DrainRequest
from tests.unit.tailrace_scheduler.simulation import made_status


@pytest.mark.parametrize(("meant", "leaves"), [("", True), ("now", True), ("before", False)])
async def test_a_server_leaves_unless_an_earlier_start_of_it_was_meant(
    meant: str, leaves: bool
) -> None:
    status = made_status("inference-0", incarnation="now")
    reasons: list[str] = []
    reply = await ControlHandler(reasons.append, lambda: status).drain(DrainRequest("wrong", meant))
    assert reply == status
    assert bool(reasons) is leaves
