"""`engines.jsonl`: bounded, whole lines, and no reason for a run to stop."""

import os
from pathlib import Path

import msgspec
import pytest

from tailrace_protos.control import ServerState, ServerStatus
from tailrace_scheduler.adapters import engine_log
from tailrace_scheduler.adapters.engine_log import SILENT_S, EngineLog

FIRST = ServerStatus(
    server_id="s0", state=ServerState.READY, nats_subject="", zmq_endpoint="", host_id="h",
    policy_version=0, capacity_tokens=1000, max_running=8, num_running=0, num_waiting=0,
    num_failed=0, idle_s=0.0, busy_s=0.0, heartbeat_unix_s=0.0, incarnation="a",
)  # fmt: skip


def at(unix_s: float, steps: int, **changes: str) -> ServerStatus:
    return msgspec.structs.replace(FIRST, heartbeat_unix_s=unix_s, num_steps=steps, **changes)


def kept(folder: Path) -> list[ServerStatus]:
    lines = (folder / "engines.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line, type=ServerStatus) for line in lines]


def test_a_server_has_a_line_at_each_interval_in_which_it_worked(tmp_path: Path) -> None:
    log = EngineLog(tmp_path)
    reports = [at(0, 0), at(1, 5), at(5, 9), at(6, 12), at(11, 9 + 3), at(30, 12), at(31, 40)]
    reports.append(at(31.5, 1, incarnation="b"))
    for report in reports:
        log.heard(report)
    assert kept(tmp_path) == [reports[each] for each in (0, 2, 4, 6, 7)]


def test_servers_that_are_gone_leave_the_memory(tmp_path: Path) -> None:
    """Every pod may have another name; one of another's name is told as before."""
    log = EngineLog(tmp_path)
    for number in range(1000):
        log.heard(at(60.0 * number, 5, server_id=f"pod-{number}"))
    assert len(log._kept) <= SILENT_S / 60 + 1
    log.heard(at(59_940.5, 7, server_id="pod-999"))
    assert len(kept(tmp_path)) == 1000


def test_intervals_get_longer_also_over_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_log, "LINES_AT_INTERVAL", 4)
    for start in range(2):
        log = EngineLog(tmp_path)
        for second in range(100):
            log.heard(at(start * 100 + second, start * 100 + second))
        log.close()
    assert len(kept(tmp_path)) < 20
    (tmp_path / "engines.jsonl").open("ab").write(b'{"torn')
    EngineLog(tmp_path).heard(at(1000, 1000))
    assert kept(tmp_path)[-1] == at(1000, 1000)


def test_a_full_disk_costs_lines_alone(tmp_path: Path) -> None:
    log = EngineLog(tmp_path)
    descriptor = log._file._descriptor
    there = os.dup(descriptor)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, descriptor)
    log.heard(at(0, 0))
    os.dup2(there, descriptor)
    log.heard(at(1, 1))
    assert kept(tmp_path) == [at(1, 1)]
    for each in (there, full):
        os.close(each)
