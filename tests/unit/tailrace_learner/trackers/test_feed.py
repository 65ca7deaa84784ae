"""Trackers of a step's numbers."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from structlog.testing import capture_logs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from tailrace.config import RunConfig
from tailrace_learner import metrics
from tailrace_learner.adapters.process import tracker_feeds
from tailrace_learner.adapters.trackers import feed as tracker_feed
from tailrace_learner.adapters.trackers import tracker_makers
from tailrace_learner.adapters.trackers.feed import TrackerFeed
from tailrace_learner.adapters.trackers.row_file import RowFile
from tailrace_learner.adapters.trackers.tensorboard import TensorboardTracker
from tailrace_learner.config import LearnerConfig, WandbArgs
from tailrace_learner.ports import MetricsRow
from tailrace_scheduler.adapters.run_files import MetricsFile
from tests.unit.tailrace_learner.trackers.run_files import RunFiles, curves_of

WRITES = """
import asyncio, os, sys, urllib.request, wandb
from tailrace.config import RunConfig
from tailrace_learner.adapters.trackers import feed as feeds, tracker_makers
from tailrace_learner.adapters.trackers.feed import TrackerFeed
from tailrace_learner.adapters.trackers.row_file import RowFile
feeds._CLOSE_S = 120.0  # wandb starts a program of its own, slowly on a busy machine
run = RunConfig(exp_name="unit", output_dir=sys.argv[1])
make = tracker_makers(run, {"wandb": {"project": "lakes"}})["wandb"]
for step in (2, 9):  # the second learner resumes
    feed = TrackerFeed("wandb", make, RowFile(run.run_dir / "metrics.jsonl"), step)
    feed.start()
    asyncio.run(feed.close())
urllib.request.urlopen(os.environ["WANDB_BASE_URL"] + "/offline_is_over")
try:
    tracker_makers(run, {"wandb": {"project": "lakes", "mode": "online"}})["wandb"]()
except wandb.Error:
    sys.exit(5)
"""

BLOCK_BYTES = 32768


def records(content: bytes) -> Iterator[bytes]:
    """Of a `.wandb` file: a header of 7 bytes, then a log in LevelDB's format."""
    place, parts = 7, b""
    while place + 7 <= len(content):
        if BLOCK_BYTES - place % BLOCK_BYTES < 7:  # no room for a header: the block is padded
            place += BLOCK_BYTES - place % BLOCK_BYTES
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def read_wandb(content: bytes) -> tuple[str, str, list[dict[str, float]]]:
    """Project, name and rows of a run."""
    project = name = ""
    rows = []
    for data in records(content):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "run":
            project, name = record.run.project, record.run.display_name
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
    return project, name, rows


