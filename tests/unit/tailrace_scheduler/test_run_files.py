"""`events.jsonl` and `metrics.jsonl` on a real file system."""

from __future__ import annotations

import io
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tailrace.config import ConfigError
from tailrace_protos.event import Event, RunFinished
from tailrace_scheduler.adapters import run_files
from tailrace_scheduler.adapters.run_files import EventFile, LineFile, LogShrunkError, MetricsFile
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


@pytest.mark.parametrize("line", [b"hello\n", b'{"seq":"\xff"}\n', b"[" * 100_000 + b"\n"])
def test_a_foreign_line_is_an_error_with_the_remedy(line: bytes, tmp_path: Path) -> None:
    for name in ("events.jsonl", "metrics.jsonl"):
        (tmp_path / name).write_bytes(line)
    with pytest.raises(ConfigError, match=r"events\.jsonl .* exp_name"):
        list(EventFile(tmp_path).recover())
    with pytest.raises(ConfigError, match=r"metrics\.jsonl .* exp_name"):
        MetricsFile(tmp_path).recover([made_row(0)])


def test_only_one_scheduler_at_a_time_writes_a_run(tmp_path: Path) -> None:
    first, second = EventFile(tmp_path), EventFile(tmp_path)
    assert first.lock()
    assert not second.lock()
    first.close()
    assert second.lock()


def test_a_standby_reads_what_the_writer_adds_and_writes_on_from_there(tmp_path: Path) -> None:
    writer, standby = EventFile(tmp_path), EventFile(tmp_path)
    assert writer.lock()
    assert list(standby.follow()) == []
    writer.append([made_event(1), made_event(2)])
    assert list(standby.follow()) == [made_event(1), made_event(2)]
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"seq":"3-0","unix')  # the writer has not written all of it yet
    assert list(standby.follow()) == []
    writer.close()
    assert standby.lock()
    assert list(standby.recover()) == []
    assert standby.append([made_event(2), made_event(3)]) == [made_event(3)]
    assert list(EventFile(tmp_path).recover()) == [made_event(1), made_event(2), made_event(3)]


def test_a_line_that_is_written_while_a_standby_reads_it_is_read_whole_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = made_event(1), made_event(2)
    EventFile(tmp_path).append([first, second])
    whole = (tmp_path / "events.jsonl").read_bytes()
    cut = len(whole) - 20
    pieces = [*whole[:cut].splitlines(keepends=True), whole[cut:]]  # as `for line in file` meets them

    class Growing(io.BytesIO):
        def __iter__(self) -> Iterator[bytes]:  # type: ignore[override]
            return iter(pieces)

    standby = EventFile(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda *_: Growing(whole))
        assert list(standby.follow()) == [first]
    assert list(standby.follow()) == [second]


def test_a_standby_takes_a_long_log_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_files, "_FOLLOWED_AT_ONCE", 3)
    events = [made_event(number) for number in range(1, 9)]
    EventFile(tmp_path).append(events)
    standby = EventFile(tmp_path)
    assert [list(standby.follow()) for _ in range(2)] == [events[:3], events[3:6]]
    assert list(standby.recover()) == events[6:]


@pytest.mark.parametrize("name", ["follow", "recover"])
def test_a_standby_that_read_what_the_writer_took_back_begins_anew(tmp_path: Path, name: str) -> None:
    """The writer's disk was full: it applied none of these events, and they may never come again."""
    writer, standby = EventFile(tmp_path), EventFile(tmp_path)
    writer.append([made_event(1)])
    size = (tmp_path / "events.jsonl").stat().st_size
    writer.append([made_event(2)])
    assert len(list(standby.follow())) == 2
    os.truncate(tmp_path / "events.jsonl", size)
    with pytest.raises(LogShrunkError, match=r"events\.jsonl lost .* start this one again"):
        list(getattr(standby, name)())


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


def test_rows_stay_on_the_disk_alone(tmp_path: Path) -> None:
    """A run of 100,000 steps has hundreds of megabytes of them."""
    file = MetricsFile(tmp_path)
    tracemalloc.start()
    for step in range(2000):
        file.append(
            {"step": step, "policy_version": step} | {f"key/{step}/{n}": 0.5 for n in range(40)}
        )
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 100_000


def many_rows(num_rows: int) -> list[Row]:
    return [made_row(step) | {f"key/{n}": step + n / 7 for n in range(40)} for step in range(num_rows)]


@pytest.mark.parametrize("num_expected", [2000, 1999])
def test_a_restart_or_a_rewind_reads_rows_one_after_the_other(
    num_expected: int, tmp_path: Path
) -> None:
    """Their dictionaries take 10 MB; those of 100,000 steps exceeded a scheduler's memory."""
    rows, file = many_rows(2000), MetricsFile(tmp_path)
    for row in rows:
        file.append(row)
    restarted = MetricsFile(tmp_path)
    tracemalloc.start()
    restarted.recover(rows[:num_expected])
    _, in_recovery = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    restarted.rewind(1900)
    _, in_rewind = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert in_recovery < 4_000_000
    assert in_rewind < 4_000_000
    restarted.append(made_row(1901))
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    assert [msgspec.json.decode(line)["step"] for line in lines] == [*range(1901), 1901]
    assert msgspec.json.decode(lines[1900]) == rows[1900]


def test_a_rewind_does_not_decode_the_rows_that_stay(tmp_path: Path) -> None:
    """For 100,000 of them it held up the scheduler for many seconds."""
    file = MetricsFile(tmp_path)
    for step in range(4):
        file.append(made_row(step))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"[]\n" + path.read_bytes())
    before = path.stat().st_ino
    file.rewind(7)
    assert path.stat().st_ino == before
    file.rewind(2)
    assert [len(line) for line in path.read_bytes().splitlines()] == [2, 29, 29, 29]


def test_a_rewind_beyond_the_first_row_leaves_none(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    file.rewind(0)
    file.append(made_row(3))
    file.rewind(2)
    file.append(made_row(3, loss=0.5))
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step":3,"policy_version":3,"loss":0.5}\n'


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
