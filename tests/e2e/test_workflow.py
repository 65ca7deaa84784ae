"""`Trainer` and `tailrace train --workflow`: an agent on the OpenAI SDK through every real service."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

import tailrace
from tailrace_inference.adapters.emission_log import read_emissions
from tailrace_learner.adapters.trajectory_files import read_groups
from tailrace_protos.base import as_float32, as_int32
from tailrace_protos.episode import Outcome
from tests.audit import build_ledger, check_ledger
from tests.e2e.runs import ROOT, TAILRACE, run
from tests.provenance import versions_of
from tests.world.processes import kill_all, words_of

EXPERIMENT = ROOT / "examples" / "frameworks" / "openai_sdk"
WORKFLOW = "openai_sdk_agent.DigitAgent"
SMALL = {
    "max_steps": 3,
    "group_size": 4,
    "groups_per_step": 2,
    "scheduler.eval_groups": 2,
    "inference.emission_log": True,
    "learner.save_trajectories": True,
    "cluster.num_agents_workers": 2,
    "granularity": "step",
    "learner.adv_estimator": "gigpo",
}

Triple = tuple[int, float, int]

pytestmark = pytest.mark.timeout(900)  # a whole run in a fixture


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tailrace.TrainingRun:
    """A short training by `Trainer`, in which one of two agents workers is killed."""
    output_dir = tmp_path_factory.mktemp("runs")
    killer = threading.Thread(target=_kill_a_worker, args=(output_dir / "openai_sdk",), daemon=True)
    killer.start()
    overrides = {**SMALL, "output_dir": str(output_dir)}
    result = tailrace.Trainer(EXPERIMENT).train(workflow=WORKFLOW, overrides=overrides)
    killer.join(60)
    assert not killer.is_alive(), "no worker was killed"
    return result


def _kill_a_worker(run_dir: Path) -> None:
    metrics = run_dir / "metrics.jsonl"
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 2):
        time.sleep(0.05)
    for child in psutil.Process().children(recursive=True):
        if "agents-1" in words_of(child):
            kill_all([child])
            return


def test_a_workflow_trains_although_a_worker_is_killed(trained: tailrace.TrainingRun) -> None:
    assert trained.run_dir.name == "openai_sdk"
    assert trained.metrics["step"] == 3
    ledger = build_ledger(trained.run_dir)
    check_ledger(ledger)
    assert len(ledger.trained) >= 3 * 2


def test_every_trained_token_of_a_workflow_is_one_the_engine_emitted(
    trained: tailrace.TrainingRun,
) -> None:
    emitted = _emissions(trained.run_dir)
    num_played = 0
    for path in sorted((trained.run_dir / "trajectories").iterdir()):
        for member in (member for group in read_groups(path) for member in group.members):
            assert [row.first_turn for row in member.rows] == list(range(len(member.rows)))
            if member.outcome is Outcome.OK:  # not cut short, as by the time that the kill costs
                assert len(member.rows) == 2, "two calls each"
                num_played += 1
            for row in member.rows:
                mask = np.frombuffer(row.loss_mask, np.uint8).astype(bool)
                ids = as_int32(row.token_ids)[mask].tolist()
                logprobs = as_float32(row.inference_logprobs)[mask].tolist()
                versions = versions_of(row.spans)
                triples = list(zip(ids, logprobs, versions, strict=True))
                assert _is_part(triples, emitted[member.episode_id]), member.episode_id
    assert num_played >= 3 * 2 * 4 / 2


def _is_part(part: list[Triple], whole: list[Triple]) -> bool:
    return any(whole[start : start + len(part)] == part for start in range(len(whole)))


def _emissions(run_dir: Path) -> dict[str, list[Triple]]:
    """Per episode, in order: (token id, log-probability, policy version) as the engine emitted them."""
    found: dict[str, list[Triple]] = {}
    for path in run_dir.glob("emissions-*.bin"):
        for episode_id, chunk in map(msgspec.structs.astuple, read_emissions(path)):
            versions = [span.policy_version for span in chunk.spans for _ in range(span.num_tokens)]
            ids, logprobs = as_int32(chunk.token_ids), as_float32(chunk.inference_logprobs)
            triples = zip(ids.tolist(), logprobs.tolist(), versions, strict=True)
            found.setdefault(episode_id, []).extend(triples)
    return found


def test_a_workflow_that_does_not_exist_ends_the_command_with_its_name(tmp_path: Path) -> None:
    argv = [TAILRACE, "train", str(EXPERIMENT), f"output_dir={tmp_path}"]
    result = run([*argv, "--workflow", "openai_sdk_agent.Nobody"])
    assert result.returncode == 2, result.stdout + result.stderr
    assert "agents.workflow.agent" in result.stderr
    assert "'Nobody'" in result.stderr
    assert "Traceback" not in result.stdout + result.stderr


def test_what_is_wrong_with_an_experiment_is_the_exception_of_the_trainer(tmp_path: Path) -> None:
    config = {"exp_name": "wrong", "output_dir": str(tmp_path), "max_step": 3}
    with pytest.raises(tailrace.TrainingFailedError, match="did you mean 'max_steps'") as caught:
        tailrace.Trainer(config).train()
    assert caught.value.exit_code == 2
