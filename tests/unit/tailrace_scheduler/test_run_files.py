"""`events.jsonl` and `metrics.jsonl` on a real file system."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.config import ConfigError
from tailrace_protos.event import Event, RunFinished
from tailrace_scheduler.adapters.run_files import EventFile, LineFile, MetricsFile
from tailrace_scheduler.ports import DiskFullError, Row


def made_event(number: int) -> Event:
    return Event(f"{number}-{number % 3}", float(number), "test", RunFinished(number, "why"))


def made_row(step: int, **values: float) -> Row:
    return {"step": step, "policy_version": step, **values}


def test_events_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    events = [made_event(number) for number in range(5)]
    assert EventFile(tmp_path).append(events) == events
    assert list(EventFile(tmp_path).recover()) == events


def test_an_event_seen_again_is_not_written_again(tmp_path: Path) -> None:
    file = EventFile(tmp_path)
    file.append([made_event(9), made_event(10)])
    assert file.append([made_event(9), made_event(10), made_event(100)]) == [made_event(100)]
    restarted = EventFile(tmp_path)
    assert list(restarted.recover()) == [made_event(number) for number in (9, 10, 100)]
    assert restarted.append([made_event(100), made_event(101)]) == [made_event(101)]
    assert len((tmp_path / "events.jsonl").read_bytes().splitlines()) == 4


@pytest.mark.parametrize("torn", [b'{"seq":"3-0","unix_s":', b"\x00\x00", b'{"seq":"3-0"}'])
def test_a_line_torn_by_a_crash_is_cut_off_and_written_anew(tmp_path: Path, torn: bytes) -> None:
    EventFile(tmp_path).append([made_event(1), made_event(2)])
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(torn)
    restarted = EventFile(tmp_path)
    assert list(restarted.recover()) == [made_event(1), made_event(2)]
    restarted.append([made_event(3)])
    assert list(EventFile(tmp_path).recover()) == [made_event(1), made_event(2), made_event(3)]


def test_a_foreign_line_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("hello\n")
    with pytest.raises(ConfigError, match="exp_name"):
        list(EventFile(tmp_path).recover())


def test_only_one_scheduler_at_a_time_writes_a_run(tmp_path: Path) -> None:
    first, second = EventFile(tmp_path), EventFile(tmp_path)
    assert first.lock()
    assert not second.lock()
    first.close()
    assert second.lock()


def test_a_full_disk_is_an_error_that_names_the_file_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "full.jsonl").symlink_to("/dev/full")
    with pytest.raises(DiskFullError, match="free space on that disk") as refused:
        LineFile(tmp_path / "full.jsonl").append([b"line"])
    assert refused.value.path == tmp_path / "full.jsonl"


def test_a_folder_that_cannot_be_made_is_the_users_to_correct(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="output_dir"):
        LineFile(tmp_path / "file" / "run" / "events.jsonl")


def test_rows_after_a_rewind_are_gone_from_the_file(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    for step in range(4):
        file.append(made_row(step))
    file.rewind(1)
    file.append(made_row(2, loss=0.5))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert lines == [
        '{"step":0,"policy_version":0}',
        '{"step":1,"policy_version":1}',
        '{"step":2,"policy_version":2,"loss":0.5}',
    ]


def test_recovery_keeps_rows_adds_missing_ones_and_removes_strangers(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    for row in (made_row(0, time_s=1.0), made_row(1, time_s=2.0), made_row(7)):
        file.append(row)
    restarted = MetricsFile(tmp_path)
    restarted.recover([made_row(0), made_row(1), made_row(2)])
    restarted.append(made_row(3))
    assert [line.count("time_s") for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        1,
        1,
        0,
        0,
    ]
