"""A real run that trains adapters: engines sample from base plus adapters, a resume has both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.audit import build_ledger, check_ledger
from tests.e2e.runs import command, run
from tests.integration.reward.test_reward_model import save

ADAPTERS = (
    "learner.lora={r: 4, alpha: 8, target_modules: [q_proj, v_proj, down_proj]}",
    "save_steps=2",
)
WITHOUT_SCRATCH = ("learner.from_scratch=null", "learner.warm_start=null")


def trained(*settings: str, output_dir: Path) -> list[str]:
    """`tailrace train` without the small experiment's own warm start."""
    argv = command("train", *settings, output_dir=output_dir, exp_name="adapters")
    return [word for word in argv if not word.startswith("learner.warm_start.")]


def rows(run_dir: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_engines_sample_from_the_weights_that_the_learner_trains(tmp_path: Path) -> None:
    """Trains on two ranks, and goes on with one."""
    sizes = {"max_position_embeddings": 256, "initializer_range": 0.05}
    base = [f"pretrain={save(tmp_path, AutoModelForCausalLM, **sizes)}", *WITHOUT_SCRATCH, *ADAPTERS]
    settings = [*base, "learner.strategy_args.num_ranks=2", "max_steps=4"]
    first = run(trained(*settings, output_dir=tmp_path), timeout_s=400)
    assert first.returncode == 0, first.stdout + first.stderr
    settings = [*base, "max_steps=6", "resume_from_checkpoint=true"]
    again = run(trained(*settings, output_dir=tmp_path), timeout_s=400)
    assert again.returncode == 0, again.stdout + again.stderr
    run_dir = tmp_path / "adapters"
    ledger = build_ledger(run_dir)
    check_ledger(ledger)
    assert ledger.last_step == 6
    known = [row["mismatch_kl"] for row in rows(run_dir) if row["mismatch_kl"] is not None]
    assert known
    assert max(known) < 1e-6, "log-probabilities of learner and engines on the learner's own version"
    assert (run_dir / "checkpoints" / "step_6" / "lora.safetensors").is_file()
