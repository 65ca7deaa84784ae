"""Updates that do not fit, find no memory, or break in the middle of the swap: no token is wrong.

`TAILRACE_CHAOS_ROUNDS` sets how often an update fails to load (20); a quarter as many break the swap,
after which a server must start again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tailrace.bus import Bus
from tailrace.config import Endpoints
from tailrace.store import Outbox, StoreConnection
from tailrace.weights import TensorBytes
from tests.chaos.weight_run import DEADLINE_S, WeightRun, audited, make_model
from tests.integration.inference.world import weights_of

ROUNDS = int(os.environ.get("TAILRACE_CHAOS_ROUNDS", "20"))
NOT_APPLIED = "weights not applied"

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(2 * DEADLINE_S + 20 * ROUNDS)]


def tensor_missing(tensors: list[TensorBytes]) -> list[TensorBytes]:
    return tensors[1:]


def wrong_name(tensors: list[TensorBytes]) -> list[TensorBytes]:
    return [tensors[0], tensors[1]._replace(name="model.layers.9.other"), *tensors[2:]]


def wrong_shape(tensors: list[TensorBytes]) -> list[TensorBytes]:
    rows, columns = tensors[0].shape
    return [tensors[0]._replace(shape=(columns, rows)), *tensors[1:]]


WRONG = (tensor_missing, wrong_name, wrong_shape)


@pytest.fixture
def faults(tmp_path: Path) -> Path:
    """Folder in which a test asks for failures."""
    return Path(shutil.copytree(Path(__file__).parent / "failing_updates", tmp_path / "faults"))


@pytest.fixture
async def run(
    bus: Bus,
    endpoints: Endpoints,
    tmp_path: Path,
    redis: StoreConnection,
    faults: Path,
    request: pytest.FixtureRequest,
) -> AsyncIterator[WeightRun]:
    """Two servers, one on the host of weight_sync; with a parameter, calls may fail."""
    path = [str(faults), *filter(None, [os.environ.get("PYTHONPATH")])]
    made = WeightRun(
        bus,
        endpoints,
        tmp_path,
        hosts=["sync-host", "far-host"],
        variables={"PYTHONPATH": os.pathsep.join(path)},
        calls_may_fail=getattr(request, "param", False),
    )
    async with made.running(redis):
        yield made


async def without_memory(run: WeightRun, faults: Path) -> None:
    """A version that finds no memory is taken later, without another one."""
    num_told = [server.log.count(NOT_APPLIED) for server in run.servers]
    for at in range(len(run.servers)):
        (faults / f"s{at}.stage").touch()
    await run.publish()
    for server, before in zip(run.servers, num_told, strict=True):
        await run.logged(server, NOT_APPLIED, before)
    await run.all_on_newest()


async def not_fitting(run: WeightRun, wrong: list[TensorBytes]) -> None:
    """A version that fits no server is refused by name, and the next one is taken."""
    before = run.newest
    num_told = [server.log.count(NOT_APPLIED) for server in run.servers]
    await run.offer(wrong)
    for server, num in zip(run.servers, num_told, strict=True):
        await run.logged(server, NOT_APPLIED, num)
    await run.still_generates()
    assert await run.versions() == [before, before]
    await run.publish()
    await run.all_on_newest()


async def test_an_update_that_fails_to_load_leaves_the_version_and_the_next_one_is_taken(
    run: WeightRun, faults: Path, outbox: Outbox
) -> None:
    async with run.called():
        for number in range(ROUNDS):
            if number % 4 == 3:
                await without_memory(run, faults)
            else:
                await not_fitting(run, WRONG[number % 4](weights_of(make_model(run.step))))
            await run.still_generates()
    for server in run.servers:
        for words in ("tensors are missing", "the model has no tensor", "has shape", "out of memory"):
            assert words in server.log
        assert server.running.poll() is None
        assert "unexpected exception" not in server.log
    await audited(run, outbox)


@pytest.mark.parametrize("run", [True], indirect=True)
async def test_a_server_whose_swap_broke_samples_no_token_with_parts_of_two_versions(
    run: WeightRun, faults: Path, outbox: Outbox
) -> None:
    async with run.called():
        for number in range(-(-ROUNDS // 4)):
            at = number % len(run.servers)
            (faults / f"s{at}.apply").touch()
            await run.publish()
            assert await run.servers[at].ended_async(DEADLINE_S) == 1
            await run.still_generates()
            run.servers[at].start()
            await run.all_on_newest()
            assert "the swap of the weights failed" in run.servers[at].log
    await audited(run, outbox)
