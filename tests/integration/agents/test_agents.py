"""Agents processes from the work queue to the trajectory buffer, over everything that kills them."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from PIL import Image

from tailrace import tracing
from tailrace.config import ConfigError, RunConfig, TracingArgs
from tailrace.tracing import FinishedSpan, Sink
from tailrace_agents.adapters.kept_episodes import KeptEpisode
from tailrace_protos import subjects
from tailrace_protos.base import as_float32, as_int32, as_uint8
from tailrace_protos.control import EpisodesStopped
from tailrace_protos.episode import Outcome
from tests.provenance import versions_of
from tests.world.agents import AgentsWorld, num_turns_in, sampled_of, seeds_of_long_episodes
from tests.world.samples import sample
from tests.world.serving import eventually, eventually_async


@pytest.mark.parametrize("transport", ["zmq", "nats"])
async def test_queued_episodes_become_scored_trajectories_of_emitted_tokens(
    world: AgentsWorld, transport: str
) -> None:
    servers = [await world.start_server("s0", 3), await world.start_server("s1", 4)]
    await world.start_agents(transport=transport)
    tasks = await world.admit(num_groups=10, group_size=4)
    settled = await world.settled(len(tasks))
    trajectories = await world.trajectories(10)
    assert set(trajectories) == set(settled) == {task.episode_id for task in tasks}
    assert {event.outcome for event in settled.values()} == {Outcome.OK}
    for episode_id, trajectory in trajectories.items():
        emitted = next(server.emitted[episode_id] for server in servers if server.emitted[episode_id])
        version = next(server.policy_version for server in servers if server.emitted[episode_id])
        assert sampled_of(trajectory) == [token for _, ids in emitted for token in ids]
        (row,) = trajectory.rows
        mask = as_uint8(row.loss_mask).astype(bool)
        assert set(versions_of(row.spans)) == {version}
        assert set(as_float32(row.inference_logprobs)[mask]) == {-0.125 * version}
        assert trajectory.reward == row.reward == pytest.approx(as_float32(row.turn_rewards).sum())
        assert trajectory.metrics["success"] == trajectory.reward
        assert as_int32(row.turn_ends)[-1] == len(as_int32(row.token_ids))
    assert len(world.scheduler.requests) < len(tasks)  # episodes of one moment ask together
    await eventually(lambda: world.scheduler.released == set(trajectories))
    assert sum(sum(report.successes.values()) for report in world.scheduler.reports) == sum(
        len(server.requests) for server in servers
    )


async def test_a_killed_worker_loses_only_the_turn_it_was_in(world: AgentsWorld) -> None:
    server = await world.start_server("s0", 1)
    server.hold_from_turn = 2
    first = world.spawn_agents("w0")
    tasks = await world.admit(num_groups=3, seeds=seeds_of_long_episodes(3, num_turns=3))
    await eventually(lambda: server.num_held == len(tasks))
    first.kill()
    num_before = len(server.requests)
    server.hold_from_turn = None
    server.policy_version = 2
    await world.start_agents("w1")
    settled = await world.settled(len(tasks))
    resumed = server.requests[num_before:]
    assert min(num_turns_in(request, world.renderer) for request in resumed) == 2
    assert {event.num_turns for event in settled.values()} <= {3, 4}
    for trajectory in (await world.trajectories(3)).values():
        (row,) = trajectory.rows
        versions = np.full(len(row.loss_mask), -1)
        versions[as_uint8(row.loss_mask) == 1] = versions_of(row.spans)
        ends = as_int32(row.turn_ends)
        mask = as_uint8(row.loss_mask).astype(bool)
        assert set(versions[: ends[1]][mask[: ends[1]]]) == {1}  # replayed as they were sampled
        assert set(versions[ends[1] :][mask[ends[1] :]]) == {2}


async def test_a_draining_worker_exits_cleanly_and_hands_its_episodes_over(world: AgentsWorld) -> None:
    server = await world.start_server("s0", 1)
    server.hold_from_turn = 1
    first = world.spawn_agents("w0", drain_s=1.0)
    tasks = await world.admit(num_groups=3, seeds=seeds_of_long_episodes(3, num_turns=2))
    await eventually(lambda: server.num_held == len(tasks))
    first.running.send_signal(signal.SIGTERM)
    assert await first.ended_async() == 0, first.log
    server.hold_from_turn = None
    num_before = len(server.requests)
    await world.start_agents("w1")
    settled = await world.settled(len(tasks))
    assert {event.outcome for event in settled.values()} == {Outcome.OK}
    assert all(num_turns_in(request, world.renderer) >= 1 for request in server.requests[num_before:])
    await eventually(lambda: world.scheduler.released == set(settled))


async def test_a_turn_whose_server_dies_is_continued_on_another(world: AgentsWorld) -> None:
    dying = await world.start_server("s0", 1)
    dying.stop_after_tokens = 1
    await world.start_agents()
    (task,) = await world.admit(num_groups=1, group_size=1)
    await eventually(lambda: bool(dying.emitted[task.episode_id]))
    other = await world.start_server("s1", 2)
    await world.stop_server("s0")
    (event,) = (await world.settled(1)).values()
    assert event.outcome is Outcome.OK
    continued = other.requests[0]
    ((_, first_token),) = dying.emitted[task.episode_id]
    assert continued.num_continued == 1
    assert as_int32(continued.prompt_ids)[-1:].tolist() == first_token
    (trajectory,) = (await world.trajectories(1)).values()
    emitted = first_token + [token for _, ids in other.emitted[task.episode_id] for token in ids]
    assert sampled_of(trajectory) == emitted
    assert (event.min_policy_version, event.max_policy_version) == (1, 2)


@pytest.fixture
def spans(world: AgentsWorld) -> Iterator[list[FinishedSpan]]:
    """Spans of all episodes of this run, of workers in this process."""
    found: list[FinishedSpan] = []
    args = TracingArgs(mlflow="sqlite://", sample_rate=1.0)
    tracing.configure(RunConfig(exp_name=world.run, tracing=args), "agents", "a")
    tracing.add_sink(Sink(found.append, lambda: None))
    yield found
    tracing.close()


async def test_an_episode_whose_group_closed_stops_at_once_with_its_turn_at_the_engine(
    world: AgentsWorld, spans: list[FinishedSpan]
) -> None:
    server = await world.start_server("s0", 1)
    server.hold_from_turn = 1
    await world.start_agents()
    tasks = await world.admit(num_groups=2, group_size=1, seeds=seeds_of_long_episodes(2, num_turns=2))
    await eventually(lambda: server.num_held == 2)
    stopped, other = (task.episode_id for task in tasks)
    bus, run = world.service.bus, world.run
    await world.buffer.cancel_members(tasks[0].group_id, [0], Outcome.CANCELLED, "closed without it")
    await bus.publish(subjects.episodes_stopped(run), EpisodesStopped((stopped, "unknown.0"), "closed"))
    await eventually(lambda: server.num_held == 1)
    await eventually(lambda: world.scheduler.released == {stopped})

    async def is_acknowledged() -> bool:
        info = await bus.jetstream.stream_info(subjects.episodes_stream(run))
        return bool(info.state.messages == 1)

    await eventually_async(is_acknowledged)
    server.release()
    assert (await world.settled(2))[other].outcome is Outcome.OK
    assert sample("tailrace_agents_episodes_abandoned_total", why="stopped") >= 1
    plays = {span.attributes["episode_id"]: span for span in spans if span.name == "play"}
    assert plays[stopped].attributes["abandoned"] == "stopped"
    assert plays[other].attributes["outcome"] == "ok"
    assert {request.episode_id for request in server.requests[4:]} == {other}, (
        "two turns of each before"
    )


async def test_an_unknown_environment_fails_its_own_episodes_only(world: AgentsWorld) -> None:
    await world.start_server("s0")
    await world.start_agents()
    await world.admit(num_groups=1, group_size=2)
    await world.admit(num_groups=1, group_size=1, first=5, env_name="lakes")
    settled = await world.settled(3)
    outcomes = {episode_id: event.outcome for episode_id, event in settled.items()}
    assert outcomes["train-5.0"] is Outcome.INFRA_FAILURE
    assert "custom_envs" in settled["train-5.0"].reason
    assert outcomes["train-0.0"] is outcomes["train-0.1"] is Outcome.OK


async def test_an_episode_without_servers_times_out_at_its_deadline(world: AgentsWorld) -> None:
    await world.start_agents()
    await world.admit(num_groups=1, group_size=1, deadline_s=1.0, timeout_s=1.0)
    (event,) = (await world.settled(1)).values()
    assert event.outcome is Outcome.TIMEOUT
    assert not event.outcome.is_valid


async def test_an_episode_whose_message_outlasted_its_deadline_has_all_its_time(
    world: AgentsWorld,
) -> None:
    await world.start_server("s0")
    await world.admit(num_groups=1, group_size=2, deadline_s=-3600.0, timeout_s=60.0)
    await world.start_agents()  # the run was stopped for an hour
    assert {event.outcome for event in (await world.settled(2)).values()} == {Outcome.OK}


async def test_evaluation_episodes_have_their_own_sampling_and_are_drawn(world: AgentsWorld) -> None:
    server = await world.start_server("s0")
    await world.start_agents(
        render_episodes=2, eval_generating_args={"temperature": 0.25}, generating_args={"top_p": 0.5}
    )
    await world.admit(num_groups=3, group_size=1, phase="eval")
    await world.admit(num_groups=1, group_size=1, first=9)
    await world.settled(4)
    for request in server.requests:
        is_eval = request.episode_id.startswith("eval")
        assert request.sampling.temperature == (0.25 if is_eval else 1.0)
        assert request.sampling.top_p == (1.0 if is_eval else 0.5)
        assert (request.sampling.seed is not None) == is_eval
    folder = world.folder / "runs" / world.run / "renders"
    assert sorted(path.name for path in folder.iterdir()) == [
        "lake_seed000.gif",
        "lake_seed000.png",
        "lake_seed001.gif",
        "lake_seed001.png",
    ]
    with Image.open(folder / "lake_seed000.gif") as picture:
        assert getattr(picture, "n_frames", 1) >= 2
        assert np.asarray(picture.convert("RGB")).std() > 0


async def test_episodes_of_an_evaluations_first_tasks_are_kept_as_text(
    world: AgentsWorld,
) -> None:
    await world.start_server("s0")
    await world.start_agents(keep_episodes=2)
    await world.admit(num_groups=3, group_size=2, phase="eval")
    await world.admit(num_groups=1, group_size=1, first=9)
    settled = await world.settled(7)
    folder = world.folder / "runs" / world.run / "episodes"

    def kept() -> list[KeptEpisode]:
        lines = [line for path in folder.glob("*.jsonl") for line in path.read_bytes().splitlines()]
        return [msgspec.json.decode(line, type=KeptEpisode) for line in lines]

    await eventually(lambda: len(kept()) == 4)
    episodes = kept()
    assert sorted(episode.seed for episode in episodes) == [0, 0, 1, 1]
    for episode in episodes:
        event = settled[episode.episode_id]
        assert (episode.reward, episode.success) == (event.reward, event.success)
        assert [message.role for message in episode.messages[:2]] == ["user", "assistant"]
        assert len(episode.turn_rewards) == event.num_turns
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.iterdir())


MISTAKES = [
    ({"custom_envs": {"lake": {"env_type": "frozen_lak"}}}, "did you mean 'frozen_lake'"),
    ({"custom_envs": {"lake": {"env_type": "frozen_lake", "env_config": {"siz": 3}}}}, "'size'"),
    ({"max_concurrent_episode": 3}, "'max_concurrent_episodes'"),
    ({"generating_args": {"top_p": 0}}, "top_p must be above 0"),
    ({"custom_envs": {}, "transport": "carrier pigeon"}, "transport"),
]


@pytest.mark.parametrize(("agents", "remedy"), MISTAKES)
async def test_a_users_mistake_is_named_with_its_file_and_remedy(
    world: AgentsWorld, agents: dict[str, object], remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy) as caught:
        await world.start_agents("w0", **agents)
    assert "experiment.yaml: " in str(caught.value)


async def test_a_users_mistake_is_exit_code_2_without_a_traceback(world: AgentsWorld) -> None:
    agents, remedy = MISTAKES[0]
    process = world.spawn_agents("w0", **agents)
    assert await process.ended_async() == 2
    assert remedy in process.log
    assert "Traceback" not in process.log
