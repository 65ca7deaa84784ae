"""Model folders of runs, found and read without torch."""

import os
from pathlib import Path

import msgspec

from tailrace.chat.model_files import read_model_card
from tailrace.config import ConfigError, RunConfig
from tailrace.object_store import fetched, is_url
from tailrace_cli.experiment import Experiment
from tailrace_protos.base import UNREADABLE
from tailrace_protos.weights import ModelCard


class _Saved(msgspec.Struct):
    """Step and time of a checkpoint, from `run_state.json`, its last file."""

    step: int
    saved_unix_s: float = 0.0


def _saved(checkpoint: Path) -> _Saved | None:
    """The state of a complete checkpoint; None for one that is not, such as a copy that broke off."""
    try:
        return msgspec.json.decode((checkpoint / "run_state.json").read_bytes(), type=_Saved)
    except (OSError, *UNREADABLE):
        return None


def newest_checkpoint(run_dir: Path) -> Path:
    """The complete checkpoint of a run that was saved last; `ConfigError` when there is none.

    A run that went back to an earlier step may have others of higher steps.
    """
    found = {path: _saved(path) for path in (run_dir / "checkpoints").glob("step_*")}
    complete = {path: saved.saved_unix_s for path, saved in found.items() if saved}
    if not complete:
        raise ConfigError(f"no checkpoint in {run_dir}/checkpoints: train first, or name --checkpoint")
    return max(complete, key=lambda path: complete[path])


def has_begun(run_dir: Path) -> bool:
    """Tells whether a run was started in this directory."""
    return (run_dir / "events.jsonl").exists()


def refuse_earlier(run: RunConfig, *, overwrite: bool) -> None:
    """Refuses to mix a new run into the directory of an earlier one.

    With `overwrite` that is deleted, unless the new run needs something in it.
    """
    if overwrite:
        _keep_needed(run)
    elif run.resume_from_checkpoint is False and has_begun(run.run_dir):
        raise ConfigError(
            f"{run.run_dir} holds an earlier run: continue it with resume_from_checkpoint=true, start "
            "again with --overwrite, or choose another exp_name"
        )


def _keep_needed(run: RunConfig) -> None:
    """Raises `ConfigError` if the new run needs something of the one that it overwrites."""
    if run.resume_from_checkpoint is True:
        raise ConfigError(
            "--overwrite deletes the run that resume_from_checkpoint=true continues: give one of the "
            "two"
        )
    for key in ("resume_from_checkpoint", "pretrain"):
        needed = getattr(run, key)
        if needed and not is_url(needed) and run.run_dir in (path := Path(needed).absolute()).parents:
            raise ConfigError(f"{key}: --overwrite would delete {path}: choose another exp_name")


def lacks_checkpoint(experiment: Experiment) -> bool:
    """Tells whether a run that is to continue has no checkpoint yet, so that it begins again.

    `ConfigError` if there is no such run at all.
    """
    run = experiment.run
    if run.resume_from_checkpoint is not True or experiment.learner.checkpoint_url:
        return False
    if any((run.run_dir / "checkpoints").glob("step_*")):
        return False
    if not has_begun(run.run_dir):
        raise ConfigError(
            f"resume_from_checkpoint: {run.run_dir} holds no run: correct exp_name or output_dir, or "
            "leave it out to begin one"
        )
    return True


def own_checkpoint(run: RunConfig) -> Path | None:
    """The checkpoint that a run which has begun goes on from, although `resume_from_checkpoint` names
    another one; None if it begins where that says.

    Raises `ConfigError` for an older checkpoint of the run itself.
    """
    named = run.resume_from_checkpoint
    if isinstance(named, bool) or not has_begun(run.run_dir):
        return None
    try:
        own = newest_checkpoint(run.run_dir)
    except ConfigError:
        return None
    path = Path(os.path.expanduser(named)).resolve()
    if is_url(named) or path.parent != (run.run_dir / "checkpoints").resolve():
        return own
    if path != own.resolve():
        raise ConfigError(
            f"resume_from_checkpoint: {named} is an older checkpoint of this run, which goes on from "
            f"{own}: choose another exp_name to train on from the older one, or "
            "resume_from_checkpoint=true"
        )
    return None


def reached_checkpoint(run: RunConfig, *, overwrite: bool = False) -> tuple[Path, int] | None:
    """Checkpoint that a run continues from if it has done all its steps, and their number."""
    resume = run.resume_from_checkpoint
    if resume is False or run.num_epochs:
        return None
    try:
        named = newest_checkpoint(run.run_dir) if resume is True else Path(os.path.expanduser(resume))
    except ConfigError:
        return None  # the learner tells what is wrong with it
    path = (None if overwrite else own_checkpoint(run)) or named
    saved = _saved(path)
    return (path, saved.step) if saved and saved.step >= run.max_steps else None


def require_steps_left(run: RunConfig, *, overwrite: bool) -> None:
    """Refuses to continue a run that has reached `max_steps` already."""
    if found := reached_checkpoint(run, overwrite=overwrite):
        path, reached = found
        raise ConfigError(
            f"max_steps is {run.max_steps}, but {path} has done {reached} steps: nothing was changed; "
            f"set max_steps above {reached} to train on"
        )


def model_card(folder: Path) -> ModelCard:
    """The model card of a Hugging Face model directory; `ConfigError` if a file is missing."""
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder} is no model directory: it holds no {name}")
    return read_model_card(folder)


def given_folder(checkpoint: str) -> Path:
    """The folder of `--checkpoint`, fetched if it is a URL."""
    if is_url(checkpoint):
        return fetched(checkpoint, "--checkpoint")
    return Path(os.path.expanduser(checkpoint))


def model_folder(experiment: Experiment, checkpoint: str) -> Path:
    """The folder of `--checkpoint`, else of the run's newest checkpoint, else of `pretrain`."""
    run = experiment.run
    if checkpoint:
        return given_folder(checkpoint)
    try:
        return newest_checkpoint(run.run_dir)
    except ConfigError:
        if is_url(run.pretrain):
            return fetched(run.pretrain, "pretrain")
        if run.pretrain:
            return Path(run.pretrain)
        raise
