"""The end of a server while nats-server is away."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from tailrace_inference import __main__ as process


async def test_a_server_that_leaves_without_nats_finishes_its_calls_and_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    def noting(name: str) -> object:
        async def note(*_: object) -> None:
            done.append(name)

        return note

    async def put(status: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(process, "_TELL_S", 0.01)
    monkeypatch.setattr(process.REGISTRY, "unregister", lambda _: done.append("metrics"))
    made = SimpleNamespace(
        service=SimpleNamespace(bus=SimpleNamespace(registry=SimpleNamespace(put=put))),
        status=lambda: None,
        failed=False,
        config=SimpleNamespace(drain_s=1.0),
        handler=SimpleNamespace(finish=noting("calls"), close=lambda: done.append("log")),
        listeners=SimpleNamespace(stop=noting("listeners")),
        engine=SimpleNamespace(close=noting("engine")),
        collector=None,
    )
    async with asyncio.timeout(60):
        await process._Process.leave(made)  # type: ignore[arg-type]
    assert done == ["calls", "listeners", "engine", "log", "metrics"]
