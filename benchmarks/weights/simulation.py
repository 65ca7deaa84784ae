"""Time of one version to many simulated servers, along the trees of the real planner.

Each server has one link, which sends and receives at the same rate. A server sends a chunk on, to one
server after the other, once it is there. `ChunkFetch` asks for chunks ahead by its credit, so that
requests cost no time: a level costs a latency and the time of a chunk.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from typing import NamedTuple

from tailrace_protos.weights import WeightSource
from tailrace_weight_sync.core.relays import NUM_STRIPES, ROOT, Joiner, RelayTree


class Links(NamedTuple):
    """Equal links of all servers, and the size of the version in chunks."""

    num_chunks: int
    chunk_s: float  # of one chunk on a link
    latency_s: float


def planned(num_servers: int) -> RelayTree:
    """The trees of servers on hosts of their own that begin together."""
    tree = RelayTree()
    tree.plan(
        Joiner(f"s{at}", WeightSource(f"h{at}", "", f"tcp://h{at}:1")) for at in range(num_servers)
    )
    return tree


def transfer_s(num_servers: int, links: Links) -> float:
    """Seconds until the last server has the whole version."""
    tree = planned(num_servers)
    children: dict[tuple[str, int], list[str]] = defaultdict(list)
    for at in range(num_servers):
        for stripe in range(NUM_STRIPES):
            children[(tree.parent(f"s{at}", stripe), stripe)].append(f"s{at}")
    queues: dict[str, deque[tuple[str, int]]] = defaultdict(deque)  # to send, in order of arrival
    receives_again_s: dict[str, float] = defaultdict(float)
    # (time, number, server, child or "", chunk): the server has the chunk, or sent it to the child.
    events = [(0.0, chunk, ROOT, "", chunk) for chunk in range(links.num_chunks)]
    number, now_s = links.num_chunks, 0.0
    while events:
        now_s, _, server, child, chunk = heapq.heappop(events)
        queue = queues[server]
        if child:
            there_s = max(now_s + links.latency_s, receives_again_s[child] + links.chunk_s)
            receives_again_s[child] = there_s
            heapq.heappush(events, (there_s, number, child, "", chunk))
            queue.popleft()
        was_idle = not queue or bool(child)
        if not child:
            queue.extend((each, chunk) for each in children[(server, chunk % NUM_STRIPES)])
        if was_idle and queue:
            heapq.heappush(events, (now_s + links.chunk_s, number + 1, server, *queue[0]))
        number += 2
    return now_s
