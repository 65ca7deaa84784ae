"""Failures and hints in the live view, in plain output, in the final table and in the report."""

from __future__ import annotations

import asyncio
import io
import re
import time
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from tailrace.config import Endpoints
from tailrace_cli.cluster.supervisor import Supervisor
from tailrace_cli.cluster.watch import RunFailedError, Watch
from tailrace_cli.console import plain_console
from tailrace_cli.live_view import ProgressView
from tailrace_cli.reporting.pages import RunReport
from tailrace_cli.run_folders import RunFolder
from tailrace_cli.summary import HealthLog, read_health, summary_rows
from tailrace_protos.control import RunStatus
from tailrace_protos.episode import Outcome
from tailrace_protos.event import (
    EvaluationFinished,
    Event,
    EventBody,
    HintChanged,
    LearnerResumed,
    RunFailed,
    RunFinished,
    RunStarted,
    TagEvaluation,
    TaskSolved,
)
from tests.unit.tailrace_scheduler.simulation import made_settlement

FAILED = RunFailed("failed_groups", 0, "20 groups in a row ended without a valid episode", "agents")


def status(**values: object) -> RunStatus:
    numbers = {"step": 1, "max_steps": 9, "policy_version": 1, "num_episodes_running": 4}
    none = dict.fromkeys(
        ("reward_mean", "success_rate", "eval_success_rate", "staleness_mean", "tokens_per_s", "eta_s")
    )
    counts = {"num_groups_running": 1, "num_groups_ready": 0, "num_servers": 1, "elapsed_s": 1.0}
    return msgspec.convert(
        {"type": "run_status", "phase": "training", **numbers, **counts, **none, **values}, RunStatus
    )


def shown(*statuses: RunStatus, terminal: bool = False, width: int = 120) -> str:
    output = io.StringIO()
    console = plain_console(file=output, force_terminal=terminal, width=width)
    with ProgressView(console, "lake") as view:
        for one in statuses:
            view.update(one)
    return output.getvalue()


def test_the_view_shows_no_version_before_the_first_and_waits_for_nothing_at_the_end() -> None:
    starting = shown(status(phase="warm_start", policy_version=-1, step=0, blocked_by="weights"))
    assert "version -  " in starting
    assert "step 0/9" not in starting
    assert "waits for weights" in starting
    assert "waits for" not in shown(status(phase="finished", blocked_by="evaluation"))


def test_plain_output_names_the_newest_failure_ever_more_rarely_and_a_hint_once() -> None:
    failing = [
        status(num_failures=n, newest_failure=f"env.step raised KeyError: {n}", hints=(f"{n} s: slow",))
        for n in range(9)
    ]
    lines = shown(*failing).splitlines()
    found = [line for line in lines if line.startswith("failed episodes:")]
    assert [line.partition(";")[0] for line in found] == [f"failed episodes: {n}" for n in (1, 2, 4, 8)]
    assert found[-1].endswith("env.step raised KeyError: 8")
    assert sum("slow" in line for line in lines) == 1


def test_the_live_view_shows_failures_and_hints() -> None:
    text = shown(
        status(num_failures=3, newest_failure="reward: no route", hints=("raise group_size",)),
        terminal=True,
    )
    assert "failed episodes: 3; the newest: reward: no route" in text
    assert "hint: raise group_size" in text


def write_events(run_dir: Path, *bodies: EventBody) -> None:
    events = (Event(f"{n}-0", float(n), "test", body) for n, body in enumerate(bodies))
    lines = [msgspec.json.encode(event) + b"\n" for event in events]
    (run_dir / "events.jsonl").write_bytes(b"".join(lines) + b'{"torn')


def failures(reason: str, num: int, outcome: Outcome = Outcome.INFRA_FAILURE) -> list[EventBody]:
    settled = made_settlement("t1", 0, outcome)
    return [msgspec.structs.replace(settled, reason=f"{reason} {n}") for n in range(num)]


def test_the_table_and_the_report_list_the_commonest_failures_hints_and_the_end(tmp_path: Path) -> None:
    hint = HintChanged("equal_groups", True, "90% of the groups have equal rewards", 7)
    few = failures("judge <gone>", 2)
    write_events(tmp_path, *failures("env.step raised", 5), *few, hint, hint, FAILED)
    lines = summary_rows([], read_health(tmp_path))
    assert ("5 failures", "env.step raised 4") in lines
    assert ("2 failures", "judge <gone> 1") in lines
    assert ("the newest failure", "judge <gone> 1") in lines
    assert lines.count(("hint", hint.text)) == 1
    assert ("the run failed", FAILED.reason) in lines
    (tmp_path / "config.yaml").write_text("exp_name: lake\n")
    page = RunReport(RunFolder(tmp_path)).write().read_text()
    assert all(text in page for text in ("env.step raised 4", "judge &lt;gone&gt; 1", FAILED.reason))


def test_a_run_that_goes_on_after_its_failure_has_not_failed(tmp_path: Path) -> None:
    write_events(tmp_path, FAILED, RunStarted("lake", ""))
    assert read_health(tmp_path).failed == ""


def test_training_that_ends_early_is_told_once_and_stands_in_table_and_report(tmp_path: Path) -> None:
    early = status(phase="finishing", ended_early="the task is solved: so it is")
    lines = shown(early, early).splitlines()
    assert sum("training ends early: the task is solved: so it is" in line for line in lines) == 1
    assert "training ends early: the task is solved" in shown(early, terminal=True)
    solved, end = TaskSolved("L", 1, 800, "the task is solved"), "the task is solved; success: 1.000"
    write_events(tmp_path, solved, RunFinished(1, end))
    assert ("training ended early", end) in summary_rows([], read_health(tmp_path))
    (tmp_path / "config.yaml").write_text("exp_name: lake\n")
    assert end in RunReport(RunFolder(tmp_path)).write().read_text()
    write_events(tmp_path, solved, RunFinished(1, end), LearnerResumed("M", 1, 0, "step_1"))
    assert read_health(tmp_path).ended_early == ""


