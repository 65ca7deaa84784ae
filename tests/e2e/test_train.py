"""One small run through every real service, looked at from all sides."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tailrace_inference.adapters.emission_log import read_emissions
from tailrace_learner.adapters.trajectory_files import read_groups
from tailrace_protos.base import as_float32, as_int32, as_uint8
from tailrace_protos.event import Event
from tailrace_protos.trajectory import TrajectoryGroup
from tests.audit import build_ledger, check_ledger
from tests.e2e.processes import running, still_alive
from tests.e2e.runs import command, run
from tests.provenance import versions_of

METRICS_KEYS = {
    "step", "time_s", "policy_version", "reward_mean", "reward_std", "success_rate",
    "eval/success_rate", "eval/reward_mean", "loss", "grad_norm", "entropy", "kl", "mismatch_kl",
    "mismatch_correlation", "behaviour_kl", "idle/credit", "idle/straggler", "idle/tool",
    "idle/reward", "idle/weights",
    "idle/transport", "staleness_mean", "staleness_max", "num_groups", "num_trained_tokens",
    "tokens_per_s", "outcome/ok", "outcome/policy_failure", "outcome/infra_failure",
    "outcome/timeout", "outcome/cancelled",
}  # fmt: skip


BOTH = frozenset({"inference-0", "inference-1"})
REPLICATED = ("inference_servers", "agents_workers", "reward_workers")
TINY = ("max_steps=2", "scheduler.eval_groups=8")


@pytest.fixture(scope="module")
def asynchronous(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished asynchronous run of six steps, with two of everything: its directory and output."""
    output_dir = tmp_path_factory.mktemp("runs")
    argv = command(
        "train",
        "max_steps=6",
        "eval_steps=3",
        "max_staleness=2",
        "save_steps=3",
        "inference.emission_log=true",
        "agents.render_episodes=1",
        *(f"cluster.num_{kind}=2" for kind in REPLICATED),
        output_dir=output_dir,
        exp_name="stream",
    )
    result = run(argv, timeout_s=500.0)
    assert result.returncode == 0, result.stdout + result.stderr
    return output_dir / "stream", result.stdout


def rows_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_the_run_directory_holds_what_the_readme_promises(asynchronous: tuple[Path, str]) -> None:
    run_dir, printed = asynchronous
    for name in ("config.yaml", "metrics.jsonl", "events.jsonl", "report.html", "checkpoints/step_6"):
        assert (run_dir / name).exists(), name
    assert list((run_dir / "renders").iterdir())
    assert list((run_dir / "trajectories").iterdir())
    assert "held-out success" in printed
    assert "report.html" in printed
    assert "logs in" not in printed
    assert "data:image/" in (run_dir / "report.html").read_text()


def test_tensorboard_shows_every_number_of_the_rows(asynchronous: tuple[Path, str]) -> None:
    check_tensorboard(asynchronous[0])


def check_tensorboard(run_dir: Path) -> None:
    """Every number of the rows is a point, once."""
    rows = rows_of(run_dir)
    shown = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    for tag in shown.Tags()["scalars"]:
        points = [(row["step"], row[tag]) for row in rows if row.get(tag) is not None]
        found = [(point.step, point.value) for point in shown.Scalars(tag)]
        assert found == [(step, pytest.approx(value, rel=1e-6)) for step, value in points]
    known = {key for row in rows for key, value in row.items() if value is not None}
    assert set(shown.Tags()["scalars"]) == known - {"step"}


def test_metrics_begin_with_step_0_end_with_the_last_and_have_every_key(
    asynchronous: tuple[Path, str],
) -> None:
    rows = rows_of(asynchronous[0])
    assert [row["step"] for row in rows] == list(range(7))
    for row in rows:
        assert set(row) >= METRICS_KEYS, METRICS_KEYS - set(row)
    evaluated = [row["step"] for row in rows if row["eval/success_rate"] is not None]
    assert evaluated == [0, 3, 6]


def test_the_audit_balances(asynchronous: tuple[Path, str]) -> None:
    ledger = build_ledger(asynchronous[0])
    check_ledger(ledger)
    assert ledger.last_step == 6
    assert len(ledger.trained) >= 6 * 4
    assert ledger.of_type("run_finished")


def test_generation_goes_on_while_the_learner_steps(asynchronous: tuple[Path, str]) -> None:
    ledger = build_ledger(asynchronous[0])
    steps = [(s["started_unix_s"], s["finished_unix_s"]) for s in ledger.of_type("step_finished")]
    episodes = [
        (e["started_unix_s"], e["finished_unix_s"])
        for e in ledger.of_type("episode_settled")
        if e["phase"] == "train" and e["outcome"] == "ok"
    ]
    overlapping = sum(
        any(start < end_e and start_e < end for start_e, end_e in episodes) for start, end in steps
    )
    assert overlapping, "a synchronous run has none; how many of six there are is chance"


