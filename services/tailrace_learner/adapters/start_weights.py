"""The weights at a run's start, for models that begin as the policy does, also after a resume.

A run that begins from a pretrained model finds them there. One that begins from scratch or warm-starts
keeps them in `<run_dir>/start/`, a model directory like a checkpoint's.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from tailrace.config import RunConfig
from tailrace_learner.adapters.hf_model import LoadedModel
from tailrace_learner.adapters.snapshots import host_weights
from tailrace_learner.adapters.strategies.base import Strategy
from tailrace_learner.config import LearnerConfig


def pretrained_start(run: RunConfig, config: LearnerConfig) -> str:
    """The model that the run begins with, empty if none has its weights."""
    return "" if config.from_scratch or config.warm_start else run.pretrain


def keep_start(run: RunConfig, config: LearnerConfig, loaded: LoadedModel, strategy: Strategy) -> str:
    """Where the weights as they are now, at the start, can be loaded from (collective)."""
    if found := pretrained_start(run, config):
        return found
    folder = run.run_dir / "start"
    weights = host_weights(loaded.model, strategy)
    if strategy.world.rank == 0:
        part = folder.with_name(".part-start")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        loaded.model.save_pretrained(part, state_dict=weights)
        loaded.tokenizer.save_pretrained(part)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(part, folder)
    strategy.world.collect(None)  # nobody reads before it is written
    return str(folder)


def weights_digest(model: Any) -> str:
    """The same for the same names and weights, wherever they were loaded from."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def absolute(source: str) -> str:
    """A directory by its full path; names of the hub as they are."""
    path = Path(source).expanduser()
    return str(path.absolute()) if path.is_dir() else source
