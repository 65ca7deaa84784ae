"""Segments: naming, sealing, and what happens to those of dead processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.weights import SegmentSpaceError, WeightsGoneError
from tailrace.weights.segment import SegmentFolder, map_segment, open_segment
from tailrace_protos.weights import WeightManifest

MANIFEST = WeightManifest(4, "a", 9, None, (), 1000)

DEAD_WRITER = """
import os, sys
from pathlib import Path
from tailrace.weights.segment import SegmentFolder
from tailrace_protos.weights import WeightManifest
segment = SegmentFolder("run", "weight_sync", Path(sys.argv[1])).create(1000)
segment.data[:] = bytes([5]) * 1000
if sys.argv[2] == "sealed":
    segment.seal(WeightManifest(4, "a", 9, None, (), 1000))
os.kill(os.getpid(), 9)
"""


def leave_behind(folder: Path, state: str) -> None:
    ended = subprocess.run([sys.executable, "-c", DEAD_WRITER, str(folder), state], check=False)
    assert ended.returncode == -9
    assert len(list(folder.iterdir())) == 1


def test_a_segment_is_read_by_its_name(tmp_path: Path) -> None:
    segment = SegmentFolder("run", "learner", tmp_path).create(1000)
    segment.data[:3] = b"abc"
    read = map_segment(open_segment(segment.name, 1000, tmp_path), 1000)
    assert bytes(read[:3]) == b"abc"
    assert len(read) == 1000


def test_what_is_mapped_stays_readable_after_the_segment_is_deleted(tmp_path: Path) -> None:
    segment = SegmentFolder("run", "learner", tmp_path).create(10)
    segment.data[:] = b"0123456789"
    read = map_segment(open_segment(segment.name, 10, tmp_path), 10)
    segment.close(delete=True)
    assert bytes(read) == b"0123456789"
    with pytest.raises(WeightsGoneError):
        open_segment(segment.name, 10, tmp_path)


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    segment = SegmentFolder("run", "learner", tmp_path).create(10)
    read = map_segment(open_segment(segment.name, 10, tmp_path), 10)
    with pytest.raises(TypeError, match="read-only"):
        read[:3] = b"xyz"


def test_a_copy_does_not_change_with_its_source(tmp_path: Path) -> None:
    folder = SegmentFolder("run", "weight_sync", tmp_path)
    source = folder.create(3_000_000)
    source.data[:] = b"\x07" * 3_000_000
    fd = open_segment(source.name, 3_000_000, tmp_path)
    copy = folder.copy_of(fd, 3_000_000)
    os.close(fd)
    source.data[:] = bytes(3_000_000)
    assert bytes(copy.data) == b"\x07" * 3_000_000


@pytest.mark.parametrize("name", ["../etc/passwd", "tailrace/x", "other", "tailrace.run.none"])
def test_names_that_are_no_segment_of_ours_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(WeightsGoneError):
        open_segment(name, 1, tmp_path)


def test_a_shorter_file_than_promised_is_refused(tmp_path: Path) -> None:
    segment = SegmentFolder("run", "learner", tmp_path).create(10)
    with pytest.raises(WeightsGoneError, match="smaller"):
        open_segment(segment.name, 11, tmp_path)


def test_a_successor_adopts_the_sealed_segment_of_a_dead_writer(tmp_path: Path) -> None:
    leave_behind(tmp_path, "sealed")
    ((manifest, segment),) = SegmentFolder("run", "weight_sync", tmp_path).adopt()
    assert manifest == MANIFEST
    assert bytes(segment.data) == b"\x05" * 1000
    assert list(SegmentFolder("run", "weight_sync", tmp_path).adopt()) == []  # it has an owner again


def test_an_unfinished_segment_of_a_dead_writer_is_deleted(tmp_path: Path) -> None:
    leave_behind(tmp_path, "unsealed")
    assert list(SegmentFolder("run", "weight_sync", tmp_path).adopt()) == []
    assert list(tmp_path.iterdir()) == []


def test_sweeping_spares_the_living_and_other_runs(tmp_path: Path) -> None:
    leave_behind(tmp_path, "sealed")
    living = SegmentFolder("run", "weight_sync", tmp_path).create(10)
    assert SegmentFolder("run2", "weight_sync", tmp_path).sweep() == 0
    assert SegmentFolder("run", "learner", tmp_path).sweep() == 0
    assert SegmentFolder("run", "weight_sync", tmp_path).sweep() == 1
    assert [path.name for path in tmp_path.iterdir()] == [living.name]


def test_memory_that_is_not_there_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises((SegmentSpaceError, OSError)) as caught:
        SegmentFolder("run", "learner", tmp_path).create(1 << 50)
    assert isinstance(caught.value, SegmentSpaceError) or caught.value.errno == 27  # EFBIG
    assert list(tmp_path.iterdir()) == []


def test_a_full_memory_file_system_is_named_with_the_remedy() -> None:
    num_bytes = os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize + (1 << 20)
    with pytest.raises(SegmentSpaceError, match="shm-size"):
        SegmentFolder("run", f"test{os.getpid()}").create(num_bytes)
    assert list(Path("/dev/shm").glob(f"*test{os.getpid()}*")) == []
