"""Ways of weights over the servers: depth, load, hosts, and any history of joins and deaths."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from tailrace_protos.weights import WeightSource
from tailrace_weight_sync.core.relays import NUM_STRIPES, ROOT, Joiner, RelayTree


def joiner(name: str, host: str = "", port: int = 1, address: str = "") -> Joiner:
    host = host or f"host-{name}"
    return Joiner(name, WeightSource(host, "", f"tcp://{address or host}:{port}"))


def planned(*joiners: Joiner) -> RelayTree:
    tree = RelayTree()
    tree.plan(joiners)
    return tree


def way(tree: RelayTree, name: str, stripe: int) -> list[str]:
    """Holders from a server's own up to weight_sync or a server that has the whole version."""
    found = [tree.parent(name, stripe)]
    while found[-1] != ROOT and tree.depth(found[-1], stripe):
        found.append(tree.parent(found[-1], stripe))
        assert len(found) == len(set(found)), "a server is above itself"
    return found


@pytest.mark.parametrize("num_servers", [1, 2, 3, 8, 63, 1024])
def test_servers_that_begin_together_send_no_more_than_they_receive_and_trees_are_flat(
    num_servers: int,
) -> None:
    names = [f"s{at}" for at in range(num_servers)]
    tree = planned(*(joiner(name) for name in names))
    streams = Counter(tree.parent(name, stripe) for name in names for stripe in range(NUM_STRIPES))
    assert max(streams.values()) <= NUM_STRIPES
    assert streams[ROOT] <= NUM_STRIPES
    deepest = max(tree.depth(name, stripe) for name in names for stripe in range(NUM_STRIPES))
    assert deepest <= math.log2(num_servers) + 2


def test_of_a_host_one_server_fetches_over_the_network() -> None:
    names = [f"s{at}" for at in range(16)]
    tree = planned(*(joiner(name, f"h{at // 8}") for at, name in enumerate(names)))
    for host in (names[:8], names[8:]):
        for stripe in range(NUM_STRIPES):
            over_network = [name for name in host if tree.parent(name, stripe) not in host]
            assert over_network == host[:1]
            for name in host:
                way(tree, name, stripe)


def test_a_server_on_the_loopback_serves_only_its_own_host() -> None:
    tree = planned(
        joiner("a", "h0", address="127.0.0.1"), joiner("b", "h0"), joiner("c", "h1"), joiner("d", "h2")
    )
    assert tree.parent("b", 0) == "a"
    assert "a" not in {tree.parent(name, stripe) for name in "cd" for stripe in range(NUM_STRIPES)}


def test_a_dead_holder_is_routed_around_and_serves_again_once_it_has_all() -> None:
    names = [f"s{at}" for at in range(31)]
    tree = planned(*(joiner(name) for name in names))
    dead = tree.parent("s30", 0)
    assert dead != ROOT
    orphans = [(name, s) for name in names for s in range(NUM_STRIPES) if tree.parent(name, s) == dead]
    for name, stripe in orphans:
        assert tree.parent(name, stripe, failed=dead) != dead
        assert dead not in way(tree, name, stripe)
    others = [name for name in names if name != dead]
    for name in others:
        tree.finished(joiner(name))
    tree.plan([joiner("late")])
    assert dead not in way(tree, "late", 0)
    tree.finished(joiner(dead))
    for name in (*others, "late"):
        tree.leave(name)
    tree.plan([joiner("later"), joiner("last")])
    for stripe in range(NUM_STRIPES):
        assert dead in {tree.parent("later", stripe), tree.parent("last", stripe)}


def test_a_late_server_is_fed_by_idle_servers_that_hold_the_version() -> None:
    names = ["a", "b", "c"]
    tree = planned(*(joiner(name) for name in names))
    for name in names:
        tree.finished(joiner(name))
    tree.plan(joiner(f"late{at}") for at in range(4))
    holders = Counter(tree.parent(f"late{at}", s) for at in range(4) for s in range(NUM_STRIPES))
    assert max(holders.values()) <= NUM_STRIPES
    assert all(tree.depth(f"late{at}", s) <= 2 for at in range(4) for s in range(NUM_STRIPES))


def test_a_restarted_server_is_another_one() -> None:
    tree = planned(joiner("a"), joiner("b"))
    assert tree.knows(joiner("a"))
    assert not tree.knows(joiner("a", port=2))
    tree.plan([joiner("a", port=2)])
    assert tree.source_of("a").zmq_endpoint.endswith(":2")


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_every_server_has_a_way_to_a_whole_holder(seed: int) -> None:
    """Joins in batches, restarts, deaths that others notice one by one, finished and late servers."""
    choose = random.Random(seed)
    tree, starts = RelayTree(), Counter[str]()
    alive, dead, whole = list[str](), set[str](), set[str]()
    for event in range(120):
        kind = choose.choice(["join", "join", "die", "finish", "restart"])
        if kind == "join":
            new = [f"s{event}.{at}" for at in range(choose.randrange(1, 6))]
            tree.plan(joiner(name, f"h{choose.randrange(12)}") for name in new)
            alive += new
        elif alive and kind == "die":
            dead.add(alive.pop(choose.randrange(len(alive))))
        elif alive and kind == "finish":
            name = choose.choice(alive)
            tree.finished(Joiner(name, tree.source_of(name)))
            whole.add(name)
        elif alive:
            name = choose.choice(alive)
            whole.discard(name)
            starts[name] += 1
            tree.plan([joiner(name, tree.source_of(name).host_id, 1 + starts[name])])
        asking = sorted(set(alive) - whole)
        for name in choose.sample(asking, min(4, len(asking))):
            for stripe in range(NUM_STRIPES):
                asked = 0
                while (holder := tree.parent(name, stripe)) in dead:
                    tree.parent(name, stripe, failed=holder)
                    asked += 1
                    assert asked <= len(dead)
                assert name not in way(tree, name, stripe)
