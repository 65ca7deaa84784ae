"""A turn whose server is stopped or killed goes on elsewhere: each token once, with its provenance."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from tailrace.channel import Address, ClientChannelConfig, ZmqGenerateClient
from tailrace.policy.activity import Stages
from tailrace.policy.continuation import ContinuingPolicy
from tailrace.sdk.policy import TurnRequest
from tailrace_protos.base import as_int32, pack_int32
from tailrace_protos.episode import Lease
from tailrace_protos.generation import FinishReason, SamplingParams, TokenChunk
from tests.contract.engine.harness import ENGINE, LONG, TOLERANCE, make_model, own_logprobs
from tests.e2e.runs import ROOT
from tests.world.processes import kill_all

SERVER = """
import asyncio, sys
from tailrace.channel import ServerChannelConfig, ZmqGenerateServer
from tailrace_inference.handlers import InferenceHandler
from tests.contract.engine.harness import Bench

async def serve():
    bench = await Bench.start(max_running=8, kv_cache_tokens=4096)
    handler = InferenceHandler(bench.engine, lambda: False)
    handler.has_weights = True
    config = ServerChannelConfig(keepalive_s=0.2, silence_s=5.0)
    await ZmqGenerateServer(sys.argv[1], config).start(handler)
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(serve())
"""


class FirstThatWorks:
    """Leases the first server that has not just failed."""

    ask_after_s = 60.0

    def __init__(self, addresses: list[Address]) -> None:
        self._addresses = addresses

    async def lease(
        self,
        episode_id: str,
        context_tokens: int,
        failed_server_id: str = "",
        stay_at: Address | None = None,
    ) -> Address:
        return next(each for each in self._addresses if each.server_id != failed_server_id)

    def take(self, lease: Lease) -> None:
        pass

    def report_turn(
        self, episode_id: str, server_id: str, context_tokens: int, *, is_over: bool
    ) -> None:
        pass

    def report_call(self, server_id: str, succeeded: bool) -> None:
        pass

    def release(self, episode_id: str) -> None:
        pass


@contextmanager
def server_process(engine: str, endpoint: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, endpoint],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"TAILRACE_ENGINE": engine, "TMPDIR": str(folder)},
    )
    yield process
    if process.poll() is None:
        kill_all(psutil.Process(process.pid).children(recursive=True))
        process.kill()
    process.communicate()


def wait_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert any(line == "ready\n" for line in process.stdout)


@pytest.fixture
async def client() -> AsyncIterator[ZmqGenerateClient]:
    made = ZmqGenerateClient(ClientChannelConfig(keepalive_s=0.2, silence_s=5.0))
    await made.start()
    yield made
    await made.close()


@pytest.mark.timeout(900)
async def test_a_turn_outlives_a_stopped_and_a_killed_server(
    client: ZmqGenerateClient, short_folder: Path
) -> None:
    """The second server is the torch engine: provenance and tokens are the same on all engines."""
    endpoints = [f"ipc://{short_folder}/{name}.ipc" for name in ("first", "second")]
    with (
        server_process(ENGINE, endpoints[0], short_folder) as first,
        server_process("torch", endpoints[1], short_folder) as second,
    ):
        for process in (first, second):
            await asyncio.to_thread(wait_ready, process)
        addresses = [
            Address(name, "", endpoint)
            for name, endpoint in zip(("first", "second"), endpoints, strict=True)
        ]
        policy = ContinuingPolicy(FirstThatWorks(addresses), client, Stages(), max_delay_s=0.2)
        for turn, way in enumerate((signal.SIGSTOP, signal.SIGKILL)):
            await check_turn(policy, first, way, f"episode-{turn}")
            first.send_signal(signal.SIGCONT)  # nothing happens to one that is dead


async def check_turn(
    policy: ContinuingPolicy, first: subprocess.Popen[str], way: signal.Signals, episode: str
) -> None:
    streamed: list[int] = []

    def on_chunk(chunk: TokenChunk) -> None:
        if not streamed:
            first.send_signal(way)  # with most of the turn still to come
        streamed.extend(as_int32(chunk.token_ids).tolist())

    prompt = [1, 2, 3]
    policy.begin(episode)
    made = await policy.generate(
        TurnRequest(pack_int32(prompt), LONG, SamplingParams(), episode, 0, on_chunk)
    )
    policy.end(episode)
    assert made.finish_reason is FinishReason.LENGTH
    assert streamed == made.token_ids.tolist()
    assert len(streamed) == LONG
    own = own_logprobs(make_model(0), [*prompt, *streamed])[len(prompt) - 1 :]
    taken = np.take_along_axis(own, made.token_ids[:, None].astype(np.int64), 1)[:, 0]
    assert np.abs(taken - made.inference_logprobs).max() < TOLERANCE
    assert [span.source.partition(".")[0] for span in made.spans] == ["first", "second"]
    assert {span.policy_version for span in made.spans} == {0}
    assert sum(span.num_tokens for span in made.spans) == LONG
