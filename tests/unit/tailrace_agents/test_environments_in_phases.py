"""Every environment as agents play it: evaluation is fixed, at its own settings, with pictures."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest
from PIL import Image

from tailrace.channel.generation import Generation
from tailrace.chat import Renderer
from tailrace.config import EvaluationArgs, RunConfig
from tailrace.policy.activity import Stages
from tailrace.sdk.policy import TurnRequest
from tailrace.toolbox.byte_tokenizer import build_byte_tokenizer
from tailrace.tools import LocalTools
from tailrace_agents.adapters.player_factory import PlayerFactory
from tailrace_agents.config import AgentsConfig, EnvEntry, GeneratingArgs
from tailrace_agents.core.episode import EpisodeResult
from tailrace_agents.core.machine import EpisodePlayer
from tailrace_agents.core.token_policy import TokenModel
from tailrace_agents.ports import NoJournal
from tailrace_protos.episode import OVER_BUDGET, EnvTask, EpisodeTask, Outcome
from tailrace_protos.generation import SamplingParams
from tailrace_protos.weights import ModelCard
from tailrace_scheduler.core.tasks import TaskSource
from tests.unit.tailrace.policy.fakes import generation
from tests.unit.tailrace_envs.playing import KINDS, replies_of


class Careless:
    """Gives replies that the sampling seed fixes, and keeps how it was asked."""

    def __init__(self, renderer: Renderer, kind: str, always: str = "") -> None:
        self._always = always
        self._renderer = renderer
        self._kind = kind
        self.asked: list[SamplingParams] = []
        self.budgets: list[int] = []

    async def generate(self, request: TurnRequest) -> Generation:
        self.asked.append(request.sampling)
        self.budgets.append(request.max_new_tokens)
        seed = (request.sampling.seed or 0) + len(self.asked)
        reply = self._always or replies_of(self._kind, seed)[0]
        return generation(self._renderer.reply_ids(reply)[: request.max_new_tokens], 1)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder = build_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return Renderer.from_model_card(ModelCard(config_json=b"{}", tokenizer_files=files))


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


def player(
    kind: str,
    run_seed: int,
    policy: Careless,
    renderer: Renderer,
    threads: ThreadPoolExecutor,
    folder: Path,
) -> EpisodePlayer:
    """Player of the tag `it`."""
    config = AgentsConfig(
        custom_envs={"it": EnvEntry(env_type=kind, env_config=KINDS[kind][0])},
        generating_args=GeneratingArgs(temperature=1.0),
        eval_generating_args=GeneratingArgs(temperature=0.25, top_p=0.5),
        max_episode_tokens=1_000_000,
        render_episodes=1,
    )
    run = RunConfig(exp_name="a", seed=run_seed, render_save_dir=str(folder))
    factory = PlayerFactory(config, run, "run.yaml", threads, Stages())
    return factory.players(TokenModel(renderer, policy), LocalTools([]), lambda: False)["it"]


@pytest.mark.parametrize("kind", KINDS)
async def test_evaluation_is_fixed_has_its_own_sampling_and_leaves_pictures(
    kind: str, renderer: Renderer, threads: ThreadPoolExecutor, tmp_path: Path
) -> None:
    results: list[list[EpisodeResult]] = []
    for run_seed in (1, 2):
        policy = Careless(renderer, kind)
        plays = player(kind, run_seed, policy, renderer, threads, tmp_path / str(run_seed))
        source = TaskSource(run_seed, ["it"])
        tasks = [source.eval_task(0), source.eval_task(1), source.train_task(0)]
        played = []
        for number, task in enumerate(tasks):
            policy.asked.clear()
            phase = "train" if number == 2 else "eval"
            episode = EpisodeTask(f"g{number}.0", f"g{number}", 0, 0, phase, task, 2e10)
            played.append(await plays.play(episode, NoJournal()))
            wanted = (1.0, 1.0) if phase == "train" else (0.25, 0.5)
            assert {(asked.temperature, asked.top_p) for asked in policy.asked} == {wanted}
        results.append(played)
        animation = tmp_path / str(run_seed) / "it_seed000.gif"
        assert [path.name for path in (tmp_path / str(run_seed)).glob("*.gif")] == [animation.name]
        with Image.open(animation) as frames:
            assert frames.n_frames >= 1
    first, second = results
    for number in (0, 1):
        assert first[number].messages == second[number].messages
        assert first[number].metrics == second[number].metrics
    assert first[0].messages != first[1].messages
    assert first[2].messages[0] != second[2].messages[0]


async def test_a_named_evaluation_has_its_own_sampling(
    renderer: Renderer, threads: ThreadPoolExecutor
) -> None:
    config = AgentsConfig(
        custom_envs={"it": EnvEntry(env_type="frozen_lake", env_config={"max_turns": 4})},
        eval_generating_args=GeneratingArgs(temperature=0.25, top_p=0.5),
        max_episode_tokens=1_000_000,
        render_episodes=0,
    )
    named = {
        "greedy": EvaluationArgs(tag="it", temperature=0.0, max_new_tokens=3),
        "it": EvaluationArgs(top_p=0.75),
    }
    run = RunConfig(exp_name="a", evaluations=named)
    factory = PlayerFactory(config, run, "run.yaml", threads, Stages())
    seen = {}
    for name in ("greedy", "it", ""):
        policy = Careless(renderer, "frozen_lake")
        plays = factory.players(TokenModel(renderer, policy), LocalTools([]), lambda: False)["it"]
        task = EnvTask("it", 5, 5, evaluation=name)
        await plays.play(EpisodeTask("g.0", "g", 0, 0, "eval", task, 2e10), NoJournal())
        seen[name] = (policy.asked[0].temperature, policy.asked[0].top_p, policy.budgets[0])
    assert seen == {"greedy": (0.0, 0.5, 3), "it": (0.25, 0.75, 512), "": (0.25, 0.5, 512)}


async def test_an_environment_that_does_not_end_is_cut_off_and_keeps_its_rewards(
    renderer: Renderer, threads: ThreadPoolExecutor
) -> None:
    entry = EnvEntry(env_type="tests.unit.tailrace_agents.fakes:StairsEnv", max_turns=4)
    entry.env_config["max_turns"] = 1000
    config = AgentsConfig(custom_envs={"it": entry}, max_episode_tokens=1_000_000, render_episodes=0)
    factory = PlayerFactory(config, RunConfig(exp_name="a"), "run.yaml", threads, Stages())
    model = TokenModel(renderer, Careless(renderer, "frozen_lake", always="Left"))
    plays = factory.players(model, LocalTools([]), lambda: False)["it"]
    episode = EpisodeTask("g.0", "g", 0, 0, "train", EnvTask("it", 0), 2e10)
    result = await plays.play(episode, NoJournal())
    assert result.outcome is Outcome.POLICY_FAILURE
    assert result.reason == "max_turns: 4 model calls were made"
    assert result.transcript.turn_rewards == (0.25,) * 4
    assert result.metrics[OVER_BUDGET] == 1.0


PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "stop": (), "budget": 512}


@pytest.mark.parametrize("phase", ["train", "eval"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", 0.5),
        ("top_p", 0.5),
        ("top_k", 7),
        ("min_p", 0.1),
        ("stop", ("\n\n",)),
        ("max_new_tokens", 3),
        ("max_tokens_per_step", 2),
    ],
)
async def test_every_key_of_sampling_reaches_the_policy_in_its_phase(
    key: str,
    value: Any,
    phase: Literal["train", "eval"],
    renderer: Renderer,
    threads: ThreadPoolExecutor,
) -> None:
    of_step = {key: value} if key == "max_tokens_per_step" else {}
    of_phase = {} if of_step else {key: value}
    section = "generating_args" if phase == "train" else "eval_generating_args"
    lake = EnvEntry(env_type="frozen_lake", env_config={"max_turns": 4}, **of_step)
    config = AgentsConfig(
        custom_envs={"it": lake},
        max_episode_tokens=1_000_000,
        render_episodes=0,
        **{section: GeneratingArgs(**of_phase)},
    )
    factory = PlayerFactory(config, RunConfig(exp_name="a"), "run.yaml", threads, Stages())
    for played in ("train", "eval"):
        policy = Careless(renderer, "frozen_lake")
        plays = factory.players(TokenModel(renderer, policy), LocalTools([]), lambda: False)["it"]
        episode = EpisodeTask("g.0", "g", 0, 0, played, EnvTask("it", 5), 2e10)
        result = await plays.play(episode, NoJournal())
        first = policy.asked[0]
        seen = {name: getattr(first, name) for name in PLAIN if name != "budget"}
        seen["budget"] = policy.budgets[0]
        name = "budget" if key.startswith("max_") else key
        is_changed = played == phase or bool(of_step)
        assert seen == PLAIN | ({name: value} if is_changed else {})
        is_cut = is_changed and key == "max_new_tokens"
        assert (result.outcome is Outcome.POLICY_FAILURE) == is_cut
