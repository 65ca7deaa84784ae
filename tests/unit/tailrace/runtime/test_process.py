"""`run_service`: a user's mistake is one line on stderr and exit code 2."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tailrace.config import ConfigError
from tailrace.runtime import Args, Service, run_service


def refuse(args: Args) -> Service:
    raise ConfigError(f"{args.config}: agents.colour: no such colour")


def build(args: Args) -> Service:
    return Service("worker", args.run, args.endpoints, instance_id=args.worker_id)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILRACE_NATS_URL", "nats://127.0.0.1:1")
    monkeypatch.setenv("TAILRACE_REDIS_URL", "redis://127.0.0.1:1")


@pytest.fixture
def experiment(tmp_path: Path) -> str:
    path = tmp_path / "experiment.yaml"
    path.write_text("exp_name: r\n")
    return str(path)


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert text.count("\n") == 1
    return text


def test_what_the_service_refuses(experiment: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_service(refuse, ["--config", experiment]) == 2
    assert "no such colour" in error_line(capsys)


def test_an_unknown_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("exp_name: r\nmax_stepz: 3\n")
    assert run_service(build, ["--config", str(bad)]) == 2
    assert "did you mean 'max_steps'" in error_line(capsys)


def test_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_service(build, ["--config", str(tmp_path / "none.yaml")]) == 2
    assert "cannot read experiment file" in error_line(capsys)


@pytest.mark.parametrize("option", ["--instance-id", "--worker-id", "--server-id"])
def test_an_instance_id_that_could_not_be_part_of_a_subject(
    option: str, experiment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_service(build, ["--config", experiment, option, "a.b"]) == 2
    assert "--instance-id 'a.b'" in error_line(capsys)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TAILRACE_LOG", "xml"),
        ("TAILRACE_LOG_LEVEL", "loud"),
        ("TAILRACE_METRICS_PORT", "many"),
        ("TAILRACE_METRICS_PORT", "70000"),
    ],
)
def test_an_environment_variable_without_sense(
    variable: str,
    value: str,
    experiment: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable, value)
    assert run_service(build, ["--config", experiment]) == 2
    assert f"{variable}={value!r}" in error_line(capsys)


def test_a_service_that_was_not_told_where_the_servers_are(
    experiment: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TAILRACE_NATS_URL")
    assert run_service(build, ["--config", experiment]) == 2
    assert "TAILRACE_NATS_URL not set" in error_line(capsys)


def test_the_watchdog_of_the_event_loop_ends_with_the_service(experiment: str) -> None:
    def build_stopped(args: Args) -> Service:
        service = build(args)
        service.stop("test")
        return service

    assert run_service(build_stopped, ["--config", experiment]) == 0
    watching = [thread for thread in threading.enumerate() if thread.name == "loop watchdog"]
    for thread in watching:
        thread.join(60)
    assert not any(thread.is_alive() for thread in watching)
