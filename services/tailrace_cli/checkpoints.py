"""Model folders of runs, found and read without torch."""

import json
from pathlib import Path

from tailrace.chat.model_files import read_model_card
from tailrace.config import ConfigError, RunConfig
from tailrace.object_store import fetched, is_url
from tailrace_cli.experiment import Experiment
from tailrace_protos.weights import ModelCard


def newest_checkpoint(run_dir: Path) -> Path:
    """The checkpoint of a run with the highest step; `ConfigError` when there is none."""
    found = [path for path in (run_dir / "checkpoints").glob("step_*") if path.name[5:].isdigit()]
    if not found:
        raise ConfigError(f"no checkpoint in {run_dir}/checkpoints: train first, or name --checkpoint")
    return max(found, key=lambda path: int(path.name[5:]))


def has_begun(run_dir: Path) -> bool:
    """Tells whether a run was started in this directory."""
    return (run_dir / "events.jsonl").exists()


def refuse_earlier(run: RunConfig, *, overwrite: bool) -> None:
    """Refuses to mix a new run into the directory of an earlier one."""
    is_new = not overwrite and run.resume_from_checkpoint is False
    if is_new and has_begun(run.run_dir):
        raise ConfigError(
            f"{run.run_dir} holds an earlier run: continue it with resume_from_checkpoint=true, start "
            "again with --overwrite, or choose another exp_name"
        )


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


def reached_checkpoint(run: RunConfig) -> tuple[Path, int] | None:
    """Checkpoint that a run continues from if it has done all its steps, and their number."""
    resume = run.resume_from_checkpoint
    if resume is False or run.num_epochs:
        return None
    try:
        path = newest_checkpoint(run.run_dir) if resume is True else Path(resume).expanduser()
        reached = int(json.loads((path / "run_state.json").read_bytes())["step"])
    except (ConfigError, OSError, ValueError, KeyError):
        return None  # the learner tells what is wrong with it
    return (path, reached) if reached >= run.max_steps else None


def require_steps_left(run: RunConfig) -> None:
    """Refuses to continue a run that has reached `max_steps` already."""
    if found := reached_checkpoint(run):
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


def model_folder(experiment: Experiment, checkpoint: str) -> Path:
    """The folder of `--checkpoint`, else of the run's newest checkpoint, else of `pretrain`."""
    run = experiment.run
    if checkpoint:
        return fetched(checkpoint, "--checkpoint") if is_url(checkpoint) else Path(checkpoint)
    try:
        return newest_checkpoint(run.run_dir)
    except ConfigError:
        if is_url(run.pretrain):
            return fetched(run.pretrain, "pretrain")
        if run.pretrain:
            return Path(run.pretrain)
        raise
