"""Nonsense on every subject of a live run: each piece is answered or buried and named; nothing dies."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import nats.errors
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from tailrace.bus import Bus, OversizedMessageError, flush
from tailrace.bus.calls import CODE_HEADER, REASON_HEADER
from tailrace.config import Endpoints
from tailrace_cli.cluster.servers import MAX_MESSAGE_BYTES
from tailrace_protos import subjects
from tailrace_protos.base import Message, decode, encode
from tailrace_protos.control import AgentActivity, DrainRequest, LeaseReport, LeaseRequest
from tailrace_protos.episode import EnvTask, EpisodeTask
from tailrace_protos.generation import AbortRequest, ChunkFrame
from tailrace_protos.reward import ScoreRequest
from tailrace_protos.weights import CurrentWeightsRequest
from tests.audit import build_ledger, check_ledger
from tests.e2e.processes import log_lines, num_steps, running
from tests.e2e.runs import command

RUN = "noisy"
SERVER = "inference"
MAX_STEPS = 60
GROUP_THAT_NEVER_WAS = "stranger"


@dataclass(frozen=True)
class Target:
    """A subject that services listen on, who may publish there, and a message to break in pieces."""

    subject: str
    user: str
    sample: Message
    answers: bool = False


def targets() -> list[Target]:
    """Every subject of the protocol that a service listens on."""
    episode = EpisodeTask("stranger.0", GROUP_THAT_NEVER_WAS, 0, 0, "train", EnvTask("none", 1), 1e12)
    stray = AbortRequest(("never-started",))
    return [
        Target(subjects.lease(RUN), "agents", LeaseRequest("w", ("e",), (1,)), answers=True),
        Target(subjects.lease_report(RUN), "agents", LeaseReport("w", ("e",), {"nobody": 3})),
        Target(subjects.activity(RUN), "agents", AgentActivity("ghost", 0, 0, 0, 0, 1.0)),
        Target(subjects.score(RUN), "agents", ScoreRequest(()), answers=True),
        Target(subjects.generate(RUN, SERVER), "agents", stray),
        Target(subjects.inference_control(RUN, SERVER), "scheduler", DrainRequest(), answers=True),
        Target(subjects.offer_weights(RUN), "learner", stray, answers=True),
        Target(subjects.current_weights(RUN), "inference", CurrentWeightsRequest("x"), answers=True),
        Target(subjects.weights_applied(RUN), "inference", stray, answers=True),
        Target(subjects.weights_published(RUN), "weight_sync", stray),
        Target(subjects.run_status(RUN), "scheduler", stray),
        Target(subjects.episodes(RUN, "train"), "scheduler", episode),
        Target(subjects.episodes(RUN, "eval"), "scheduler", episode),
        Target(f"$KV.{subjects.registry_bucket(RUN)}.{SERVER}", "inference", stray),
    ]


def nonsense(target: Target) -> Iterator[bytes]:
    """Payloads that are no message of the subject's type."""
    yield b""
    yield random.Random(target.subject).randbytes(64)
    yield encode(target.sample)[:-1]
    yield encode(target.sample)[: len(encode(target.sample)) // 2]
    yield msgspec.msgpack.encode({"type": "no_type", "x": [1, 2, 3]})
    yield random.Random(1).randbytes(MAX_MESSAGE_BYTES - 8192)
    yield b"\xc1" * MAX_MESSAGE_BYTES


class Users:
    """Connections with the rights of the run's services."""

    def __init__(self, run_dir: Path) -> None:
        keys = json.loads((run_dir / "state" / "credentials.json").read_text())
        listen = json.loads((run_dir / "state" / "nats.conf").read_text())["listen"]
        self.host, self.port = listen.split(":")
        self._passwords: dict[str, str] = keys["nats"]
        self._open: dict[str, Bus] = {}

    async def bus(self, user: str) -> Bus:
        """The user's connection."""
        if user not in self._open:
            endpoints = Endpoints(
                nats_url=f"nats://{self.host}:{self.port}",
                nats_user=user,
                nats_password=self._passwords[user],
                redis_url="",
                host_id="test",
            )
            self._open[user] = await Bus.connect(endpoints, name=f"noise of {user}", run=RUN)
        return self._open[user]

    async def client(self, user: str) -> Client:
        """The same, as bytes go."""
        return (await self.bus(user)).connection.client

    def password(self, user: str) -> str:
        """The user's password."""
        return self._passwords[user]

    async def close(self) -> None:
        """Close all."""
        for bus in self._open.values():
            await bus.close()


async def ask(client: Client, subject: str, payload: bytes) -> Msg:
    """The answer to one request."""
    try:
        return await client.request(subject, payload, timeout=60)
    except nats.errors.TimeoutError as error:
        raise AssertionError(f"{subject} does not answer {payload[:20]!r}") from error


async def make_noise(users: Users) -> None:
    """Everything wrong that can be said, to everybody."""
    for target in targets():
        client = await users.client(target.user)
        for payload in nonsense(target):
            if target.answers:
                answer = await ask(client, target.subject, payload)
                assert (answer.headers or {}).get(CODE_HEADER) == "400", (target.subject, answer)
                assert REASON_HEADER in (answer.headers or {})
            elif target.subject == subjects.generate(RUN, SERVER):
                answer = await ask(client, target.subject, payload)
                decode(answer.data, ChunkFrame)
                await client.publish(target.subject, payload)  # nobody to be answered
            else:
                await client.publish(target.subject, payload)
        await flush(client)


async def say_what_is_well_formed_but_wrong(users: Users) -> None:
    """Valid messages about things that never were."""
    for target in targets():
        client = await users.client(target.user)
        if isinstance(target.sample, EpisodeTask | LeaseReport | AgentActivity):
            await client.publish(target.subject, encode(target.sample))
            await flush(client)
    lopsided = encode(LeaseRequest("w", ("e", "f"), (1,)))
    answer = await ask(await users.client("agents"), subjects.lease(RUN), lopsided)
    assert (answer.headers or {}).get(CODE_HEADER) == "400"


async def exceed_the_limit(users: Users) -> None:
    """A message over the server's limit: refused here; by the server where somebody sends it anyhow."""
    bus = await users.bus("agents")
    with pytest.raises(OversizedMessageError, match="claim check"):
        await bus.connection.publish(subjects.activity(RUN), b"x" * (MAX_MESSAGE_BYTES + 1))
    reader, writer = await asyncio.open_connection(users.host, int(users.port))
    login = json.dumps({"user": "agents", "pass": users.password("agents"), "verbose": False})
    writer.write(
        f"CONNECT {login}\r\nPUB {subjects.activity(RUN)} {MAX_MESSAGE_BYTES + 1}\r\n".encode()
    )
    said = await asyncio.wait_for(reader.read(-1), 60)
    assert b"Maximum Payload" in said
    writer.close()


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_nonsense_on_every_subject_is_answered_or_buried_and_named(tmp_path: Path) -> None:
    argv = command(
        "train",
        f"max_steps={MAX_STEPS}",
        "max_staleness=2",
        "stale_groups=mask",  # closes no group early: every episode ends by itself
        output_dir=tmp_path,
        exp_name=RUN,
    )
    run_dir = tmp_path / RUN

    async def disturb() -> None:
        users = Users(run_dir)
        try:
            await make_noise(users)
            await say_what_is_well_formed_but_wrong(users)
            await exceed_the_limit(users)
        finally:
            await users.close()

    with running(argv, tmp_path / "printed") as training:
        training.wait_until(lambda: num_steps(run_dir) >= 1)
        asyncio.run(disturb())
        assert num_steps(run_dir) < MAX_STEPS, "the noise was made while the run was live"
        assert training.ends(400.0) == 0, training.printed
    ledger = build_ledger(run_dir)
    check_ledger(ledger)
    assert ledger.last_step == MAX_STEPS
    assert {one["outcome"] for one in ledger.of_type("episode_settled")} == {"ok"}
    assert GROUP_THAT_NEVER_WAS not in ledger.admitted
    _nothing_was_restarted(run_dir, training.printed)
    _everything_was_named(run_dir, training.printed)


def _nothing_was_restarted(run_dir: Path, printed: str) -> None:
    assert "process_ended" not in printed
    started = [line["service"] for line in log_lines(run_dir) if line.get("event") == "started"]
    services = ["agents", "inference", "learner", "reward", "scheduler", "weight_sync"]
    assert sorted(map(str, started)) == services
    assert [line for line in log_lines(run_dir) if line.get("event") == "loop restarts"] == []


def _everything_was_named(run_dir: Path, printed: str) -> None:
    said = [json.dumps(line) for line in log_lines(run_dir)] + printed.splitlines()
    told = [line for line in said if re.search("malformed|dead letter|without a reply", line)]
    for target in targets():
        named = [line for line in told if target.subject in line]
        if target.subject == subjects.generate(RUN, SERVER):
            named = [line for line in told if "generation frame" in line]
        assert len(named) >= len(list(nonsense(target))), target.subject
