"""The watch on the run directory's disk."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from tailrace_cli.cluster import disk_watch
from tailrace_cli.cluster.disk_watch import DiskWatch


async def test_a_folder_that_is_away_for_a_time_is_watched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a network file system; an end of the watch would keep the cluster from its orderly end."""
    monkeypatch.setattr(disk_watch, "INTERVAL_S", 0.01)
    monkeypatch.setattr(disk_watch, "FULL_BELOW_BYTES", 1 << 62)
    told: asyncio.Queue[str] = asyncio.Queue()
    folder = tmp_path / "run"
    watch = DiskWatch(folder, tmp_path / "nats.log", None, told.put_nowait)
    with pytest.raises(FileNotFoundError):
        watch.look()
    watching = asyncio.create_task(watch.run())
    try:
        await asyncio.wait({watching}, timeout=0.1)
        folder.mkdir()
        assert "is full" in await asyncio.wait_for(told.get(), 60)
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
