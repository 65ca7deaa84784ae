"""Algorithms in a user's file: an experiment names them, and every mistake is answered at the start."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from tailrace.config import ConfigError
from tailrace_cli.experiment import load
from tailrace_cli.validation import check_experiment

EXPERIMENT = {
    "exp_name": "own",
    "group_size": 4,
    "groups_per_step": 2,
    "max_steps": 1,
    "scheduler": {"tags": ["lake"]},
    "agents": {"custom_envs": {"lake": {"env_type": "frozen_lake"}}},
    "reward": {"rewards": [{"name": "success", "kind": "env_return"}]},
    "learner": {"from_scratch": {"model_type": "qwen3", "tokenizer": "nowhere:build"}},
}
MODULE = """
from tailrace_learner.config_registry import Correction, Estimator, Loss

def estimate(returns, config): ...
def lonely(returns): ...
def cost(inputs, config): ...

GOOD = Estimator(estimate, reads=("gamma",))
COMPARING = Estimator(estimate, compares_group=True)
SOMETIMES = Estimator(estimate, reads=("norm_std",), compares_group=lambda config: config.norm_std)
LONELY = Estimator(lonely)
MISREADING = Estimator(estimate, reads=("gama",))
COST = Loss(cost, reads=("kimi_tau",))
OFF_POLICY = Loss(cost, off_policy=True)
WEIGHTS = Correction(cost)
"""


def checked(folder: Path, name: str, *overrides: str, **learner: object) -> None:
    """Validates an experiment beside a module `name`, both outside of the repository."""
    (folder / f"{name}.py").write_text(textwrap.dedent(MODULE))
    content = EXPERIMENT | {"learner": {**EXPERIMENT["learner"], **learner}}  # type: ignore[dict-item]
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(content))
    check_experiment(load(path, overrides))


def test_names_of_a_users_file_are_taken_and_what_they_read_may_be_set(tmp_path: Path) -> None:
    before = list(sys.path)
    checked(
        tmp_path,
        "own_good",
        adv_estimator="own_good:GOOD",
        loss="own_good.COST",
        behaviour_correction="own_good:WEIGHTS",
        gamma=0.9,
        kimi_tau=0.2,
    )
    assert sys.path == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"adv_estimator": "own_bad:GOD"},
            r"learner\.adv_estimator: module 'own_bad' has no 'GOD': did you mean 'GOOD'",
        ),
        ({"adv_estimator": "own_none:GOOD"}, r"learner\.adv_estimator: cannot import 'own_none'"),
        (
            {"adv_estimator": "own_bad:estimate"},
            r"'own_bad:estimate' is a function, not a declared Estimator: write NAME = Estimator",
        ),
        ({"adv_estimator": "own_bad:COST"}, "'own_bad:COST' is a Loss, not a declared Estimator"),
        ({"loss": "own_bad:GOOD"}, r"learner\.loss: 'own_bad:GOOD' is a Estimator"),
        (
            {"adv_estimator": "own_bad:LONELY"},
            r"own_bad:LONELY, fn: cannot be called with \(returns, config\)",
        ),
        (
            {"adv_estimator": "own_bad:MISREADING"},
            "reads 'gama', which is no key of the learner section; did you mean 'gamma'",
        ),
        (
            {"loss": "own_bad:OFF_POLICY"},
            "loss 'own_bad:OFF_POLICY' weighs tokens by the policy that sampled them",
        ),
        (
            {"loss": "own_bad:COST", "m2_threshold": 0.1},
            r"m2_threshold is not read by loss 'own_bad:COST' \(only by m2po\)",
        ),
        (
            {"adv_estimator": "own_bad:GOOD", "zero_variance_groups": "redraw"},
            "zero_variance_groups is not read by adv_estimator 'own_bad:GOOD'",
        ),
        (
            {"adv_estimator": "own_bad:GOOD", "init_kl_coef": 0.1, "kl_in": "reward"},
            "kl_in 'reward' needs rewards of single tokens",
        ),
        ({"adv_estimator": "own_bad:GOOD", "critic": {}}, "critic is not read by adv_estimator"),
        ({"loss": "ppo"}, r"learner\.loss: 'ppo' is none of .*did you mean 'ppo_clip'"),
        ({"behaviour_correction": "tiss"}, r"behaviour_correction: 'tiss' is none of .*'tis'"),
    ],
)
def test_a_mistake_names_the_key_the_thing_and_the_remedy(
    settings: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(tmp_path, "own_bad", **settings)


@pytest.mark.parametrize("name", ["grpo", "own_lone:COMPARING", "own_lone:SOMETIMES"])
def test_an_estimator_that_compares_a_group_is_refused_with_a_group_of_one(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"group_size 1 with adv_estimator '{name}'"):
        checked(tmp_path, "own_lone", "group_size=1", adv_estimator=name)
    checked(tmp_path, "own_lone", "group_size=2", adv_estimator=name)
    checked(tmp_path, "own_lone", "group_size=1", adv_estimator="own_lone:GOOD")


def test_an_estimator_that_compares_with_some_settings_is_asked_with_these(tmp_path: Path) -> None:
    checked(tmp_path, "own_alone", "group_size=1", adv_estimator="own_alone:SOMETIMES", norm_std=False)


def test_built_in_algorithms_are_validated_without_torch() -> None:
    program = (
        "import sys\nfrom tailrace_learner.config import LearnerConfig\n"
        "from tailrace_learner.config_registry import REGISTRIES\n"
        "LearnerConfig()\nassert all(len(dict(registry)) for registry in REGISTRIES)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
