"""Child processes: one that has died is told to whoever asks it, in every event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from tailrace.import_path import python_path
from tailrace.processes import WorkerProcess
from tests.world.serving import eventually


@pytest.mark.parametrize("make_loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_a_process_that_died_before_the_message_is_told_as_one_that_died_during_it(
    make_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def ask_the_dead() -> None:
        process = await WorkerProcess.start("asyncio")
        await process.end()
        await eventually(lambda: process.has_ended)
        with pytest.raises(EOFError):
            await process.exchange("hello", str)
        assert not process.is_usable

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(ask_the_dead())


async def test_a_process_finds_modules_in_the_order_of_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, code in (("mine", 3), ("other", 4)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own_part.py").write_text(f"raise SystemExit({code})\n")
    monkeypatch.chdir(tmp_path / "other")
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path / "mine", ""))
    process = await WorkerProcess.start("own_part")
    assert await process.exit_code() == 3
