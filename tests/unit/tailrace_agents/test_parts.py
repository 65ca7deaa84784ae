"""The smaller parts: environments in use, settlement, estimates, seeds, when a journal is read."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tailrace.config import ConfigError
from tailrace.foreign import ForeignCodeError
from tailrace.policy.activity import Stages
from tailrace.runtime import Delivery
from tailrace.sdk import AgentLoop
from tailrace_agents.__main__ import check_length
from tailrace_agents.adapters.pictures import FrameRecorder
from tailrace_agents.config import AgentsConfig, EnvEntry, GeneratingArgs
from tailrace_agents.core.environments import EnvHandle, EnvPool, StepResult
from tailrace_agents.core.episode import EpisodeResult, mix_seed
from tailrace_agents.core.loops import agent_loops
from tailrace_agents.core.settlement import apply_score, build_trajectory, score_item
from tailrace_agents.handlers import _may_have_records
from tailrace_protos.base import decode, encode
from tailrace_protos.episode import EnvTask, EpisodeTask, Outcome, StageSeconds
from tailrace_protos.generation import CallError, CallErrorCode
from tailrace_protos.reward import Score
from tailrace_protos.weights import ModelCard
from tests.unit.tailrace_agents.fakes import StairsEnv


def task(attempt: int = 0) -> EpisodeTask:
    return EpisodeTask("g7.1", "g7", 1, attempt, "train", EnvTask("stairs", 5), 0.0)


def delivery(message_id: str, num_delivered: int = 1) -> Delivery:
    return Delivery("subject", 3, 0, num_delivered, message_id, "reply")


@pytest.mark.parametrize(
    ("attempt", "message_id", "num_delivered", "expected"),
    [
        (0, "run.g7.1.0", 1, False),
        (0, "run.g7.1.0", 2, True),  # its worker died
        (1, "run.g7.1.1", 1, True),  # the scheduler sent it again
        (0, "run.g7.1.0.33", 1, True),  # a copy that a draining worker made
        (0, "", 1, True),
    ],
)
def test_a_journal_is_read_unless_this_is_certainly_the_first_try(
    attempt: int, message_id: str, num_delivered: int, expected: bool
) -> None:
    assert _may_have_records(task(attempt), delivery(message_id, num_delivered)) is expected


def test_a_trajectory_tells_how_long_its_task_waited_for_a_server_with_room() -> None:
    result = EpisodeResult(Outcome.OK, stages=StageSeconds(1.0, 2.0, 3.0))
    waited = msgspec.structs.replace(task(), room_wait_s=4.0)
    stages = build_trajectory(waited, result, (), 0.0, 1.0, 2.0).stages
    assert stages == StageSeconds(1.0, 2.0, 3.0, room_s=4.0)


def test_idle_environments_are_used_again_up_to_a_number() -> None:
    made: list[StairsEnv] = []

    def make() -> StairsEnv:
        made.append(StairsEnv())
        return made[-1]

    pool = EnvPool(make, max_idle=1)
    first, second = pool.take(), pool.take()
    pool.give_back(first)
    pool.give_back(second)
    assert pool.take() is first
    assert [env.num_closes for env in made] == [0, 1]


def test_an_environment_that_cannot_be_made_or_closed_is_foreign_code() -> None:
    def make() -> StairsEnv:
        raise OSError("no display")

    with pytest.raises(ForeignCodeError, match="making the environment raised OSError"):
        EnvPool(make).take()
    env = StairsEnv()
    env.close = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(ForeignCodeError, match=r"env\.close raised ZeroDivisionError"):
        EnvHandle(env).close()


def test_an_environment_that_exits_while_it_is_made_ends_no_worker() -> None:
    def exits() -> Any:
        raise SystemExit(0)

    with pytest.raises(ForeignCodeError, match=r"making the environment .* \(SystemExit\(0\)\)"):
        EnvPool(exits).take()


async def test_numbers_of_numpy_are_numbers_too() -> None:
    env = StairsEnv()
    info = {
        "success": np.bool_(True),
        "height": np.float32(0.5),
        "steps": np.int64(3),
        "name": "a",
        "board": np.zeros(3),
    }
    env.step = lambda action: ("", np.float32(1.0), np.bool_(True), np.bool_(False), info)  # type: ignore[method-assign,assignment]
    answer = await EnvHandle(env).step("up")
    assert answer.numbers == {"success": 1.0, "height": 0.5, "steps": 3.0}


async def test_an_answer_is_made_fit_to_be_sent() -> None:
    env = StairsEnv()
    info = {1: 2.0, "\ud800": 3, "speed": 10**400}
    env.step = lambda action: (np.str_("up \ud800"), 1, True, False, info)  # type: ignore[method-assign,assignment]
    answer = await EnvHandle(env).step("up")
    assert decode(encode(answer), StepResult) == answer
    assert answer.observation == "up ?"
    assert answer.numbers == {"1": 2.0, "?": 3.0, "speed": math.inf}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("ok", "found str"),
        (("", 1.0, True), "found tuple of 3"),
        (("", "1", True, False, {}), "rewards must be finite numbers, found str"),
        (("", None, True, False, {}), "rewards must be numbers, found NoneType"),
        (("", 10**400, True, False, {}), "rewards must be finite numbers, found inf"),
        (("", 1.0, True, False, None), "info"),
    ],
)
async def test_an_answer_of_another_form_is_told(answer: object, said: str) -> None:
    env = StairsEnv()
    env.step = lambda action: answer  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(ForeignCodeError, match=said):
        await EnvHandle(env).step("up")


async def test_an_environment_busy_in_a_thread_is_closed_when_its_call_returns() -> None:
    entered, leave, closed = threading.Event(), threading.Event(), threading.Event()

    class Slow(StairsEnv):
        def reset(self, **names: Any) -> Any:
            entered.set()
            leave.wait(60)
            return super().reset(**names)

        def close(self) -> None:
            assert leave.is_set()
            closed.set()

    stages = Stages()
    with ThreadPoolExecutor(1) as threads:
        handle = EnvHandle(Slow(), threads, stages)
        reset = handle.reset(0)
        reset.send(None)  # runs up to the thread's call
        assert entered.wait(60)
        assert stages.num_in_tools == 1
        reset.close()  # as a deadline would
        assert stages.num_in_tools == 0
        handle.close()
        assert not closed.is_set()
        leave.set()
    assert closed.is_set()


def test_a_failed_score_makes_the_episode_an_infrastructure_failure_without_reward() -> None:
    result = EpisodeResult()
    error = CallError(CallErrorCode.INTERNAL, "m:f took more than 1 s")
    assert apply_score(result, Score("g7.1", 5.0, error=error)) == 0.0
    assert result.outcome is Outcome.INFRA_FAILURE
    assert "m:f took more than 1 s" in result.reason


def test_components_become_metrics_beside_the_environments() -> None:
    result = EpisodeResult(metrics={"success": 1.0})
    assert apply_score(result, Score("g7.1", 1.5, {"env": 1.0, "style": 0.5})) == 1.5
    assert result.metrics == {"success": 1.0, "reward/env": 1.0, "reward/style": 0.5}
    assert score_item(task(), result).turn_rewards == ()


@given(st.lists(st.integers(0, 2**63), min_size=1, max_size=3), st.integers(0, 2))
def test_a_seed_depends_on_every_part(parts: list[int], place: int) -> None:
    seed = mix_seed(*parts)
    assert 0 <= seed < 2**63
    assert seed == mix_seed(*parts)
    changed = list(parts)
    changed[place % len(parts)] += 1
    assert mix_seed(*changed) != seed


async def test_an_environment_that_cannot_draw_itself_leaves_no_picture(tmp_path: Any) -> None:
    class Blind(StairsEnv):
        def render(self) -> Any:
            raise RuntimeError("no pygame")

    recorder = FrameRecorder(Blind(), tmp_path, "blind")
    recorder.on_reset("")
    recorder.on_turn("", "", 0.0, True)
    await recorder.save()
    assert list(tmp_path.iterdir()) == []


async def test_an_environment_of_words_leaves_pictures_of_them(tmp_path: Any) -> None:
    class Wordy(StairsEnv):
        def render(self) -> Any:
            return self.view() + "word " * 300

    recorder = FrameRecorder(env := Wordy(), tmp_path, "wordy")
    env.reset(seed=0)
    recorder.on_reset("")
    env.step("Right")
    recorder.on_turn("", "", 0.0, True)
    await recorder.save()
    with Image.open(tmp_path / "wordy.gif") as animation:
        assert animation.n_frames == 2
        assert animation.convert("L").getextrema()[0] < 128 < animation.convert("L").getextrema()[1]


async def test_a_folder_that_cannot_be_written_is_no_failure_of_the_episode(tmp_path: Any) -> None:
    (tmp_path / "file").write_text("")
    recorder = FrameRecorder(StairsEnv(), tmp_path / "file" / "renders", "stairs")
    recorder.on_reset("")
    await recorder.save()
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: GeneratingArgs(top_p=1.5), "top_p"),
        (lambda: GeneratingArgs(temperature=-1), "temperature"),
        (lambda: GeneratingArgs(max_new_tokens=0), "max_new_tokens"),
        (lambda: GeneratingArgs(stop=("\n", "")), "stop holds an empty text"),
        (lambda: EnvEntry(env_type="x", max_tokens_per_step=0), "max_tokens_per_step"),
        (lambda: EnvEntry(env_type="x", max_turns=0), "max_turns"),
        (lambda: AgentsConfig(max_concurrent_episodes=0), "max_concurrent_episodes"),
        (lambda: AgentsConfig(reward_timeout_s=0), "reward_timeout_s"),
        (lambda: AgentsConfig(render_episodes=-1), "render_episodes"),
        (lambda: AgentsConfig(keep_episodes=-1), "keep_episodes"),
        (lambda: AgentsConfig(tool_schemas={"add": "1234"}), r"tool_schemas\.add: .*tailrace tools ls"),
    ],
)
def test_an_impossible_configuration_names_its_key(make: Any, key: str) -> None:
    with pytest.raises(ValueError, match=key):
        make()


@pytest.mark.parametrize(
    ("config_json", "is_refused"),
    [
        (b'{"max_position_embeddings": 100}', True),
        (b'{"text_config": {"max_position_embeddings": 100}}', True),
        (b'{"n_positions": 100}', True),
        (b'{"max_position_embeddings": 101}', False),
        (b'{"model_type": "mamba"}', False),
    ],
)
def test_episodes_longer_than_the_models_context_are_refused(
    config_json: bytes, is_refused: bool
) -> None:
    config, card = AgentsConfig(max_episode_tokens=101), ModelCard(config_json, {})
    if not is_refused:
        check_length(config, card)
        return
    with pytest.raises(ConfigError, match=r"max_episode_tokens \(101\) .* context of 100 tokens"):
        check_length(config, card)


def test_evaluations_have_a_bound_of_their_own_where_one_is_given() -> None:
    both = AgentsConfig(max_concurrent_episodes=8)
    assert (both.max_in_flight("train"), both.max_in_flight("eval")) == (8, 8)
    own = AgentsConfig(max_concurrent_episodes=8, max_concurrent_eval_episodes=3)
    assert (own.max_in_flight("train"), own.max_in_flight("eval")) == (8, 3)
    with pytest.raises(ValueError, match="max_concurrent_eval_episodes"):
        AgentsConfig(max_concurrent_eval_episodes=0)


def again(run: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that is no coroutine function itself."""

    @wraps(run)
    def made(*args: Any) -> Any:
        return run(*args)

    return made


class Decorated(AgentLoop):
    """Loop whose `run` a decorator wraps."""

    @again
    async def run(self, row: Any, policy: Any) -> float:
        return 1.0


class Blocking(AgentLoop):
    """Loop that cannot be awaited."""

    def run(self, row: Any, policy: Any) -> float:  # type: ignore[override]
        return 1.0


def test_a_loop_may_be_decorated_but_has_to_be_async() -> None:
    assert agent_loops({"mine": f"{__name__}:Decorated"}, "loops")["mine"] is Decorated
    with pytest.raises(ConfigError, match="its run is not async"):
        agent_loops({"mine": f"{__name__}:Blocking"}, "loops")