async def test_the_end_of_a_failed_run_carries_reason_and_log(
    endpoints: Endpoints, tmp_path: Path, run_name: str
) -> None:
    (tmp_path / "agents-0.log").write_text('{"event": "episode failed", "level": "warning"}\n')
    watch = Watch(_supervisor(tmp_path), lambda status: None, tmp_path, 0.0)
    await watch.on_status(status(phase="failed", failed=FAILED))
    with pytest.raises(RunFailedError, match="20 groups in a row") as caught:
        await watch.follow(endpoints, run_name, asyncio.Event())
    assert str(caught.value).endswith("warning episode failed")
    assert caught.value.exit_code == 1


async def test_a_silent_scheduler_ends_the_run(
    endpoints: Endpoints, tmp_path: Path, run_name: str
) -> None:
    watch = Watch(_supervisor(tmp_path), lambda status: None, tmp_path, 0.2)
    with pytest.raises(RunFailedError, match="the scheduler has said nothing"):
        await watch.follow(endpoints, run_name, asyncio.Event())


async def test_a_command_that_was_stopped_for_long_does_not_take_the_scheduler_for_silent(
    endpoints: Endpoints, tmp_path: Path, run_name: str
) -> None:
    """After Ctrl-Z and `fg` the deadline is over before the statuses that waited can be read."""
    watch = Watch(_supervisor(tmp_path), lambda status: None, tmp_path, 0.5)
    following = asyncio.create_task(watch.follow(endpoints, run_name, asyncio.Event()))
    await watch.on_status(status())
    for _ in range(3):
        await asyncio.sleep(0.05)
        time.sleep(1.0)  # noqa: ASYNC251 (as if the process was stopped)
        await asyncio.sleep(0.05)
        assert not following.done()
        await watch.on_status(status())
    await watch.on_status(status(phase="finished"))
    assert await following is not None


def _supervisor(folder: Path) -> Supervisor:
    return Supervisor(folder, max_restarts=1, restart_window_s=1.0)


def test_an_evaluation_whose_means_leave_episodes_out_is_a_hint(tmp_path: Path) -> None:
    """Episodes that time out are not valid, and those that succeed early are: the mean lies."""
    greedy = TagEvaluation(1.0, 1.0, 5)
    named = {"first": TagEvaluation(0.1, 0.1, 3), "second": TagEvaluation(0.2, 0.2, 28)}
    write_events(
        tmp_path,
        EvaluationFinished("e0-v1", 0, 1.0, 1.0, 29, 768, {}, greedy),
        EvaluationFinished("e9-v9", 9, 0.1, 0.1, 512, 768, {}, TagEvaluation(0.1, 0.1, 250)),
        EvaluationFinished("e12-v9", 12, 0.1, 0.1, 3, 31, named),
    )
    (hint,) = read_health(tmp_path).hints
    assert hint.startswith("the evaluation of step 0 counts 34 of 768 episodes")


def test_the_live_view_of_80_columns_shows_what_matters_on_whole_lines() -> None:
    values = {"success_rate": 0.5, "eval_success_rate": 0.25, "eval_greedy_success_rate": 0.75}
    more = {"num_failures": 1234, "newest_failure": "[judge] gone", "policy_version": 567}
    text = shown(status(**values, **more, reward_mean=0.5, tokens_per_s=9e6), terminal=True, width=80)
    plain = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", text)
    for part in ("success 0.500", "held-out sampled 0.250", "held-out greedy 0.750", "failed 1,234"):
        assert part in plain
    assert "version 567" in plain
    assert not any("━" in line and "success" in line for line in plain.splitlines())
    assert "[judge] gone" in plain
    assert max(len(line.rstrip()) for line in plain.splitlines()) <= 80


def test_the_warm_start_shows_its_own_progress() -> None:
    warm = [
        status(phase="warm_start", step=0, warm_start_step=step, warm_start_num_steps=200)
        for step in range(201)
    ]
    lines = shown(*warm).splitlines()
    assert [line.split()[3] for line in lines] == [f"{step}/200" for step in range(0, 201, 20)]
    assert "warm start  step 120/200" in shown(warm[120], terminal=True)


def test_a_narrowed_terminal_is_cleared_before_the_next_picture() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=120, height=30)
    with ProgressView(console, "lake") as view:
        view.update(status())
        assert "\x1b[2J" not in output.getvalue()
        console.width = 60
        view.update(status())
    assert "\x1b[2J\x1b[H" in output.getvalue()


def test_sampled_and_greedy_success_have_names_in_the_live_view() -> None:
    text = shown(status(eval_success_rate=0.25, eval_greedy_success_rate=0.5))
    assert "held-out sampled 0.250  held-out greedy 0.500" in text
    assert "greedy" not in shown(status(eval_success_rate=0.25))


def test_the_commonest_failure_is_known_among_thousands_that_each_name_another_text() -> None:
    log, words = HealthLog(), (f"said {'xyz'[n % 3] * (n // 3 + 200)}" for n in range(4000))
    tracemalloc.start()
    for n, text in enumerate(words):
        reason = f"KeyError: {n}" if n % 10 == 0 else text
        failed = made_settlement("t1", 0, Outcome.INFRA_FAILURE)
        log.apply(msgspec.structs.replace(failed, reason=reason))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert log.health.failures[0] == ("KeyError: 3990", 400)
    assert kept < 3_000_000
