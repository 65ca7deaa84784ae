"""Following a run on Kubernetes: its end, its failure, one valid episode, silence."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import pytest
from rich.console import Console

from tailrace.bus import Bus
from tailrace.config import Endpoints, RunConfig
from tailrace_cli.commands.follow import Follower
from tailrace_protos import subjects
from tailrace_protos.base import Message
from tailrace_protos.control import RunStatus
from tailrace_protos.event import EpisodeSettled, Event, EventBatch, RunFailed

NONE = ("reward_mean", "success_rate", "eval_success_rate", "staleness_mean", "tokens_per_s", "eta_s")


def status(phase: str, **changes: Any) -> RunStatus:
    values: dict[str, Any] = dict.fromkeys(RunStatus.__struct_fields__[:14], 0)
    return RunStatus(**(values | dict.fromkeys(NONE) | {"phase": phase} | changes))


def settled(outcome: str) -> EventBatch:
    body = EpisodeSettled("e1", "g", 0, "train", outcome, "", 1.0, 1.0, 2, 1, 0, 0, 0.0, 1.0)  # type: ignore[arg-type]
    return EventBatch((Event("1-0", 0.0, "agents", body),))


async def followed(
    endpoints: Endpoints, bus: Bus, subject: str, messages: list[Message], **options: Any
) -> tuple[int, str]:
    """Exit code and output while the messages are sent again and again, in order."""
    console = Console(file=io.StringIO(), width=200)
    run = RunConfig(exp_name=bus.run)
    follower = Follower(console, run, **({"silence_s": 60.0, "until_episode": False} | options))

    async def tell() -> None:
        while True:
            for message in messages:
                await bus.publish(subject, message)
            await asyncio.sleep(0.02)

    telling = asyncio.create_task(tell())
    try:
        exit_code = await follower.follow(endpoints)
    finally:
        telling.cancel()
    return exit_code, console.file.getvalue()  # type: ignore[attr-defined]


async def test_the_end_of_the_run_is_the_end(endpoints: Endpoints, bus: Bus) -> None:
    subject = subjects.run_status(bus.run)
    exit_code, output = await followed(
        endpoints, bus, subject, [status("training"), status("finished")]
    )
    assert exit_code == 0
    assert "finished" in output


async def test_a_failed_run_fails_with_its_reason(endpoints: Endpoints, bus: Bus) -> None:
    failed = RunFailed("stall", 3, "the learner never answered", "learner")
    message = status("failed", failed=failed)
    exit_code, output = await followed(endpoints, bus, subjects.run_status(bus.run), [message])
    assert exit_code == 1
    assert "the learner never answered" in output


async def test_a_silent_scheduler_is_a_failure(endpoints: Endpoints, bus: Bus) -> None:
    exit_code, output = await followed(endpoints, bus, "nobody", [status("x")], silence_s=0.2)
    assert exit_code == 1
    assert "said nothing" in output


@pytest.mark.parametrize(("outcome", "passes"), [("ok", True), ("infra_failure", False)])
async def test_one_valid_episode_is_enough_when_asked(
    outcome: str, passes: bool, endpoints: Endpoints, bus: Bus
) -> None:
    exit_code, output = await followed(
        endpoints,
        bus,
        subjects.events(bus.run),
        [settled(outcome)],
        until_episode=True,
        silence_s=60.0 if passes else 0.5,
    )
    assert exit_code == (0 if passes else 1)
    assert ("episode e1: ok" in output) is passes
