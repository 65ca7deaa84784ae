"""Ends of sessions whose callers do not wait: what a session had is removed all the same."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tailrace_sandbox.adapters.boxes import BoxSandbox
from tailrace_sandbox.adapters.runner import Runner
from tailrace_sandbox.config import DockerConfig, SandboxConfig
from tailrace_sandbox.ports import SandboxSession


class Slow:
    """A box, or a zygote with its group, that is gone after `may_end`."""

    def __init__(self) -> None:
        self.zygote = SimpleNamespace(is_lost=False)
        self.began, self.may_end = asyncio.Event(), asyncio.Event()
        self.is_gone = False

    async def close(self) -> None:
        self.began.set()
        await self.may_end.wait()
        self.is_gone = True


class SlowBoxes:
    """Boxes that are one slow one."""

    def __init__(self, box: Slow) -> None:
        self._box = box

    async def open(self, mode: str, image: str) -> Any:
        return self._box

    async def start(self) -> None: ...

    async def close(self) -> None: ...


def on_boxes(slow: Slow, _: pytest.MonkeyPatch) -> BoxSandbox:
    boxes: Any = SlowBoxes(slow)
    return BoxSandbox(boxes, SandboxConfig(backend="docker", docker=DockerConfig(image="i")))


def on_zygotes(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> Runner:
    place: Any = SimpleNamespace(config=SandboxConfig(), remove=lambda: None)
    runner = Runner(place)

    async def started(_: object) -> Any:
        return slow

    monkeypatch.setattr(runner, "_started", started)
    return runner


@pytest.mark.parametrize("make", [on_boxes, on_zygotes])
async def test_a_session_is_removed_although_the_close_of_it_is_cancelled(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow()
    sandbox = make(slow, monkeypatch)
    session: SandboxSession = await sandbox.open_session()
    closing = asyncio.create_task(session.close())
    await slow.began.wait()
    closing.cancel()  # the tool's release took too long
    await asyncio.wait({closing})
    ending = asyncio.create_task(sandbox.close())
    asyncio.get_running_loop().call_soon(slow.may_end.set)
    await ending
    assert slow.is_gone