def test_staleness_occurs_and_never_exceeds_its_bound(asynchronous: tuple[Path, str]) -> None:
    observed = [
        row["staleness_max"] for row in rows_of(asynchronous[0]) if row["staleness_max"] is not None
    ]
    assert max(observed) >= 1
    assert max(observed) <= 2


def test_every_trained_token_is_one_the_engine_emitted(asynchronous: tuple[Path, str]) -> None:
    run_dir, _ = asynchronous
    emitted = _emissions(run_dir)
    num_tokens = 0
    for group in _trajectories(run_dir):
        for member in group.members:
            if not member.rows:
                continue
            (row,) = member.rows
            mask = as_uint8(row.loss_mask).astype(bool)
            triples = list(
                zip(
                    as_int32(row.token_ids)[mask].tolist(),
                    as_float32(row.inference_logprobs)[mask].tolist(),
                    versions_of(row.spans),
                    strict=True,
                )
            )
            assert triples == emitted.get(member.episode_id, [])[: len(triples)], member.episode_id
            num_tokens += len(triples)
    assert num_tokens > 200


def _emissions(run_dir: Path) -> dict[str, list[tuple[int, float, int]]]:
    """Per episode, in order: (token id, log-probability, policy version) as the engine emitted them."""
    found: dict[str, list[tuple[int, float, int]]] = {}
    for path in run_dir.glob("emissions-*.bin"):
        for episode_id, chunk in map(msgspec.structs.astuple, read_emissions(path)):
            versions = np.repeat(
                [span.policy_version for span in chunk.spans],
                [span.num_tokens for span in chunk.spans],
            )
            ids, logprobs = as_int32(chunk.token_ids), as_float32(chunk.inference_logprobs)
            triples = zip(ids.tolist(), logprobs.tolist(), versions.tolist(), strict=True)
            found.setdefault(episode_id, []).extend(triples)
    return found


def _trajectories(run_dir: Path) -> list[TrajectoryGroup]:
    return [
        group for path in sorted((run_dir / "trajectories").iterdir()) for group in read_groups(path)
    ]


