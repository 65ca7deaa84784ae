"""The loading process: what a user's module does to it is a problem of that module alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tailrace_cli.experiment import load
from tailrace_cli.loading.checks import check

MODULE = """
import os, sys, time
print("noise on standard output")
assert not sys.stdin.read()

class Env:
    def reset(self, seed=None): return "Go.", {}
    def step(self, action): return "", 1.0, True, False, {}
    def close(self): ...

class Endless(Env):
    def __init__(self):
        time.sleep(1000)

class Crashing(Env):
    def __init__(self):
        sys.stderr.write("the library says farewell\\n")
        os._exit(7)

class Secretive(Env):
    def __init__(self):
        self.key = os.environ["OWN_KEY"]

class Forgotten(Env):
    def __init__(self):
        self.key = os.environ["OTHER_KEY"]

def build(folder):
    assert "OWN_KEY" not in os.environ
    from tailrace.toolbox.byte_tokenizer import build_byte_tokenizer
    build_byte_tokenizer(folder)
"""
EXPERIMENT = {
    "exp_name": "loading",
    "scheduler": {"tags": ["fine"]},
    "agents": {
        "custom_envs": {
            name.lower(): {"env_type": f"process_parts:{name}"}
            for name in ("Endless", "Crashing", "Secretive", "Forgotten")
        }
        | {"fine": {"env_type": "process_parts:Env"}},
        "max_episode_tokens": 64,
        "generating_args": {"max_new_tokens": 8},
    },
    "reward": {"rewards": [{"name": "success", "kind": "env_return"}]},
    "learner": {
        "from_scratch": {
            "model_type": "qwen3",
            "tokenizer": "process_parts:build",
            "config": {"hidden_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 128},
        },
        "tensorboard": False,
    },
    "cluster": {"keep_environment": ["OWN_KEY"], "check_timeout_s": 25.0},
}


def test_a_step_that_hangs_or_dies_costs_that_step_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "process_parts.py").write_text(MODULE)
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(EXPERIMENT))
    monkeypatch.setenv("OWN_KEY", "secret")
    monkeypatch.setenv("OTHER_KEY", "secret")
    report = check(load(path))
    problems = dict(problem.split(": ", 1) for problem in report.problems)
    assert list(problems) == [
        f"agents.custom_envs.{name}" for name in ("crashing", "endless", "forgotten")
    ]
    crashing, endless, forgotten = problems.values()
    assert "took more than 25 s" in endless
    assert "cluster.check_timeout_s" in endless
    assert "ended its process (exit code 7); its last line was: the library says farewell" in crashing
    assert "KeyError: 'OTHER_KEY'" in forgotten
    assert [prompt.tag for prompt in report.prompts] == ["fine", "secretive"]
    assert report.model is not None
    assert report.model.context_tokens == 128
    assert capfd.readouterr() == ("", "")


def test_a_module_of_an_algorithm_that_hangs_is_interrupted(tmp_path: Path) -> None:
    (tmp_path / "hanging_loss.py").write_text("import time\ntime.sleep(1000)\n")
    content = EXPERIMENT | {
        "learner": {**EXPERIMENT["learner"], "loss": "hanging_loss:LOSS"},  # type: ignore[dict-item]
        "cluster": {"check_timeout_s": 0.5},
    }
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match=r"importing 'hanging_loss' raised TimeoutError: .* 0.5 s"):
        load(path)
