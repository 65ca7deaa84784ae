"""The model of an episode in the terminal: one that its engine refuses is the user's mistake."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tailrace.chat.model_files import read_model_card
from tailrace.config import ConfigError, RunConfig
from tailrace_cli.terminal.model import load_model
from tailrace_inference.config import InferenceConfig
from tailrace_learner.adapters import hf_model
from tests.unit.tailrace_learner.test_checkpoints import CONFIG, SCRATCH


def test_a_model_that_the_engine_refuses_is_told_in_one_line(tmp_path: Path) -> None:
    made = hf_model.make_model(SCRATCH, CONFIG, 0)
    made.model.model.norm.weight.data[3] = float("nan")
    made.model.save_pretrained(tmp_path)
    made.tokenizer.save_pretrained(tmp_path)
    run = RunConfig(exp_name="unit", output_dir=str(tmp_path))
    experiment: Any = SimpleNamespace(run=run, inference=InferenceConfig())
    with pytest.raises(ConfigError, match="'qwen3' does not run on the torch engine"):
        load_model(experiment, tmp_path, read_model_card(tmp_path))