def test_the_checkpoint_loads_with_transformers(asynchronous: tuple[Path, str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = asynchronous[0] / "checkpoints" / "step_6"
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert model.config.vocab_size >= len(tokenizer)


def test_events_are_messages_of_the_protocol(asynchronous: tuple[Path, str]) -> None:
    lines = (asynchronous[0] / "events.jsonl").read_bytes().splitlines()
    decoded = [msgspec.json.decode(line, type=Event) for line in lines]
    assert len(decoded) > 100


def test_there_are_as_many_replicas_as_the_experiment_names(asynchronous: tuple[Path, str]) -> None:
    finished, _ = asynchronous
    logs = {path.stem for path in (finished / "logs").iterdir()}
    assert logs >= {"inference-0", "inference-1", "agents-0", "agents-1", "reward-0", "reward-1"}


def test_eval_prints_the_success_rate_of_the_newest_checkpoint(asynchronous: tuple[Path, str]) -> None:
    finished, _ = asynchronous
    argv = command("eval", *TINY, output_dir=finished.parent, exp_name="stream")
    result = run(argv)
    assert result.returncode == 0, result.stdout + result.stderr
    shown = re.search(r"success rate: (0\.\d+|1\.0+)", result.stdout)
    assert shown, result.stdout
    config = yaml.safe_load((finished.parent / "stream_eval" / "config.yaml").read_text())
    assert config["pretrain"] == str(finished / "checkpoints" / "step_6")


def test_export_writes_the_newest_checkpoint_as_a_plain_model(
    asynchronous: tuple[Path, str], tmp_path: Path
) -> None:
    finished, _ = asynchronous
    argv = command("export", output_dir=finished.parent, exp_name="stream")
    folder = tmp_path / "model"
    result = run([*argv, "--to", str(folder), "--dtype", "bfloat16"])
    assert result.returncode == 0, result.stdout + result.stderr
    assert not {"optimizer.safetensors", "run_state.json"} & {path.name for path in folder.iterdir()}
    trained = load_file(finished / "checkpoints" / "step_6" / "model.safetensors")
    exported = load_file(folder / "model.safetensors")
    assert exported.keys() == trained.keys()
    assert all(torch.equal(exported[name], trained[name].bfloat16()) for name in trained)
    assert (folder / "tokenizer.json").is_file()
    again = run([*argv, "--to", str(folder)])
    assert again.returncode == 2
    assert "is not empty" in again.stderr


def test_episode_shows_every_turn_of_the_newest_checkpoint(asynchronous: tuple[Path, str]) -> None:
    finished, _ = asynchronous
    argv = command("episode", output_dir=finished.parent, exp_name="stream")
    result = run([*argv, "--task-seed", "3"])
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"model {finished / 'checkpoints' / 'step_6'}" in result.stdout.replace("\n", "")
    assert "model, turn 1" in result.stdout
    assert re.search(r"outcome \w+.*return .* turns", result.stdout.replace("\n", " "))


def test_a_run_continues_from_its_checkpoint_and_saves_at_sigterm(
    asynchronous: tuple[Path, str],
) -> None:
    """As Slurm sends it before it takes the machine away."""
    run_dir, _ = asynchronous
    before = len(build_ledger(run_dir).trained)
    settings = ("resume_from_checkpoint=true", "max_staleness=2", "save_steps=3")
    _ended_by(signal.SIGTERM, run_dir, settings, num_rows=9)
    ledger = build_ledger(run_dir)
    check_ledger(ledger)
    assert ledger.last_step >= 8
    assert len(ledger.trained) >= before + 8
    assert [row["step"] for row in rows_of(run_dir)] == list(range(ledger.last_step + 1))
    check_tensorboard(run_dir)
    versions = [published["policy_version"] for published in ledger.of_type("weights_published")]
    assert versions == sorted(set(versions)), "a policy version is never used twice"
    assert _checkpoint_of_last_step(run_dir).exists()


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a synchronous run that Ctrl-C ended after some steps; nothing of it runs on.

    Steps begin with the first server that is ready. So it goes on until the other one has worked too.
    """
    run_dir = tmp_path_factory.mktemp("interrupted") / "sync"
    settings = ("max_staleness=0", "cluster.num_inference_servers=2", "inference.emission_log=true")
    _ended_by(signal.SIGINT, run_dir, settings, num_rows=7, servers=BOTH)
    return run_dir


def _ended_by(
    number: signal.Signals,
    run_dir: Path,
    settings: tuple[str, ...],
    num_rows: int,
    servers: frozenset[str] = frozenset(),
) -> None:
    """Start a run; send it the signal after so many rows of metrics, and tokens of these servers."""
    argv = command(
        "train", "max_steps=100000", *settings, output_dir=run_dir.parent, exp_name=run_dir.name
    )
    metrics = run_dir / "metrics.jsonl"
    with running(argv, run_dir.parent / f"printed-{number.name}") as training:
        training.wait_until(
            lambda: (
                metrics.exists()
                and len(metrics.read_text().splitlines()) >= num_rows
                and _working(run_dir) >= servers
            ),
            200,
        )
        children = training.children()
        assert len(children) >= 8
        training.process.send_signal(number)
        assert training.ends() == 130, training.printed
    assert still_alive(children) == []


def _working(run_dir: Path) -> set[str]:
    """Inference servers that have sampled tokens."""
    logs = [path for path in run_dir.glob("emissions-*.bin") if path.stat().st_size]
    return {path.stem.removeprefix("emissions-") for path in logs}


def test_every_inference_server_gets_episodes(interrupted: Path) -> None:
    assert _working(interrupted) == BOTH


def test_ctrl_c_drains_and_leaves_nothing_running(interrupted: Path) -> None:
    check_ledger(build_ledger(interrupted))


def test_ctrl_c_saves_a_checkpoint_of_the_last_step(interrupted: Path) -> None:
    assert _checkpoint_of_last_step(interrupted).exists()


def _checkpoint_of_last_step(run_dir: Path) -> Path:
    last = build_ledger(run_dir).last_step
    assert last > 0
    return run_dir / "checkpoints" / f"step_{last}" / "run_state.json"


def test_a_resume_without_steps_left_is_refused_and_changes_nothing(interrupted: Path) -> None:
    files = {path: path.stat().st_mtime_ns for path in interrupted.rglob("*") if path.is_file()}
    settings = ("max_steps=3", "resume_from_checkpoint=true", "max_staleness=0")
    result = run(command("train", *settings, output_dir=interrupted.parent, exp_name="sync"))
    assert result.returncode == 2, result.stdout + result.stderr
    assert "max_steps is 3, but" in result.stdout + result.stderr
    assert files == {path: path.stat().st_mtime_ns for path in interrupted.rglob("*") if path.is_file()}


def test_staleness_zero_is_a_synchronous_run(interrupted: Path) -> None:
    rows = rows_of(interrupted)[1:]
    assert {row["staleness_max"] for row in rows if row["staleness_max"] is not None} == {0}
    measured = [row["mismatch_kl"] for row in rows if row["mismatch_kl"] is not None]
    assert measured
    assert max(measured) < 1e-4
    drifts = [value for row in rows for key, value in row.items() if key.startswith("drift/")]
    assert drifts
    assert max(value for value in drifts if value is not None) < 1e-4
