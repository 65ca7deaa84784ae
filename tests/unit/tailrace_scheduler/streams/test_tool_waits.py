"""Places of episodes in long tool calls: when they are given up, and where their next turn goes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace_scheduler.core.streams import ledger
from tailrace_scheduler.core.streams.lengths import NUM_BUCKETS, TagLengths
from tailrace_scheduler.core.streams.placement import KvPlacement
from tailrace_scheduler.core.streams.records import StreamEpisode, StreamGroup, StreamServer
from tailrace_scheduler.core.streams.settings import EngineModel

KV = 100_000


def lengths_of_calls(calls_s: list[float]) -> TagLengths:
    lengths = TagLengths(32_768)
    for seconds in calls_s:
        lengths.waited(seconds)
    lengths.refresh(np.zeros(NUM_BUCKETS), (), 0.0)
    return lengths


def test_a_few_endless_calls_do_not_make_the_next_return_dear() -> None:
    lengths = lengths_of_calls([8.0] * 97 + [600.0] * 3)
    assert lengths.wait_left_s(6.0) > 18.0
    assert lengths.return_price_s(6.0) < 6.0  # most calls end within two seconds more
    assert lengths.return_price_s(60.0) > 300.0  # only the endless ones are left


@given(
    st.lists(st.floats(0.1, 3_000.0), min_size=1, max_size=60),
    st.floats(0.0, 3_000.0),
)
def test_waiting_with_a_way_out_never_costs_more_than_waiting_to_the_end(
    calls_s: list[float], waited_s: float
) -> None:
    lengths = lengths_of_calls(calls_s)
    assert 0.0 < lengths.return_price_s(waited_s) <= lengths.wait_left_s(waited_s) * (1 + 1e-6) + 1e-6


def server_with_released_episode(
    model: EngineModel, releases: bool
) -> tuple[StreamServer, StreamEpisode]:
    """Return a full server, and an episode back from a tool call in which it gave its place up."""
    server = StreamServer("s0", model, releases_prefixes=releases)
    group, lengths = StreamGroup("g0", 0, "task", 512, 9, 1, "train"), TagLengths(32_768)
    for member in range(9):
        episode = StreamEpisode(group.episode_id(member), group, member, lengths, server)
        episode.context = episode.prefix = 20_000.0
        episode.state, episode.since_s = "tool", 10.0 + member
        server.episodes[episode.episode_id] = episode
        ledger.count(episode, server)
    back = server.episodes["g0.0"]
    ledger.uncount(back, server)
    back.state, back.context = "running", 24_000.0  # the tool added 4,000 tokens
    return server, back


@pytest.mark.parametrize(
    ("host_kv_tokens", "releases", "stays"),
    [(80_000, True, True), (70_000, True, False), (0, True, False), (80_000, False, False)],
    ids=["kept", "pushed out by later ones", "no host memory", "ended contexts are kept"],
)
def test_a_turn_stays_at_a_full_server_whose_host_memory_has_its_prefix(
    host_kv_tokens: int, releases: bool, stays: bool
) -> None:
    model = EngineModel(kv_tokens=KV, host_kv_tokens=host_kv_tokens)
    server, back = server_with_released_episode(model, releases)
    assert KvPlacement({"s0": server}).stays(back, -1) is stays


def test_what_the_tool_added_does_not_make_a_cached_prefix_count_less() -> None:
    server, back = server_with_released_episode(EngineModel(kv_tokens=KV), releases=True)
    rule = KvPlacement({"s0": server})
    assert rule.stays(back, 20_000)
    assert not rule.stays(back, 17_000)
