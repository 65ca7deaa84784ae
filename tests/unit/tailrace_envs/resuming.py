"""Episodes that another worker resumes: the resumed episode is the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tailrace.channel.generation import Generation
from tailrace.chat import Renderer
from tailrace.sdk.env import Env
from tailrace.sdk.policy import TurnRequest
from tailrace.toolbox.byte_tokenizer import build_byte_tokenizer
from tailrace_agents.core.episode import EpisodeResult
from tailrace_protos.weights import ModelCard
from tests.unit.tailrace.policy.fakes import generation
from tests.unit.tailrace_agents.env_world import env_limits, play_env
from tests.unit.tailrace_agents.fakes import ListJournal

LIMITS = env_limits(1_000_000, 50_000, 512, wall_clock_s=60.0)


def byte_renderer(folder: Path) -> Renderer:
    """Renderer of a model that reads and writes any text."""
    files = {path.name: path.read_bytes() for path in build_byte_tokenizer(folder).iterdir()}
    return Renderer.from_model_card(ModelCard(config_json=b"{}", tokenizer_files=files))


class Replies:
    """Policy that gives these replies in turn."""

    def __init__(self, renderer: Renderer, replies: Sequence[str]) -> None:
        self._renderer = renderer
        self._replies = iter(replies)

    async def generate(self, request: TurnRequest) -> Generation:
        return generation(self._renderer.reply_ids(next(self._replies)), 1)


async def check_every_resumption(
    make: Callable[[], Env], replies: Sequence[str], renderer: Renderer
) -> EpisodeResult:
    """Resumes an episode after each of its turns and compares; returns the whole episode."""

    async def play(said: Sequence[str], journal: ListJournal) -> EpisodeResult:
        env, policy = make(), Replies(renderer, said)
        try:
            return await play_env(env, renderer, policy, seed=5, limits=LIMITS, journal=journal)
        finally:
            env.close()

    journal = ListJournal()
    whole = await play(replies, journal)
    for num_done in range(len(journal.records) + 1):
        resumed = await play(replies[num_done:], ListJournal(journal.records[:num_done]))
        assert (resumed.num_replayed_turns, resumed.num_restarts) == (num_done, 0)
        assert resumed.messages == whole.messages
        assert resumed.transcript.turn_rewards == whole.transcript.turn_rewards
        assert resumed.metrics == whole.metrics
    return whole
