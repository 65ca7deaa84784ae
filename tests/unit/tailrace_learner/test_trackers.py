"""Where a step's numbers go beside the events."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from wandb.proto import wandb_internal_pb2

from tailrace_learner.config import WandbArgs
from tailrace_learner.core.step_metrics import data_metrics
from tests.unit.tailrace_learner.test_step import prepared

WRITES = """
import asyncio, sys
from tailrace.config import RunConfig
from tailrace_learner.adapters.wandb_writer import WandbWriter
from tailrace_learner.config import WandbArgs
writer = WandbWriter(WandbArgs(project="lakes"), RunConfig(exp_name="unit", output_dir=sys.argv[1]))
writer.write(3, {"loss": 0.25, "kl": None})
writer.write(4, {"loss": 0.5, "tag/lake/reward_mean": 1.0})
asyncio.run(writer.close())
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


def test_wandb_gets_every_known_number_of_every_step_without_a_network(tmp_path: Path) -> None:
    """In a process of its own: wandb keeps threads and a helper process."""
    subprocess.run([sys.executable, "-c", WRITES, str(tmp_path)], check=True, timeout=100)
    (file,) = (tmp_path / "unit" / "wandb").glob("offline-run-*/*.wandb")
    project, name, (third, fourth) = read_wandb(file.read_bytes())
    assert (project, name) == ("lakes", "unit")
    assert (third["_step"], third["loss"]) == (3, 0.25)
    assert "kl" not in third
    assert (fourth["_step"], fourth["loss"], fourth["tag/lake/reward_mean"]) == (4, 0.5, 1.0)


def test_a_project_must_have_a_name() -> None:
    with pytest.raises(ValueError, match=r"wandb\.project"):
        WandbArgs(project="")


def test_every_tag_has_its_own_returns() -> None:
    first, second = prepared([]), prepared([])
    groups = [
        replace(first, tag="lake", rewards=(1.0, 0.0), successes=(1.0, 0.0)),
        replace(second, tag="lake", rewards=(1.0, 1.0), successes=(1.0, 1.0)),
        replace(second, tag="shop", rewards=(0.5,), successes=()),
    ]
    metrics = data_metrics(groups, [])
    assert metrics["tag/lake/reward_mean"] == 0.75
    assert metrics["tag/lake/success_rate"] == 0.75
    assert metrics["tag/lake/num_groups"] == 2.0
    assert metrics["tag/shop/reward_mean"] == 0.5
    assert metrics["tag/shop/success_rate"] is None
    assert metrics["reward_mean"] == 0.7
