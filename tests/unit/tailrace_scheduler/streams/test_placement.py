"""Room on servers: prompts that are learned, and budgets that follow recomputed contexts."""

import pytest

from tailrace_scheduler.core.streams import decisions as de
from tailrace_scheduler.core.streams import events as ev
from tailrace_scheduler.core.streams.core import StreamCore
from tailrace_scheduler.core.streams.placement import THETA_MOST, trim
from tailrace_scheduler.core.streams.records import StreamServer
from tailrace_scheduler.core.streams.settings import EngineModel, StreamSettings

KV = 200_000


def starts(core: StreamCore, now_s: float) -> list[str]:
    return [one.episode_id for one in core.decide(now_s) if isinstance(one, de.StartEpisode)]


def test_starts_have_room_for_the_prompts_that_earlier_episodes_had() -> None:
    core = StreamCore(StreamSettings(max_staleness=1, groups_per_step=64))
    core.on(ev.ServerReport("s0", kv_capacity_tokens=KV, max_running=64, policy_version=0), 0.0)
    for number in range(64):
        core.on(ev.GroupOpened(f"g{number}", 1, "task", prompt_tokens=512), 0.0)
    running = starts(core, 0.0)
    for number in range(40):
        episode_id, now_s = running.pop(0), 10.0 * number
        core.on(ev.ToolEnded(episode_id, 30_000), now_s)  # its first turn begins
        core.on(ev.EpisodeEnded(episode_id, True, 31_000), now_s + 9.0)
        running += starts(core, now_s + 9.0)
    assert 4 <= len(running) <= KV // 30_000


@pytest.mark.parametrize(("releases", "is_lowered"), [(True, True), (False, False)])
def test_engines_that_keep_ended_contexts_may_recompute_more(releases: bool, is_lowered: bool) -> None:
    server = StreamServer("s0", EngineModel(), releases_prefixes=releases)
    for number in range(40):
        server.recomputed = int(0.1 * 5.0 / server.model.e_s)  # a tenth of the time
        trim(server, 5.0 * number)
    assert (server.theta < THETA_MOST) is is_lowered
