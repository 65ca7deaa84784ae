"""A learner's agent and its ranks; on two nodes, an agent of each, as processes of this machine."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tailrace.config import ConfigError, Endpoints, RunConfig
from tailrace.runtime import Args
from tailrace_learner.adapters.launcher import checked_config
from tailrace_learner.adapters.ranks import AGENT_PID
from tests.world.learner_nodes import node_environment
from tests.world.servers import free_port

MOVED_ENVIRONMENT = 7  # exit code of an agent that adds a variable while other threads may read
WATCHES_ON = 8  # of an agent whose watch over the nodes outlives its ranks, and may abort its end
AGENT = f"""
import os, sys, threading
from tailrace_learner.adapters.launcher import run_ranks
from tailrace_learner.config_execution import StrategyArgs
def watch(event, of):
    if event == "os.putenv" and of[0].decode() not in os.environ and threading.active_count() > 1:
        os._exit({MOVED_ENVIRONMENT})
sys.addaudithook(watch)
code = run_ranks(StrategyArgs(num_ranks=2), 60.0, "meeting", sys.argv[1:])
if "nodes" in [thread.name for thread in threading.enumerate()]:
    os._exit({WATCHES_ON})
sys.exit(code)
"""
RANK = """
import json, sys
from pathlib import Path
import torch.distributed
torch.distributed.init_process_group("gloo")
rank, found = torch.distributed.get_rank(), [None, None]
torch.distributed.all_gather_object(found, rank)
Path(sys.argv[1], f"rank{rank}").write_text(json.dumps(found))
torch.distributed.destroy_process_group()
"""
SAVING_S = 33.0  # torchrun's agent gives a rank 30 s by itself
SLOW_RANK = f"""
import signal, sys, time
from pathlib import Path
def save(*_):
    time.sleep({SAVING_S})
    Path(sys.argv[1], "saved").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
Path(sys.argv[1], "started").touch()
while True:
    signal.pause()
"""


def test_a_learner_on_two_nodes_takes_no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of the second node would never sleep."""
    endpoints = Endpoints(nats_url="nats://nowhere", redis_url="redis://nowhere", host_id="here")
    experiment = {"learner": {"strategy_args": {"num_ranks": 2}}}
    run = RunConfig(exp_name="unit", pretrain="owner/model", colocated=True)
    args = Args("run.yaml", "learner", experiment, run, endpoints)
    assert checked_config(args).strategy_args.num_ranks == 2
    for name, value in node_environment("learner-0", 1).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"run.yaml: colocated: .* it has 2 nodes"):
        checked_config(args)


def test_the_ranks_of_two_nodes_meet(tmp_path: Path) -> None:
    (tmp_path / "meeting.py").write_text(RANK)
    port = free_port()
    nodes = [
        subprocess.Popen(
            [sys.executable, "-c", AGENT, str(tmp_path)],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
                **node_environment(f"learner-{rank}", port),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            },
        )
        for rank in range(2)
    ]
    try:
        # Ranks that end without a signal to their agent must start again.
        assert [node.wait(timeout=120) for node in nodes] == [1, 1]
    finally:
        for node in nodes:
            node.kill()
    for rank in range(2):
        assert json.loads((tmp_path / f"rank{rank}").read_text()) == [0, 1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_that_waits_for_others_ends_when_told(tmp_path: Path, rank: int) -> None:
    """As process 1 of a container it would not: the kernel drops signals without a handler there."""
    nodes = node_environment(str(rank), free_port())
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-c", AGENT, str(tmp_path)],
        env={**os.environ, **nodes, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as agent:
        try:
            assert agent.stdout is not None
            assert any("waits for the other nodes" in line for line in agent.stdout)
            agent.terminate()
            assert agent.wait(timeout=60) == 0
        finally:
            agent.kill()


@pytest.mark.heavy
def test_ranks_have_drain_s_to_save(tmp_path: Path) -> None:
    """However long it is; on one node."""
    (tmp_path / "meeting.py").write_text(SLOW_RANK)
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-c", AGENT, str(tmp_path)], env={**os.environ, "PYTHONPATH": paths}
    ) as agent:
        wait_for(tmp_path / "started", agent)
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(timeout=200) == 0
    assert (tmp_path / "saved").exists()


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(("agent", "exit_code"), [("parent", 0), ("dead", -signal.SIGKILL)])
def test_a_rank_lives_as_long_as_its_agent_whatever_id_that_has(agent: str, exit_code: int) -> None:
    """In a container the agent has the id 1."""
    run = "import os; os.getppid = lambda: 1\n"
    run += "from tailrace_learner.adapters.rank_start import die_with_agent; die_with_agent()"
    environment = {**os.environ, AGENT_PID: "1" if agent == "parent" else str(os.getpid())}
    ended = subprocess.run([sys.executable, "-c", run], env=environment, check=False, timeout=120)
    assert ended.returncode == exit_code


JOINING = """
import time
from types import SimpleNamespace
from tailrace_learner.adapters import rank_start
def join(run, config):
    print("joining", flush=True)
    time.sleep(600)
rank_start._join = join
rank_start.join_ranks(SimpleNamespace(exp_name="x"), SimpleNamespace(num_threads=1), "learner")
"""


def test_a_rank_that_waits_for_the_first_one_ends_when_told() -> None:
    """The first one may have died of a user's mistake; torch's agent would wait 30 s for the others."""
    environment = {**os.environ, "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    with subprocess.Popen(
        [sys.executable, "-c", JOINING], env=environment, stdout=subprocess.PIPE, text=True
    ) as rank:
        try:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "joining\n"
            rank.terminate()
            assert rank.wait(timeout=60) == -signal.SIGTERM
        finally:
            rank.kill()
