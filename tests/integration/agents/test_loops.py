"""Agent loops in agents processes: rows from files, tools behind NATS, workers that are killed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tailrace.bus import Bus
from tailrace.channel import ChunkSink
from tailrace.chat import ChatArgs, Renderer
from tailrace.config import ConfigError
from tailrace.sdk import tool
from tailrace.tools import ToolClient, ToolDeadlines, ToolWorker
from tailrace.tools.discovery import schema_hash
from tailrace_protos.base import as_int32, as_uint8, pack_float32, pack_int32
from tailrace_protos.episode import Outcome
from tailrace_protos.generation import FinishReason, GenerateRequest, TokenChunk, TokenSpan
from tests.provenance import versions_of
from tests.unit.tailrace_agents.loops.world import calls, chat_card, text_of
from tests.world.agents import AgentsWorld, FakeServer, agents_world
from tests.world.servers import ServerProcess
from tests.world.serving import eventually

RENDERER = Renderer.from_model_card(chat_card(), ChatArgs(tool_parser="hermes"))


def reply_to(prompt: str) -> str:
    """Looks the question up twice, then says what it found."""
    num_answers = prompt.count("<|start|>tool\n")
    if num_answers < 2:
        return calls(("lookup", {"key": f"k{num_answers}"}))
    return prompt.rpartition("<|start|>tool\n")[2].partition("<|end|>")[0]


class ChatServer(FakeServer):
    """An inference server that says what `reply` makes of the prompt."""

    reply = staticmethod(reply_to)

    def submit(self, request: GenerateRequest, sink: ChunkSink) -> None:
        self.requests.append(request)
        turn = text_of(as_int32(request.prompt_ids)).count("<|start|>tool\n")
        if self.hold_from_turn is not None and turn >= self.hold_from_turn:
            self._held.append((request, sink))
        else:
            self._answer(request, sink)

    def _answer(self, request: GenerateRequest, sink: ChunkSink) -> None:
        ids = RENDERER.reply_ids(self.reply(text_of(as_int32(request.prompt_ids)))).tolist()
        ids = ids[request.num_continued :]
        spans = (TokenSpan(self.policy_version, "", len(ids)),)
        logprobs = pack_float32([-0.125] * len(ids))
        self.emitted[request.episode_id].append((0, ids))
        sink.send(TokenChunk(request.call_id, pack_int32(ids), logprobs, spans, FinishReason.STOP))


class Shelf:
    """A tool worker of this test's run, and what was looked up."""

    def __init__(self, bus: Bus, run: str) -> None:
        self.lookups: list[str] = []
        lookups = self.lookups

        @tool
        async def lookup(key: str) -> str:
            """Look something up."""
            lookups.append(key)
            return f"found {key}"

        self.worker = ToolWorker([lookup], bus, run=run)


@pytest.fixture
async def world(
    nats_server: ServerProcess, redis_server: ServerProcess, run_name: str, short_folder: Path
) -> AsyncIterator[AgentsWorld]:
    async with agents_world(nats_server, redis_server, run_name, short_folder, chat_card()) as made:
        rows = [{"prompt": f"Question {index}?", "answer": f"a{index}"} for index in range(4)]
        path = short_folder / "questions.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        entry = {"path": str(path), "agent_name": "tool_agent", "tools": ["lookup"]}
        made.agents_config |= {"custom_envs": {}, "datasets": {"questions": entry}}
        yield made


@pytest.fixture
async def shelf(world: AgentsWorld, bus: Bus) -> AsyncIterator[Shelf]:
    made = Shelf(bus, world.run)
    await made.worker.start()
    yield made
    await made.worker.close()


async def start_chat(world: AgentsWorld) -> ChatServer:
    server = await world.start_server("s0", kind=ChatServer)
    assert isinstance(server, ChatServer)
    return server


async def test_rows_are_played_with_tools_and_scored(world: AgentsWorld, shelf: Shelf) -> None:
    server = await start_chat(world)
    await world.start_agents()
    tasks = await world.admit(num_groups=4, group_size=2, env_name="questions")
    settled = await world.settled(len(tasks))
    assert {event.outcome for event in settled.values()} == {Outcome.OK}
    trajectories = await world.trajectories(4)
    assert sorted(shelf.lookups) == ["k0"] * 8 + ["k1"] * 8
    for episode_id, trajectory in trajectories.items():
        (row,) = trajectory.rows
        mask = as_uint8(row.loss_mask).astype(bool)
        emitted = [token for _, ids in server.emitted[episode_id] for token in ids]
        assert as_int32(row.token_ids)[mask].tolist() == emitted
        assert trajectory.metrics["num_tool_calls"] == 2
        assert trajectory.task.row == {}  # rows stay with those who have the data set
    prompts = {text_of(as_int32(one.prompt_ids)) for one in server.requests}
    asked = {prompt.partition("Question ")[2][0] for prompt in prompts}
    assert asked == {"0", "1", "2", "3"}  # one epoch visits every row