def shown_curves(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """Values that TensorBoard shows."""
    shown = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    points = {tag: shown.Scalars(tag) for tag in shown.Tags()["scalars"]}
    return {tag: [(one.step, one.value) for one in of_tag] for tag, of_tag in points.items() if of_tag}


def tensorboard_feed(run_dir: Path, step: int) -> TrackerFeed:
    run = RunConfig(exp_name=run_dir.name, output_dir=str(run_dir.parent))
    make = partial(TensorboardTracker, run)
    return TrackerFeed("tensorboard", make, RowFile(run_dir / "metrics.jsonl"), step)


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    return RunFiles(tmp_path / "unit")


async def test_tensorboard_shows_every_number_of_the_rows_at_the_time_of_its_step(
    files: RunFiles,
) -> None:
    feed = tensorboard_feed(files.run_dir, 0)
    feed.start()
    files.first_run()
    feed.reached(3)
    await feed.close()
    curves = shown_curves(files.run_dir)
    assert curves == files.curves
    wanted = "eval/success_rate eval/reward_mean eval/tag/lake/success_rate outcome/ok idle/credit"
    assert curves.keys() >= {*wanted.split(), "policy_version", "time_s", "tag/lake/reward_mean"}
    assert "eval/tag/shop/reward_mean" not in curves  # nobody knows it
    shown = EventAccumulator(str(files.run_dir / "tensorboard")).Reload()
    assert [one.wall_time for one in shown.Scalars("loss")] == [1004.0, 1007.0, 1010.0]


def test_a_resumed_run_has_each_step_once_and_none_that_was_taken_back(files: RunFiles) -> None:
    files.first_run()
    first = tensorboard_feed(files.run_dir, 3)
    assert first.deliver()
    second = tensorboard_feed(files.run_dir, 1)
    assert second.deliver()  # the scheduler has not taken steps 2 and 3 back yet
    assert shown_curves(files.run_dir)["policy_version"] == [(0, 10.0), (1, 11.0)]
    files.resume("M", 1)
    files.step("M", 2, 15)
    second.reached(2)
    assert second.deliver()
    assert shown_curves(files.run_dir)["policy_version"] == [(0, 10.0), (1, 11.0), (2, 15.0)]
    assert shown_curves(files.run_dir) == files.curves


def test_steps_taken_back_while_a_tracker_has_them_are_hidden(files: RunFiles) -> None:
    files.first_run()
    feed = tensorboard_feed(files.run_dir, 3)
    assert feed.deliver()
    files.resume("M", 1)
    files.step("M", 2, 15)
    assert feed.deliver()
    assert shown_curves(files.run_dir) == files.curves


def test_a_row_that_is_no_text_fails_the_tracker_and_not_its_thread(files: RunFiles) -> None:
    files.first_run()
    with (files.run_dir / "metrics.jsonl").open("ab") as rows:
        rows.write(b'{"step":3,"policy_version":13,"note":"\xff"}\n')
    assert not tensorboard_feed(files.run_dir, 3).deliver()


def test_a_disk_that_takes_nothing_is_counted_logged_once_and_loses_no_row(files: RunFiles) -> None:
    files.first_run()
    feed = tensorboard_feed(files.run_dir, 3)
    folder = files.run_dir / "tensorboard"
    folder.write_text("in the way")
    before = metrics.FAILED_TRACKERS.labels("tensorboard")._value.get()
    with capture_logs() as logs:
        assert not feed.deliver()
        feed._backoff.next_s()
        assert not feed.deliver()
    assert [line["event"] for line in logs] == ["tracker fails"]
    assert metrics.FAILED_TRACKERS.labels("tensorboard")._value.get() == before + 2
    folder.unlink()
    assert feed.deliver()
    assert shown_curves(files.run_dir) == files.curves


class Moody:
    """A tracker whose row of step 2 fails, the first time, and its end as well."""

    made: ClassVar[list[Moody]] = []

    def __init__(self) -> None:
        self.made.append(self)
        self.rows: list[MetricsRow] = []
        self.is_closed = False

    def write(self, row: MetricsRow) -> None:
        if row["step"] == 2 and len(self.made) == 1:
            raise RuntimeError("no")
        self.rows.append(row)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True
        if len(self.made) == 1:
            raise RuntimeError("no")


def test_a_tracker_that_failed_is_closed_and_begins_anew_with_all_rows(files: RunFiles) -> None:
    files.first_run()
    feed = TrackerFeed("moody", Moody, RowFile(files.run_dir / "metrics.jsonl"), 3)
    with capture_logs() as logs:
        assert not feed.deliver()
    assert [line["event"] for line in logs] == ["tracker fails", "failed tracker not closed"]
    assert [tracker.is_closed for tracker in Moody.made] == [True]
    assert feed.deliver()
    assert feed.deliver()
    assert [row["step"] for row in Moody.made[-1].rows] == [0, 1, 2, 3]


class Holding:
    """A tracker that holds its rows until it is flushed."""

    def __init__(self) -> None:
        self.held: list[MetricsRow] = []
        self.most_held = 0
        self.steps: list[float | None] = []

    def write(self, row: MetricsRow) -> None:
        self.held.append(row)
        self.most_held = max(self.most_held, len(self.held))

    def flush(self) -> None:
        self.steps += [row["step"] for row in self.held]
        self.held = []

    def close(self) -> None:
        pass


def test_the_rows_of_a_long_run_reach_a_new_tracker_in_parts(tmp_path: Path) -> None:
    """A learner that starts again after 100,000 steps gives its tracker all of them."""
    file = MetricsFile(tmp_path)
    for step in range(3000):
        file.append({"step": step} | {f"key/{n}": step + n / 7 for n in range(40)})
    made: list[Holding] = []

    def make() -> Holding:
        made.append(Holding())
        return made[-1]

    feed = TrackerFeed("holding", make, RowFile(tmp_path / "metrics.jsonl"), 2500)
    assert feed.deliver()
    assert made[0].steps == [*range(2501)]
    assert made[0].most_held < 1500
    feed.reached(2600)
    assert feed.deliver()
    assert made[0].steps == [*range(2601)]
    file.rewind(2700)  # nothing that the tracker has
    file.append({"step": 2701})
    feed.reached(3000)
    assert feed.deliver()
    assert made[0].steps == [*range(2702)]
    file.rewind(2000)
    assert feed.deliver()
    assert [len(one.steps) for one in made] == [2702, 2001]


@pytest.mark.parametrize("key", ["eval/greedy/success_rate", "eval/tag/lake/pass@4"])
def test_whatever_a_row_gets_later_reaches_the_tracker(key: str, files: RunFiles) -> None:
    files.first_run()
    feed = tensorboard_feed(files.run_dir, 3)
    assert feed.deliver()
    last = json.loads((files.run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    files.rows.rewind(2)
    files.rows.append({**last, key: 0.75})
    assert feed.deliver()
    assert shown_curves(files.run_dir)[key] == [(3, 0.75)]
    assert shown_curves(files.run_dir) == files.curves


async def test_a_tracker_that_hangs_is_left_behind(
    files: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_feed, "_CLOSE_S", 0.2)
    files.first_run()
    hangs = threading.Event()

    def make() -> Moody:
        hangs.wait(30)
        return Moody()

    feed = TrackerFeed("slow", make, RowFile(files.run_dir / "metrics.jsonl"), 3)
    feed.start()
    feed.reached(3)
    with capture_logs() as logs:
        await feed.close()
    assert logs[0]["event"].startswith("tracker abandoned")
    hangs.set()
    feed._thread.join(60)


def test_a_row_that_is_being_written_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = RowFile(path)
    assert rows.read() == ([], False)
    path.write_text('{"step": 0}\n{"st')
    assert rows.read() == ([{"step": 0}], True)
    path.write_text('{"step": 0}\n{"step": 1}\n')
    assert rows.read() == ([{"step": 1}], False)


class Unfriendly(BaseHTTPRequestHandler):
    """Knows no key; remembers what it was asked."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(200 if self.path == "/offline_is_over" else 401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *args: object) -> None:
        """Be silent."""


def test_wandb_gets_every_known_number_of_every_step_and_only_online_over_the_network(
    files: RunFiles,
) -> None:
    """In a process of its own: wandb keeps threads and a helper process."""
    files.first_run()
    argv = [sys.executable, "-c", WRITES, str(files.run_dir.parent)]
    with ThreadingHTTPServer(("127.0.0.1", 0), Unfriendly) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        env = {"WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}", "WANDB_API_KEY": "a" * 40}
        ended = subprocess.run(argv, check=False, timeout=200, env=os.environ | env)
        server.shutdown()
    assert ended.returncode == 5, "online it was refused"
    assert Unfriendly.asked[:2] == ["/offline_is_over", "/graphql"]
    assert not [path for path in Unfriendly.asked if "otel" in path]
    found = [
        read_wandb(file.read_bytes())
        for file in (files.run_dir / "wandb").glob("offline-run-*/*.wandb")
    ]
    assert [(project, name) for project, name, _ in found] == [("lakes", "unit")] * 2
    first, second = sorted((rows for _, _, rows in found), key=len)
    assert [row["_step"] for row in first] == [0, 1, 2]
    rows = [{"step": row["_step"]} | {k: v for k, v in row.items() if k[0] != "_"} for row in second]
    assert curves_of(rows) == files.curves


@pytest.mark.parametrize("is_wanted", [True, False])
def test_tensorboard_is_fed_where_it_is_wanted(is_wanted: bool, files: RunFiles) -> None:
    files.first_run()
    run = RunConfig(exp_name="unit", output_dir=str(files.run_dir.parent))
    makers = tracker_makers(run, LearnerConfig(tensorboard=is_wanted).chosen_trackers)
    for feed in tracker_feeds(run, makers, 3):
        assert feed.deliver()
    assert (files.run_dir / "tensorboard").exists() is is_wanted


def test_a_project_must_have_a_name() -> None:
    with pytest.raises(ValueError, match=r"wandb\.project"):
        WandbArgs(project="")
