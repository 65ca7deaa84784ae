"""Which checkpoint a run goes on from, and what a user who names one is told."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from tailrace.config import ConfigError, RunConfig
from tailrace_cli.checkpoints import (
    newest_checkpoint,
    own_checkpoint,
    reached_checkpoint,
    refuse_earlier,
)
from tailrace_cli.commands.init import examples_folder
from tailrace_cli.experiment import load


def saved(run_dir: Path, step: int, unix_s: float) -> Path:
    """A checkpoint as far as the command reads it."""
    folder = run_dir / "checkpoints" / f"step_{step}"
    folder.mkdir(parents=True)
    (folder / "run_state.json").write_text(json.dumps({"step": step, "saved_unix_s": unix_s}))
    return folder


def config(tmp_path: Path, resume: bool | str, max_steps: int = 50) -> RunConfig:
    words = [f"output_dir={tmp_path}", "exp_name=lake", f"max_steps={max_steps}"]
    run = load(examples_folder() / "own_algorithm" / "experiment.yaml", words).run
    return msgspec.structs.replace(run, resume_from_checkpoint=resume)


def test_the_newest_checkpoint_is_complete_and_was_saved_last(tmp_path: Path) -> None:
    saved(tmp_path, 20, 1000.0)
    later = saved(tmp_path, 8, 2000.0)
    (tmp_path / "checkpoints" / "step_30").mkdir()
    (tmp_path / "checkpoints" / "step_40").mkdir()
    (tmp_path / "checkpoints" / "step_40" / "run_state.json").write_text('{"step": 40')
    assert newest_checkpoint(tmp_path) == later


def test_copies_that_broke_off_are_no_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_30").mkdir(parents=True)
    with pytest.raises(ConfigError, match="no checkpoint in"):
        newest_checkpoint(tmp_path)


def test_a_run_that_has_begun_goes_on_from_its_own_checkpoint(tmp_path: Path) -> None:
    there = saved(tmp_path / "other", 3, 1.0)
    assert own_checkpoint(config(tmp_path, str(there))) is None
    own = saved(tmp_path / "lake", 5, 2.0)
    assert own_checkpoint(config(tmp_path, str(there))) is None  # a folder that no run has begun
    (tmp_path / "lake" / "events.jsonl").touch()
    assert own_checkpoint(config(tmp_path, str(there))) == own
    assert own_checkpoint(config(tmp_path, "s3://there/step_3")) == own
    assert own_checkpoint(config(tmp_path, str(own))) is None
    assert own_checkpoint(config(tmp_path, True)) is None


def test_an_older_checkpoint_of_the_run_itself_is_refused(tmp_path: Path) -> None:
    older = saved(tmp_path / "lake", 5, 2.0)
    saved(tmp_path / "lake", 10, 3.0)
    (tmp_path / "lake" / "events.jsonl").touch()
    with pytest.raises(ConfigError, match=r"older checkpoint of this run.*step_10.*another exp_name"):
        own_checkpoint(config(tmp_path, str(older)))


def test_steps_that_are_done_are_those_of_the_checkpoint_that_the_run_goes_on_from(
    tmp_path: Path,
) -> None:
    there = saved(tmp_path / "other", 3, 1.0)
    assert reached_checkpoint(config(tmp_path, str(there), max_steps=3)) == (there, 3)
    own = saved(tmp_path / "lake", 5, 2.0)
    (tmp_path / "lake" / "events.jsonl").touch()
    assert reached_checkpoint(config(tmp_path, str(there), max_steps=5)) == (own, 5)
    assert reached_checkpoint(config(tmp_path, True, max_steps=5)) == (own, 5)
    assert reached_checkpoint(config(tmp_path, True, max_steps=6)) is None
    assert reached_checkpoint(config(tmp_path, "/nowhere", max_steps=6)) is None


def test_a_run_that_is_overwritten_begins_where_it_says(tmp_path: Path) -> None:
    there = saved(tmp_path / "other", 3, 1.0)
    saved(tmp_path / "lake", 5, 2.0)
    (tmp_path / "lake" / "events.jsonl").touch()
    run = config(tmp_path, str(there), max_steps=5)
    refuse_earlier(run, overwrite=True)
    assert reached_checkpoint(run, overwrite=True) is None


def test_what_a_run_needs_is_not_overwritten(tmp_path: Path) -> None:
    own = saved(tmp_path / "lake", 5, 2.0)
    with pytest.raises(ConfigError, match="give one of the two"):
        refuse_earlier(config(tmp_path, True), overwrite=True)
    with pytest.raises(ConfigError, match=r"would delete .*step_5: choose another exp_name"):
        refuse_earlier(config(tmp_path, str(own)), overwrite=True)
    run = msgspec.structs.replace(config(tmp_path, False), pretrain=str(own))
    with pytest.raises(ConfigError, match="pretrain: --overwrite would delete"):
        refuse_earlier(run, overwrite=True)
    refuse_earlier(config(tmp_path, False), overwrite=True)