@pytest.mark.parametrize("is_right", [True, False])
async def test_a_pinned_schema_is_the_only_one_that_a_prompt_shows(
    world: AgentsWorld, shelf: Shelf, is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_test = partial(ToolClient, deadlines=ToolDeadlines(nobody_s=30.0 if is_right else 1.0))
    monkeypatch.setattr("tailrace_agents.__main__.ToolClient", in_a_test)
    (served,) = (schema_hash(spec.schema) for spec in shelf.worker.host.specs)
    server = await start_chat(world)
    await world.start_agents(tool_schemas={"lookup": served if is_right else "00000000"})
    tasks = await world.admit(num_groups=1, group_size=2, env_name="questions")
    settled = await world.settled(len(tasks))
    if is_right:
        assert {event.outcome for event in settled.values()} == {Outcome.OK}
        return
    assert not server.requests
    for event in settled.values():
        assert event.outcome == Outcome.INFRA_FAILURE
        for part in ("'lookup'", "00000000", served, "agents.tool_schemas.lookup"):
            assert part in event.reason


def made_rows(split: str, num: int) -> Iterator[dict[str, Any]]:
    """A data set of this test."""
    assert split == "train"
    yield from ({"question": f"Question {index}?", "kept": index % 2 == 0} for index in range(num))


def only_kept(row: dict[str, Any]) -> dict[str, Any] | None:
    """A converter of this test."""
    return {"prompt": f"Converted {row['prompt']}"} if row["kept"] else None


async def test_a_data_set_is_played_as_its_entry_says(world: AgentsWorld, shelf: Shelf) -> None:
    server = await start_chat(world)
    entry = {
        "path": f"{__name__}:made_rows",
        "format": "python",
        "options": {"num": 8},
        "columns": {"prompt": "question"},
        "instruction": "Be short.",
        "data_source": "made/questions",
        "converter": f"{__name__}:only_kept",
        "system_prompt": "Look it up.",
        "limit": 2,
        "agent_name": "tool_agent",
        "tools": ["lookup"],
    }
    await world.start_agents(datasets={"questions": entry})
    tasks = await world.admit(num_groups=4, group_size=1, env_name="questions")
    await world.settled(len(tasks))
    prompts = [text_of(as_int32(one.prompt_ids)) for one in server.requests]
    assert all("Look it up." in prompt and "Be short." in prompt for prompt in prompts)
    scored = [item for request in world.rewards.requests for item in request.items]
    assert {item.task.row["data_source"] for item in scored} == {"made/questions"}
    asked = {prompt.partition("Converted Question ")[2][0] for prompt in prompts}
    assert asked == {"0", "2"}  # of eight rows, four are kept and two are used


async def test_a_killed_worker_neither_samples_nor_runs_anything_twice(
    world: AgentsWorld, shelf: Shelf
) -> None:
    server = await start_chat(world)
    server.hold_from_turn = 1
    first = world.spawn_agents("w0")
    tasks = await world.admit(num_groups=2, group_size=1, env_name="questions")
    await eventually(lambda: server.num_held == len(tasks), 60.0)
    first.kill()
    num_before = len(server.requests)
    server.hold_from_turn = None
    server.policy_version = 2
    await world.start_agents("w1")
    settled = await world.settled(len(tasks), 60.0)
    assert {event.outcome for event in settled.values()} == {Outcome.OK}
    again = [text_of(as_int32(one.prompt_ids)) for one in server.requests[num_before:]]
    assert all("found k0" in prompt for prompt in again)
    assert sorted(shelf.lookups) == ["k0", "k0", "k1", "k1"]
    for trajectory in (await world.trajectories(2)).values():
        (row,) = trajectory.rows
        versions = versions_of(row.spans)
        num_first = len(RENDERER.reply_ids(reply_to("")))
        assert set(versions[:num_first]) == {1}  # as they were sampled before the kill
        assert set(versions[num_first:]) == {2}


async def test_an_episode_whose_tool_nobody_serves_teaches_nothing(world: AgentsWorld) -> None:
    await start_chat(world)
    await world.start_agents()
    (task,) = await world.admit(
        num_groups=1, group_size=1, env_name="questions", deadline_s=2.0, timeout_s=2.0
    )
    event = (await world.settled(1))[task.episode_id]
    assert not event.outcome.is_valid


MISTAKES: list[tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = [
    (lambda entry: {"datasets": {"questions": {**entry, "agent_name": "tools_agent"}}},
     r"questions\.jsonl:1: key 'agent_name': .* did you mean 'tool_agent'"),
    (lambda entry: {"datasets": {"questions": {**entry, "path": "missing.jsonl"}}},
     r"agents\.datasets\.questions\.path: cannot read missing\.jsonl"),
    (lambda entry: {"datasets": {"questions": {**entry, "limits": 3}}}, "did you mean 'limit'"),
    (lambda entry: {"agent_loops": {"mine": "nowhere_at_all:Loop"}},
     r"agents\.agent_loops\.mine: cannot import"),
    (lambda entry: {"custom_envs": {"questions": {"env_type": "frozen_lake"}}}, "rename one of them"),
    (lambda entry: {"loop_args": {"max_turns": 0}}, "max_turns must be positive"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "remedy"), MISTAKES)
async def test_a_users_mistake_is_named_with_its_file_and_remedy(
    world: AgentsWorld, change: Callable[[dict[str, Any]], dict[str, Any]], remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy):
        await world.start_agents("w0", **change(world.agents_config["datasets"]["questions"]))
