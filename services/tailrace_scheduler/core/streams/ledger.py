"""KV ledger: the expected peak of live contexts on every server, kept by increments.

An episode counts on its server from its start to its end, in tool calls too, unless its place was
released. `server.peak` is the histogram of contexts by tag times the table of expected contexts.
"""

import numpy as np

from tailrace_scheduler.core.streams.lengths import GROWTH, NUM_BUCKETS, FloatArray, TagLengths
from tailrace_scheduler.core.streams.records import StreamEpisode, StreamServer


def count(episode: StreamEpisode, server: StreamServer) -> None:
    """Count an episode on a server, at its present context."""
    assert episode.bucket < 0
    bucket = episode.bucket = episode.lengths.bucket(episode.context)
    server.peak += episode.lengths.peaks(bucket)
    server.count_of(episode.group.tag)[bucket] += 1
    server.num_live += 1


def uncount(episode: StreamEpisode, server: StreamServer) -> None:
    """Take an episode out of the count; one that is not counted changes nothing."""
    if episode.bucket < 0:
        return
    server.count_of(episode.group.tag)[episode.bucket] -= 1
    server.num_live -= 1
    server.peak -= episode.lengths.peaks(episode.bucket)
    episode.bucket = -1
    if server.num_live == 0:
        server.peak[:] = 0.0  # no rounding is left behind


def grow(episode: StreamEpisode, server: StreamServer, context: float) -> None:
    """Set the context of an episode."""
    episode.context = context
    bucket = episode.lengths.bucket(context)
    if episode.bucket < 0 or bucket == episode.bucket:
        return
    counts = server.count_of(episode.group.tag)
    counts[episode.bucket] -= 1
    counts[bucket] += 1
    server.peak += episode.lengths.peaks(bucket) - episode.lengths.peaks(episode.bucket)
    episode.bucket = bucket


def advance(server: StreamServer, lengths: dict[str, TagLengths], now_s: float) -> None:
    """Count the running turns where the server's token clock says that their contexts are."""
    clock = server.tokens_at(now_s)
    has_changed = False
    for episode in server.episodes.values():
        if episode.bucket >= 0 and episode.clock < clock:
            context = episode.context + clock - episode.clock
            bucket = min(int(context / episode.lengths.width), NUM_BUCKETS - 1)
            if bucket > episode.bucket:
                counts = server.counts[episode.group.tag]
                counts[episode.bucket] -= 1
                counts[bucket] += 1
                episode.bucket = bucket
                has_changed = True
    if has_changed:
        rebuild(server, lengths)


def note_sampled(episode: StreamEpisode, tokens: float) -> None:
    """Add sampled tokens to an episode's account; its context is still the one before them."""
    episode.sampled += tokens
    episode.context_sum += tokens * (episode.context + tokens / 2)


def rebuild(server: StreamServer, lengths: dict[str, TagLengths]) -> None:
    """Compute the peak again from the histograms, after the tables changed."""
    server.peak = np.zeros(len(GROWTH))
    for tag, counts in server.counts.items():
        server.peak += counts @ lengths[tag].peak_table


def recount(server: StreamServer) -> dict[str, FloatArray]:
    """Return the histograms counted afresh from the episodes, by their buckets."""
    counts: dict[str, FloatArray] = {}
    for episode in server.episodes.values():
        if episode.bucket >= 0:
            of_tag = counts.setdefault(episode.group.tag, np.zeros(NUM_BUCKETS))
            of_tag[episode.bucket] += 1
    return counts
