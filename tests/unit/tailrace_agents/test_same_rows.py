"""Rows of seeded episodes, token by token: digests that were recorded once and must not change."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tailrace.channel.generation import Generation
from tailrace.chat import Renderer
from tailrace.sdk.agent_loop import LoopLimits
from tailrace.sdk.policy import TurnRequest
from tailrace_agents.core.episode import EpisodeResult
from tailrace_agents.core.model import EnvView
from tailrace_envs import make_env
from tailrace_protos.base import as_float32, as_int64
from tailrace_protos.generation import FinishReason, TokenSpan
from tailrace_protos.session import ExportStyle
from tailrace_protos.trajectory import TokenRow
from tests.unit.tailrace_agents.env_world import env_limits, play_env
from tests.unit.tailrace_agents.fakes import ListJournal
from tests.unit.tailrace_envs.playing import KINDS
from tests.unit.tailrace_envs.resuming import byte_renderer

VIEWS = {
    "trajectory": EnvView(),
    "step": EnvView(ExportStyle.STEP, None),
    "window0": EnvView(ExportStyle.STEP, 0),
    "window1": EnvView(ExportStyle.STEP, 1),
    "window3": EnvView(ExportStyle.STEP, 3),
}


class Variant(NamedTuple):
    """A way to play: limits, and how many of a thousand log-probabilities are not finite."""

    limits: LoopLimits
    num_broken: int = 0


ROOM = env_limits(1_000_000, 100_000, 512, wall_clock_s=60.0)
VARIANTS = {
    "plain": Variant(ROOM),
    "broken": Variant(ROOM, num_broken=200),
    "few_new_tokens": Variant(ROOM._replace(max_new_tokens=23)),
    "short_episode": Variant(ROOM._replace(max_episode_tokens=900)),
    "short_page": Variant(ROOM._replace(max_episode_tokens=2500)),
    "short_reply": Variant(ROOM._replace(max_tokens_per_step=3)),
}

EXPECTED = {
    "frozen_lake": {
        "trajectory": "fcd3b8f54a927091",
        "step": "ef302ce48de35d2b",
        "window0": "d8c568b49290e097",
        "window1": "77ea615882598dfd",
        "window3": "6c83cceb3d1ff099",
    },
    "sokoban": {
        "trajectory": "107d1e01d75d3333",
        "step": "632e7ca1bdcf9aa7",
        "window0": "ef952c433c6b56ce",
        "window1": "74c4bbf1d3360b55",
        "window3": "93521c8b9351dffa",
    },
    "webshop": {
        "trajectory": "6410bcd35e1f70cd",
        "step": "8f48e8436b83bc11",
        "window0": "77548a7117afea86",
        "window1": "1543d6cce994341a",
        "window3": "5392c2d1ea3ed9bd",
    },
    "maths": {
        "trajectory": "48fc0b610c5f5a7c",
        "step": "94a8e9fbff4cef14",
        "window0": "48aafbb753f34890",
        "window1": "07b16fc720a05ffe",
        "window3": "68c48eda3d7656cc",
    },
}


class PromptedPolicy:
    """Answers as the prompt's ids say: the reply, its log-probabilities and who sampled it."""

    def __init__(self, renderer: Renderer, kind: str, num_broken: int = 0) -> None:
        self._renderer = renderer
        self._replies = [*KINDS[kind][1], "", "nonsense \u00e9"]
        self._num_broken = num_broken
        self.num_calls = 0

    async def generate(self, request: TurnRequest) -> Generation:
        self.num_calls += 1
        known = hashlib.blake2b(bytes(request.prompt_ids), digest_size=8).digest()
        chance = random.Random(known)
        ids = self._renderer.reply_ids(chance.choice(self._replies))
        reason = FinishReason.STOP if len(ids) <= request.max_new_tokens else FinishReason.LENGTH
        ids = ids[: request.max_new_tokens]
        logprobs = np.array([-chance.random() for _ in ids], np.float32)
        for place in range(len(ids)):
            if chance.randrange(1000) < self._num_broken:
                logprobs[place] = chance.choice([np.nan, np.inf, -np.inf])
        cut = chance.randint(0, len(ids))
        parts = [(chance.randint(1, 3), "a:1", cut), (chance.randint(1, 3), "b:1", len(ids) - cut)]
        spans = tuple(TokenSpan(*part) for part in parts if part[2])
        return Generation(ids, logprobs, spans, reason, None, 0)


