"""Groups of torch.distributed whose calls never return: others wait for a deadline, and go on."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from tailrace.weights import process_group
from tailrace.weights.broadcast import BroadcastMember
from tailrace.weights.process_group import BroadcastFailedError, BroadcastGroup, MeetingPoint
from tailrace_protos.weights import BroadcastReply, BroadcastRequest, WeightManifest, WeightSource
from tailrace_weight_sync.adapters.broadcaster import Broadcaster

TIMEOUT_S = 0.2


class StuckGroup:
    """Blocks in `broadcast`, as NCCL does while it waits for a member that died before."""

    def __init__(self) -> None:
        self.begun, self.aborted, self.end = (threading.Event() for _ in range(3))

    def broadcast(self, tensors: object, options: object) -> Any:
        self.begun.set()
        self.end.wait()
        raise RuntimeError("NCCL error: remote process exited\nmore about it")

    def abort(self) -> None:
        self.aborted.set()
        self.end.wait()


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> StuckGroup:
    group = StuckGroup()
    monkeypatch.setattr(process_group, "_make_group", lambda *_: group)
    monkeypatch.setattr(process_group, "_GRACE_S", 0.0)
    return group


@pytest.fixture
def meeting() -> MeetingPoint:
    return MeetingPoint("127.0.0.1")


def place(meeting: MeetingPoint, timeout_s: float = TIMEOUT_S, backend: str = "gloo") -> BroadcastReply:
    return BroadcastReply("g-1", 1, 2, backend, "127.0.0.1", meeting.port, timeout_s)


def test_a_call_that_never_returns_costs_the_deadline_and_the_group_is_left(
    stuck: StuckGroup, meeting: MeetingPoint
) -> None:
    others = set(threading.enumerate())  # of tests before
    group = BroadcastGroup(place(meeting), "127.0.0.1")
    with pytest.raises(BroadcastFailedError, match="no member moved"):
        group.receive(memoryview(bytearray(100)))
    assert stuck.aborted.wait(60)
    with pytest.raises(BroadcastFailedError, match="the group is closed"):
        group.receive(memoryview(bytearray(100)))
    left = [each for each in threading.enumerate() if each.name == "broadcast" and each not in others]
    assert len(left) == 2, "one in `broadcast`, one in `abort`"
    assert all(each.daemon for each in left)
    stuck.end.set()


def test_the_end_of_a_group_ends_a_call_that_waits_at_once(
    stuck: StuckGroup, meeting: MeetingPoint
) -> None:
    group = BroadcastGroup(place(meeting, timeout_s=60.0), "127.0.0.1")
    threading.Thread(target=lambda: (stuck.begun.wait(60), group.close())).start()
    began_s = time.monotonic()
    with pytest.raises(BroadcastFailedError, match="the group is closed"):
        group.receive(memoryview(bytearray(100)))
    assert time.monotonic() - began_s < 30
    stuck.end.set()


def test_an_error_of_torch_is_told_in_one_line(stuck: StuckGroup, meeting: MeetingPoint) -> None:
    stuck.end.set()
    group = BroadcastGroup(place(meeting, timeout_s=60.0), "127.0.0.1")
    with pytest.raises(BroadcastFailedError, match=r"^NCCL error: remote process exited$"):
        group.send(memoryview(bytearray(100)))


def test_a_member_that_leaves_keeps_nobody_beyond_the_deadline(meeting: MeetingPoint) -> None:
    """Others notice it, at the latest by the deadline; one may have got all before the sender did."""
    places = [
        BroadcastReply("g-2", rank, 3, "gloo", "127.0.0.1", meeting.port, 10.0) for rank in range(3)
    ]
    stores = (meeting.store, None, None)
    groups = [BroadcastGroup(*each) for each in zip(places, ["127.0.0.1"] * 3, stores, strict=True)]

    def carry() -> list[str]:
        calls = [groups[0].send, groups[1].receive, groups[2].receive]
        with ThreadPoolExecutor(3) as pool:
            done = [pool.submit(call, memoryview(bytearray(12_000_000))) for call in calls]
        return [type(each.exception()).__name__ for each in done]

    assert carry() == ["NoneType"] * 3
    groups[2].close()
    sender, other, left = carry()
    assert (sender, left) == ("BroadcastFailedError",) * 2
    assert other in ("NoneType", "BroadcastFailedError")


def test_a_member_without_progress_fetches_in_another_way_and_asks_for_a_place_again(
    stuck: StuckGroup, meeting: MeetingPoint
) -> None:
    asked: list[str] = []

    async def request(subject: str, request: BroadcastRequest, *_: object, **__: object) -> object:
        asked.append(request.group_id)
        return place(meeting)

    async def fetch() -> list[memoryview | None]:
        bus: Any = SimpleNamespace(request=request)
        member = BroadcastMember(bus, "run", "host", "s0", "127.0.0.1")
        manifest = WeightManifest(0, "a", 0, None, (), 64)
        return [await member.receive(manifest, WeightSource("host", "", "")) for _ in range(2)]

    assert asyncio.run(fetch()) == [None, None]
    assert asked == ["", ""], "it is in no group any more"
    stuck.end.set()


def test_weight_sync_gives_places_again_after_a_broadcast_without_progress(stuck: StuckGroup) -> None:
    async def two() -> list[BroadcastReply]:
        broadcaster = Broadcaster(
            lambda version: memoryview(bytearray(64)),
            bind_host="127.0.0.1",
            advertise_host="",
            timeout_s=TIMEOUT_S,
        )
        await broadcaster.start()
        places = []
        for version in range(2):
            places.append(await broadcaster.join(BroadcastRequest("s0", version, "", "")))
            task = broadcaster._task
            assert task is not None
            await asyncio.wait_for(asyncio.shield(task), 60)
        await broadcaster.stop()
        return places

    first, second = asyncio.run(two())
    assert first.group_id
    assert second.group_id not in ("", first.group_id)
    stuck.end.set()


def test_a_process_ends_while_torch_does_not() -> None:
    program = """
        import asyncio, threading
        from tailrace.weights import process_group
        from tailrace_protos.weights import BroadcastReply

        class Stuck:
            def broadcast(self, *_): threading.Event().wait()
            abort = broadcast

        async def main():
            meeting = process_group.MeetingPoint("127.0.0.1")
            place = BroadcastReply("g", 0, 2, "gloo", "127.0.0.1", meeting.port, 0.1)
            group = process_group.BroadcastGroup(place, "127.0.0.1", meeting.store)
            try:
                await asyncio.to_thread(group.send, memoryview(bytearray(9)))
            except process_group.BroadcastFailedError as error:
                print(error)

        process_group._make_group = lambda *_: Stuck()
        asyncio.run(main())
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert ended.stdout.startswith("no member moved")


@pytest.mark.parametrize("given", ["", "3"])
def test_no_watchdog_of_nccl_ends_the_process_and_other_groups_keep_theirs(
    given: str, meeting: MeetingPoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, str]] = []

    def nccl(*_: object) -> str:
        made.append({name: os.environ[name] for name in process_group._NCCL_ENVIRONMENT})
        return "group"

    nccl.Options = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setattr(process_group, "_DIST", SimpleNamespace(ProcessGroupNCCL=nccl))
    for name in process_group._NCCL_ENVIRONMENT:
        monkeypatch.setenv(name, given) if given else monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    timeout: Any = None
    group = process_group._make_group(None, place(meeting, backend="nccl"), timeout, "")
    assert group == "group"
    assert set(made[0].values()) == {"0"}
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" in made[0]
    assert dict(os.environ) == before
