"""A real OpenEnv server, played over its WebSocket."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tailrace_envs import make_env

pytest.importorskip("openenv.core", reason="make test-envs runs these in their own environment")

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app

AWAKE = threading.Event()  # what slow steps wait for


class Say(Action):
    message: str
    tone: str = "plain"


class Heard(Observation):
    text: str


class Counter(Environment[Say, Heard, State]):
    """Counting from the seed: the next number has reward 0.5, three numbers end the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Heard:
        self.number = (seed or 0) + kwargs.get("skip", 0)
        self.end = self.number + 2
        return Heard(text=f"{self.number}?", done=False, reward=None)

    def step(self, action: Say, timeout_s: float | None = None, **kwargs: Any) -> Heard:
        if action.tone == "slow":
            AWAKE.wait(60)
        is_next = action.message == str(self.number + 1)
        self.number += is_next
        done = self.number == self.end
        return Heard(text=f"{self.number}? ({action.tone})", done=done, reward=0.5 * is_next)

    @property
    def state(self) -> State:
        return State(episode_id="one", step_count=0)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    app = create_app(Counter, Say, Heard, env_name="counter", max_concurrent_envs=4)
    listener = socket.create_server(("127.0.0.1", 0))  # clients wait in its queue until it serves
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(timeout=60)


def test_an_episode_is_played_at_the_server(url: str) -> None:
    env = make_env("openenv", {"base_url": url, "observation_field": "text", "action": {"tone": "low"}})
    assert env.reset(seed=5)[0] == "5?"
    assert env.step("6")[:4] == ("6? (low)", 0.5, False, False)
    assert env.step("9")[:2] == ("6? (low)", 0.0)
    _, reward, terminated, _, info = env.step("7")
    assert (reward, terminated, info["success"]) == (0.5, True, 1.0)
    assert env.reset(seed=5)[0] == "5?"
    env.close()


def test_instances_have_sessions_of_their_own(url: str) -> None:
    one, other = (make_env("openenv", {"base_url": url, "observation_field": "text"}) for _ in range(2))
    one.reset(seed=1)
    other.reset(seed=7)
    assert one.step("2")[0] == "2? (plain)"
    assert other.step("8")[0] == "8? (plain)"
    one.close()
    other.close()


def test_without_a_field_the_model_reads_the_whole_observation(url: str) -> None:
    env = make_env("openenv", {"base_url": url, "reset": {"skip": 10}, "max_turns": 1})
    assert '"text": "11?"' in env.reset(seed=1)[0]
    assert env.step("0")[2:4] == (False, True)
    env.close()


def test_functions_of_the_user_translate(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "translation", sys.modules[__name__])
    env = make_env(
        "openenv",
        {"base_url": url, "to_text": "translation:shout", "to_action": "translation:whisper"},
    )
    assert env.reset(seed=1)[0] == "1?!"
    assert env.step(" 2 ")[0] == "2? (soft)!"
    env.close()


def shout(observation: dict[str, Any]) -> str:
    return f"{observation['text']}!"


def whisper(reply: str) -> dict[str, Any]:
    return {"message": reply.strip(), "tone": "soft"}


def test_a_field_that_is_not_there_is_named(url: str) -> None:
    env = make_env("openenv", {"base_url": url, "observation_field": "txt"})
    with pytest.raises(KeyError, match=r"has no 'txt' .*text"):
        env.reset(seed=1)
    env.close()


def test_a_server_that_is_not_there_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        env = make_env("openenv", {"base_url": f"http://127.0.0.1:{taken.getsockname()[1]}"})
        with pytest.raises(ConnectionError):
            env.reset(seed=0)


def test_texts_limits_and_what_counts_as_success_are_keys(url: str) -> None:
    config = {
        "base_url": url,
        "instructions": "Count! ",
        "observation_field": "text",
        "action_field": "tone",
        "action": {"message": "2"},
        "success_return": 0.5,
        "max_turns": 1,
    }
    env = make_env("openenv", config)
    assert env.reset(seed=1)[0] == "Count! 1?"
    observation, reward, terminated, truncated, info = env.step("loud")
    assert (observation, reward, terminated, truncated) == ("2? (loud)", 0.5, False, True)
    assert info["success"] == 1.0
    env.close()


def test_a_server_that_does_not_answer_in_time_is_an_error(url: str) -> None:
    AWAKE.clear()
    env = make_env("openenv", {"base_url": url, "message_timeout_s": 3.0, "action": {"tone": "slow"}})
    env.reset(seed=1)
    with pytest.raises(TimeoutError):
        env.step("2")
    AWAKE.set()


def test_a_server_that_does_not_greet_in_time_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        env = make_env("openenv", {"base_url": url, "connect_timeout_s": 0.2})
        with pytest.raises((TimeoutError, ConnectionError)):
            env.reset(seed=1)


def test_an_address_without_a_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="base_url must begin"):
        make_env("openenv", {"base_url": "localhost:8000"})