def digest(result: EpisodeResult, rows: tuple[TokenRow, ...]) -> bytes:
    """Digest of all that the learner and the rewards read of an episode."""
    metrics, transcript = sorted(result.metrics.items()), result.transcript
    texts = [(message.role, message.content) for message in result.messages]
    seen = hashlib.blake2b(repr((result.outcome.value, metrics)).encode(), digest_size=8)
    if result.outcome.is_valid:
        seen.update(repr((texts, transcript.turn_rewards, transcript.num_sampled)).encode())
        for row in rows:
            seen.update(row_bytes(row))
    return seen.digest()


def row_bytes(row: TokenRow) -> bytes:
    """A row as bytes, its provenance written out token by token."""
    told = (
        row.reward, row.row_id, row.first_turn, row.conversation, row.has_reward,
        as_float32(row.turn_rewards).tolist(), as_int64(row.turn_hashes).tolist(),
        provenance(row),
    )  # fmt: skip
    parts = (row.token_ids, row.loss_mask, row.inference_logprobs, row.turn_ends, row.turn_returns)
    return b"|".join([repr(told).encode(), *map(bytes, parts)])


def provenance(row: TokenRow) -> list[tuple[int, str]]:
    """Policy version and source of each trained token."""
    return [(span.policy_version, span.source) for span in row.spans for _ in range(span.num_tokens)]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return byte_renderer(Path(tmp_path_factory.mktemp("tokenizer")))


async def played(
    kind: str,
    seed: int,
    view: EnvView,
    variant: Variant,
    renderer: Renderer,
    journal: ListJournal | None = None,
) -> tuple[EpisodeResult, PromptedPolicy]:
    env = make_env(kind, KINDS[kind][0])
    policy = PromptedPolicy(renderer, kind, variant.num_broken)
    result = await play_env(
        env, renderer, policy, seed=seed, limits=variant.limits, view=view, journal=journal
    )
    return result, policy


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kind", ["frozen_lake", "sokoban", "webshop", "maths"])
async def test_rows_of_an_environment_are_those_that_were_recorded(
    kind: str, view: str, renderer: Renderer
) -> None:
    told = hashlib.blake2b(digest_size=8)
    for variant in VARIANTS.values():
        for seed in (3, 11):
            result, _ = await played(kind, seed, VIEWS[view], variant, renderer)
            result.metrics.pop("num_cut_replies", None)  # not in what was recorded
            told.update(digest(result, result.transcript.rows(0.75)))
    assert told.hexdigest() == EXPECTED[kind][view]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("kind", ["frozen_lake", "maths"])
async def test_an_episode_resumed_after_any_turn_has_the_same_rows(
    kind: str, view: str, renderer: Renderer
) -> None:
    journal = ListJournal()
    variant = VARIANTS["broken"]
    whole, policy = await played(kind, 5, VIEWS[view], variant, renderer, journal)
    expected = digest(whole, whole.transcript.rows(0.75))
    for num_done in range(len(journal.records) + 1):
        resumed, second = await played(
            kind, 5, VIEWS[view], variant, renderer, ListJournal(journal.records[:num_done])
        )
        assert digest(resumed, resumed.transcript.rows(0.75)) == expected
        assert (resumed.num_replayed_turns, resumed.num_restarts) == (num_done, 0)
        assert second.num_calls == policy.num_calls - num_done
