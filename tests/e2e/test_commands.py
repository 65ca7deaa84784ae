"""Commands besides a plain `train`, with the real system behind them; see also `test_train`."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import stat
import subprocess
import time
from pathlib import Path

import nats
import pytest
import redis

from tailrace.config import ConfigError
from tailrace_cli.checkpoints import model_card, model_folder
from tailrace_cli.commands.evaluate import evaluation_of
from tailrace_cli.experiment import load
from tailrace_protos import subjects
from tests.audit import build_ledger, check_ledger
from tests.e2e.processes import Background, running, still_alive
from tests.e2e.runs import EXPERIMENT, TAILRACE, command, environment, run
from tests.world.processes import ENDED_WITHIN_S, handles, outlasting, words_of
from tests.world.servers import ServerProcess

TINY = ("max_steps=2", "scheduler.eval_groups=8")


def test_a_checkpoint_that_does_not_exist_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    result = run(
        [*command("eval", output_dir=tmp_path, exp_name="none"), "--checkpoint", str(tmp_path)]
    )
    assert result.returncode == 2, result.stdout + result.stderr
    assert f"{tmp_path} is no checkpoint" in result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    experiment = load(EXPERIMENT / "experiment.yaml", [f"output_dir={tmp_path}", "exp_name=none"])
    for find in (evaluation_of, model_folder):  # of `eval` and of `episode`
        with pytest.raises(ConfigError, match="train first"):
            find(experiment, "")
    with pytest.raises(ConfigError, match="/no/such/checkpoint"):
        evaluation_of(experiment, "/no/such/checkpoint")
    with pytest.raises(ConfigError, match="/no/such/checkpoint"):
        model_card(model_folder(experiment, "/no/such/checkpoint"))


def test_an_evaluation_has_a_name_whatever_the_length_of_its_runs(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    experiment = load(EXPERIMENT / "experiment.yaml", [f"exp_name={'n' * 64}"])
    assert evaluation_of(experiment, str(tmp_path)).run.exp_name == "n" * 59 + "_eval"


def test_up_keeps_everything_up_guards_its_run_and_drains_on_ctrl_c(tmp_path: Path) -> None:
    run_dir = tmp_path / "standing"
    argv = command("up", "max_steps=100000", output_dir=tmp_path, exp_name="standing")
    with running(argv, tmp_path / "printed") as up:
        up.wait_until(lambda: "Ctrl-C drains" in up.printed)
        assert re.search(r"NATS +nats://127\.0\.0\.1:\d+", up.printed)
        assert re.search(r"Redis +redis://127\.0\.0\.1:\d+/0", up.printed)
        for name in ("credentials.json", "nats.conf", "redis.conf"):
            assert stat.S_IMODE((run_dir / "state" / name).stat().st_mode) == 0o600, name
        children = up.children()
        assert len(children) >= 8
        _is_refused_while_in_use(tmp_path, up)
        up.interrupt()
        assert up.ends() == 0, up.printed
    assert still_alive(children) == []
    assert "Traceback" not in up.printed


def test_no_process_of_a_run_outlives_its_killed_command(tmp_path: Path, run_name: str) -> None:
    argv = command("up", "max_steps=100000", output_dir=tmp_path, exp_name=run_name)
    with running(argv, tmp_path / "printed") as up:
        up.wait_until(lambda: "Ctrl-C drains" in up.printed)
        processes = up.children()
        hung = next(each for each in processes if "tailrace_scheduler" in words_of(each))
        hung.suspend()
        with handles(processes) as found:
            up.process.kill()
            assert outlasting(found, time.monotonic() + ENDED_WITHIN_S) == set(), up.printed
    assert len(processes) >= 8  # with the guardian, which deletes shared memory and ends last
    assert list(Path("/dev/shm").glob(f"*tailrace.{run_name}.*")) == []


def _is_refused_while_in_use(output_dir: Path, holder: Background) -> None:
    argv = command("train", "resume_from_checkpoint=true", output_dir=output_dir, exp_name="standing")
    second = run(argv)
    assert second.returncode == 2, second.stdout + second.stderr
    assert f"(process {holder.process.pid})" in second.stderr
    assert "Traceback" not in second.stdout + second.stderr
    overwriting = run([*argv[:-1], "resume_from_checkpoint=false", "--overwrite"])
    assert overwriting.returncode == 2, "a run in use is not deleted"
    assert (output_dir / "standing" / "state" / "credentials.json").exists()


@pytest.mark.heavy
def test_two_runs_share_servers_that_already_run_without_meeting(
    tmp_path: Path, nats_server: ServerProcess, redis_server: ServerProcess, run_name: str
) -> None:
    names = [f"{run_name}-a", f"{run_name}-b"]
    store = redis.Redis.from_url(redis_server.url)
    store.set(f"{run_name}.theirs", "untouched")
    attach = ["--attach", nats_server.url, redis_server.url]
    argvs = [[*command("train", *TINY, output_dir=tmp_path, exp_name=name), *attach] for name in names]
    with (
        running(argvs[0], tmp_path / "printed-a") as first,
        running(argvs[1], tmp_path / "printed-b") as second,
    ):
        assert first.ends(400.0) == 0, first.printed
        assert second.ends(400.0) == 0, second.printed
    for name in names:
        ledger = build_ledger(tmp_path / name)
        check_ledger(ledger)
        assert ledger.last_step == 2
        assert {line["body"]["run"] for line in ledger.lines if "run" in line["body"]} <= {name}
        assert not (tmp_path / name / "state" / "nats").exists(), "no servers of its own"
    assert store.get(f"{run_name}.theirs") == b"untouched"
    assert subjects.events_stream(names[0]) in asyncio.run(_streams(nats_server.url))
    _is_not_mixed_with_an_earlier_run(tmp_path / "elsewhere", names[0], attach)


async def _streams(url: str) -> list[str]:
    client = await nats.connect(url)
    try:
        return [info.config.name or "" for info in await client.jetstream().streams_info()]
    finally:
        await client.close()


def _is_not_mixed_with_an_earlier_run(output_dir: Path, name: str, attach: list[str]) -> None:
    argv = [*command("train", *TINY, output_dir=output_dir, exp_name=name), *attach]
    refused = run(argv)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "--overwrite" in refused.stderr
    again = run([*argv, "--overwrite"])
    assert again.returncode == 0, again.stdout + again.stderr
    ledger = build_ledger(output_dir / name)
    check_ledger(ledger)
    assert ledger.last_step == 2


@pytest.mark.parametrize("which", ["nats", "redis"])
def test_attaching_to_a_server_that_is_not_there_is_named(
    tmp_path: Path, nats_server: ServerProcess, redis_server: ServerProcess, which: str
) -> None:
    urls = {"nats": nats_server.url, "redis": redis_server.url}
    urls[which] = f"{which}://127.0.0.1:9/"
    argv = command("train", *TINY, output_dir=tmp_path, exp_name="alone")
    result = run([*argv, "--attach", urls["nats"], urls["redis"]])
    assert result.returncode == 2, result.stdout + result.stderr
    assert "127.0.0.1:9" in result.stderr
    assert "Traceback" not in result.stdout + result.stderr


def test_an_experiment_is_found_by_config_path_and_config_name(tmp_path: Path) -> None:
    shutil.copy(EXPERIMENT / "experiment.yaml", tmp_path / "lake.yaml")
    located = ["--config_path", str(tmp_path), "--config_name", "lake"]
    result = run([TAILRACE, "validate", *located, "group_size=5", "seed=7", "--print", "--fast"])
    assert result.returncode == 0, result.stdout + result.stderr
    assert "group_size: 5" in result.stdout
    assert "seed: 7" in result.stdout
    missing = run([TAILRACE, "validate", "--config_path", str(tmp_path), "--config_name", "sea"])
    assert missing.returncode == 2
    assert str(tmp_path / "sea") in missing.stderr


def test_a_configuration_that_fails_at_a_service_start_ends_everything_with_one_line(
    tmp_path: Path,
) -> None:
    model = ("pretrain=owner/none", "learner.from_scratch=null", "learner.warm_start=null")
    argv = command("train", *model, output_dir=tmp_path, exp_name="hub")
    result = subprocess.run(
        argv,
        env={**environment(), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 2, result.stdout + result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "learner" in errors[0]
    assert "owner/none" in errors[0]
    assert "Traceback" not in result.stdout + result.stderr
    assert _processes_of(tmp_path / "hub") == []


def _processes_of(run_dir: Path) -> list[str]:
    """Command lines that name the run directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(run_dir) in words:
            found.append(words.replace("\0", " "))
    return found
