"""Environments of the real package verifiers, one reply at a time."""

from __future__ import annotations

import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tailrace.config import ConfigError
from tailrace_envs import make_env

pytest.importorskip("verifiers.clients", reason="make test-envs runs these in their own environment")

from tailrace_envs.published import verifiers_rollout

MODULE = '''
import verifiers as vf
from datasets import Dataset


def rows(numbers):
    rows = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in numbers]
    return Dataset.from_list(rows)


def is_right(completion, answer):
    return float(answer in completion[-1]["content"])


class Guess(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["num_wrong"] = 0
        return state

    @vf.stop
    async def is_solved(self, state):
        steps = state["trajectory"]
        return bool(steps) and state["answer"] in steps[-1]["completion"][-1]["content"]

    async def env_response(self, messages, state):
        state["num_wrong"] += 1
        return [{"role": "user", "content": f"Wrong, for the time number {state['num_wrong']}."}]


class Tidy(Guess):
    async def get_prompt_messages(self, state):
        messages = await super().get_prompt_messages(state)
        return messages[-1:]


def wrong_guesses(state):
    return float(state["num_wrong"])


def load_environment(kind="single", num_rows=3, num_eval_rows=3):
    data = {"dataset": rows(range(num_rows))}
    if num_eval_rows:
        data["eval_dataset"] = rows(range(100, 100 + num_eval_rows))
    data["system_prompt"] = "Answer with a number."
    rubric = vf.Rubric(funcs=[is_right])
    if kind == "single":
        return vf.SingleTurnEnv(rubric=rubric, **data)
    if kind == "tools":
        def add(a: int, b: int) -> int:
            """Add."""
            return a + b
        return vf.ToolEnv(tools=[add], rubric=rubric, **data)
    rubric = vf.Rubric(funcs=[is_right, wrong_guesses], weights=[1.0, 0.0])
    return (Tidy if kind == "tidy" else Guess)(rubric=rubric, max_turns=3, **data)
'''


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("environments")
    (folder / "doubling_env.py").write_text(textwrap.dedent(MODULE))
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


def config(**options: object) -> dict[str, object]:
    kind = options.pop("kind", "single")
    return {"env_id": "doubling-env", "env_args": {"kind": kind}, **options}


def test_a_single_turn_environment_asks_once_and_scores_the_reply() -> None:
    env = make_env("verifiers", config())
    observation, _ = env.reset(seed=1)
    assert observation == "Answer with a number.\n\nWhat is 1 + 1?"
    _, reward, terminated, truncated, info = env.step("It is 2.")
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert info["success"] == 1.0
    env.reset(seed=1)
    assert env.step("It is 3.")[1] == 0.0


def test_a_multi_turn_environment_goes_on_until_it_is_satisfied() -> None:
    env = make_env("verifiers", config(kind="multi"))
    env.reset(seed=2)
    observation, reward, terminated, _, _ = env.step("5")
    assert (observation, reward, terminated) == ("Wrong, for the time number 1.", 0.0, False)
    _, reward, terminated, _, info = env.step("4")
    assert (reward, terminated) == (1.0, True)
    assert info["wrong_guesses"] == 1.0
    assert info["num_turns"] == 2.0


def test_its_own_limit_of_turns_ends_the_episode() -> None:
    env = make_env("verifiers", config(kind="multi"))
    env.reset(seed=0)
    endings = [env.step("9")[2] for _ in range(3)]
    assert endings == [False, False, True]


def test_our_limit_of_turns_and_what_counts_as_success_are_keys() -> None:
    env = make_env("verifiers", config(kind="multi", max_turns=1))
    env.reset(seed=0)
    assert env.step("9")[2:4] == (False, True)
    env.close()
    for wanted, success in ((1.0, 0.0), (0.0, 1.0)):
        env = make_env("verifiers", config(success_reward=wanted))
        env.reset(seed=1)
        assert env.step("wrong")[4]["success"] == success


def test_held_out_rows_come_from_the_data_set_for_evaluation_and_repeat() -> None:
    env = make_env("verifiers", config(split="held_out"))
    asked = [env.reset(seed=seed)[0].partition("\n\n")[2] for seed in range(4)]
    assert asked == ["What is 100 + 100?", "What is 101 + 101?", "What is 102 + 102?", asked[0]]


def test_rows_that_are_trained_are_never_played_as_held_out() -> None:
    alone = {"env_id": "doubling-env", "env_args": {"num_eval_rows": 0}}
    assert make_env("verifiers", alone).reset(seed=1)[0].endswith("What is 1 + 1?")
    with pytest.raises(ConfigError, match=r"'doubling-env' has no data set for evaluation.*env_args"):
        make_env("verifiers", {**alone, "split": "held_out"})


def test_episodes_at_the_same_time_do_not_disturb_each_other() -> None:
    one, other = (make_env("verifiers", config(kind="multi")) for _ in range(2))
    one.reset(seed=1)
    other.reset(seed=2)
    assert not one.step("9")[2]
    assert other.step("4")[1] == 1.0
    assert one.step("2")[1] == 1.0


def test_an_episode_may_be_left_for_another() -> None:
    env = make_env("verifiers", config(kind="multi"))
    env.reset(seed=1)
    env.step("9")
    assert env.reset(seed=2)[0].endswith("What is 2 + 2?")
    assert env.step("4")[4]["wrong_guesses"] == 0.0
    env.close()


def test_an_environment_with_tools_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"offers tools .* workflow"):
        make_env("verifiers", config(kind="tools"))


def test_an_environment_that_rewrites_messages_is_named() -> None:
    env = make_env("verifiers", config(kind="tidy"))
    env.reset(seed=1)
    with pytest.raises(RuntimeError, match="rewrote earlier messages"):
        env.step("9")
    env.close()


def test_an_environment_that_is_not_installed_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no-such-env.*install it"):
        make_env("verifiers", {"env_id": "no-such-env"})


def test_episodes_that_begin_at_the_same_time_share_one_event_loop() -> None:
    """A reply that another loop hands over does not wake the rollout that waits for it."""
    verifiers_rollout._started_loop.cache_clear()
    begins = threading.Barrier(16)

    def found(_: int) -> object:
        begins.wait(30)
        return verifiers_rollout.event_loop()

    with ThreadPoolExecutor(16) as threads:
        assert len(set(threads.map(found, range(16)))) == 1
