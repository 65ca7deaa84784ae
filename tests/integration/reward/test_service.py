"""The reward service over real NATS."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tailrace.bus import Bus
from tailrace.config import ConfigError, Endpoints
from tailrace_protos import subjects
from tailrace_protos.chat import ChatMessage
from tailrace_protos.episode import EnvTask
from tailrace_protos.reward import ScoreItem, ScoreReply, ScoreRequest
from tailrace_reward.__main__ import build
from tests.world.processes import ServiceProcess, environment
from tests.world.servers import ServerProcess
from tests.world.serving import endpoints_of, load_args, serving

MODULE = """
def brevity(task, messages, metrics):
    return -sum(len(m.content) for m in messages) / 10

def stuck_on_odd(task, messages, metrics):
    while task.seed % 2:
        pass
    return 1.0
"""


@pytest.fixture(autouse=True)
def module(user_module: Callable[[str, str], str]) -> None:
    user_module("own_rewards", MODULE)


def experiment_file(folder: Path, run: str, *rewards: dict[str, object]) -> Path:
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump({"exp_name": run, "reward": {"rewards": list(rewards)}}))
    return path


def item(seed: int) -> ScoreItem:
    messages = (ChatMessage("user", "12345"), ChatMessage("assistant", "12345"))
    return ScoreItem(f"g{seed}.0", EnvTask("lake", seed), messages, (0.5, 0.5), {})


async def test_environment_return_and_functions_are_summed_by_weight(
    bus: Bus, nats_server: ServerProcess, run_name: str, tmp_path: Path
) -> None:
    path = experiment_file(
        tmp_path,
        run_name,
        {"name": "env"},
        {"name": "brief", "kind": "function", "function": "own_rewards:brevity", "weight": 0.1},
    )
    async with serving(await build(load_args(path, "r0", endpoints_of(nats_server.url)))):
        reply = await bus.request(
            subjects.score(run_name), ScoreRequest((item(1), item(2))), ScoreReply, timeout_s=60
        )
    assert [score.episode_id for score in reply.scores] == ["g1.0", "g2.0"]
    assert [score.reward for score in reply.scores] == pytest.approx([0.9, 0.9])
    assert reply.scores[0].components == {"env": 1.0, "brief": -1.0}


async def test_an_item_that_hangs_is_an_error_beside_the_scores_of_the_others(
    bus: Bus, nats_server: ServerProcess, run_name: str, tmp_path: Path
) -> None:
    hanging = {
        "name": "h",
        "kind": "function",
        "function": "own_rewards:stuck_on_odd",
        "timeout_s": 4.0,
    }
    path = experiment_file(tmp_path, run_name, hanging)
    async with serving(await build(load_args(path, "r0", endpoints_of(nats_server.url)))):
        items = tuple(item(seed) for seed in (0, 1, 2, 4))
        reply = await bus.request(
            subjects.score(run_name), ScoreRequest(items), ScoreReply, timeout_s=60
        )
    assert [score.error is None for score in reply.scores] == [True, False, True, True]
    assert reply.scores[1].error is not None
    assert "took more than 4 s" in reply.scores[1].error.reason


async def test_a_function_that_is_not_there_is_named_with_its_key_and_remedy(
    nats_server: ServerProcess, run_name: str, tmp_path: Path
) -> None:
    entries = [{"name": "env"}, {"name": "x", "kind": "function", "function": "own_rewards:absent"}]
    path = experiment_file(tmp_path, run_name, *entries)
    with pytest.raises(
        ConfigError, match=r"reward\.rewards\[1\]\.function 'own_rewards:absent'"
    ) as caught:
        await build(load_args(path, "r0", endpoints_of(nats_server.url)))
    assert "has no function absent" in str(caught.value)
    assert "experiment.yaml" in str(caught.value)


def test_a_users_mistake_is_exit_code_2_without_a_traceback(
    endpoints: Endpoints, run_name: str, tmp_path: Path
) -> None:
    path = experiment_file(tmp_path, run_name, {"name": "env", "kind": "functions"})
    process = ServiceProcess("reward", path, environment(endpoints, tmp_path), tmp_path / "log")
    process.start()
    assert process.ended() == 2
    assert "reward.rewards" in process.log
    assert "Traceback" not in process.log
