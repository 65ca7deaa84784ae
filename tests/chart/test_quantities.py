"""Quantities of memory in every notation of Kubernetes: what Valkey may hold, and what is refused."""

from __future__ import annotations

from typing import Any

import helm_python
import pytest
import yaml

from tests.chart.conftest import SEED, Objects, Render, container_of, merged, objects_in

QUANTITIES = {
    "512Mi": 512 * 2**20,
    "1Gi": 2**30,
    "1.5Gi": 3 * 2**29,
    ".5Gi": 2**29,
    "2.Gi": 2**31,
    "+1Gi": 2**30,
    "1048576Ki": 2**30,
    "1Ti": 2**40,
    "500M": 500 * 10**6,
    "2G": 2 * 10**9,
    "2000000k": 2 * 10**9,
    "1T": 10**12,
    "1e9": 10**9,
    "1E9": 10**9,
    "1.5e+9": 15 * 10**8,
    "128974848": 128974848,
    "128974848000m": 128974848,
}


def limited(memory: Any) -> dict[str, Any]:
    return {"redis": {"resources": {"limits": {"memory": memory}}}}


def max_memory(objects: Objects) -> list[int]:
    """Values of `maxmemory` in Valkey's configuration."""
    lines = objects["Secret", "demo-redis-config"]["stringData"]["redis.conf"].splitlines()
    return [int(line.split()[1]) for line in lines if line.split()[0] == "maxmemory"]


@pytest.mark.parametrize("memory", QUANTITIES)
def test_valkey_refuses_writes_before_its_limit_kills_it(memory: str, render: Render) -> None:
    objects = render("laptop-cpu", limited(memory))
    assert container_of(objects["StatefulSet", "demo-redis"])["resources"]["limits"] == {
        "memory": memory
    }
    assert max_memory(objects) == [QUANTITIES[memory] * 4 // 5]


@pytest.mark.parametrize("text", ["128974848", "1e9", "1.5e9"])
def test_a_number_of_a_values_file_is_so_many_bytes(text: str, render: Render) -> None:
    number = yaml.safe_load(f"memory: {text}\n")["memory"]
    assert max_memory(render("laptop-cpu", limited(number))) == [int(float(text)) * 4 // 5]


@pytest.mark.parametrize("name", ["laptop-cpu", "node-8gpu", "cluster-64gpu"])
def test_every_values_file_bounds_valkey(name: str, render: Render) -> None:
    objects = render(name)
    limit = container_of(objects["StatefulSet", "demo-redis"])["resources"]["limits"]["memory"]
    assert max_memory(objects) == [int(limit.removesuffix("Gi")) * 2**30 * 4 // 5]


@pytest.mark.parametrize(
    "resources", [None, {"limits": None}, {"limits": {"memory": None}}], ids=["all", "limits", "memory"]
)
def test_without_a_limit_valkey_has_no_bound(resources: Any, render: Render) -> None:
    objects = render("laptop-cpu", {"redis": {"resources": resources}})
    assert max_memory(objects) == []
    resources = container_of(objects["StatefulSet", "demo-redis"])["resources"] or {}
    assert "memory" not in (resources.get("limits") or {})


def test_servers_of_several_runs_have_a_bound_and_brought_ones_none(render: Render) -> None:
    assert max_memory(render("laptop-cpu", {"mode": "standing"}, limited("1Gi"))) == [2**30 * 4 // 5]
    brought = {"redis": {"external": {"url": "redis://a:6379"}}}
    assert ("Secret", "demo-redis-config") not in render("laptop-cpu", brought)


@pytest.mark.parametrize("memory", ["4 Gi", "4GiB", "4gi", "1.2.3Gi", "Gi", "", "-1Gi", "1e", "all"])
def test_what_is_no_quantity_is_refused_by_the_name_of_its_key(
    memory: str, chart: helm_python.Chart, values: dict[str, Any]
) -> None:
    with pytest.raises(helm_python.HelmError, match="/redis/resources/limits/memory"):
        chart.render(merged(values["laptop-cpu"], limited(memory)), name="demo", namespace="team")


@pytest.mark.parametrize("memory", ["512m", "4", "1Mi", "0", "4E"])
def test_a_quantity_that_no_valkey_can_have_is_refused_by_the_name_of_its_key(
    memory: str, chart: helm_python.Chart, values: dict[str, Any]
) -> None:
    with pytest.raises(helm_python.HelmError, match=f"redis.resources.limits.memory is {memory}, "):
        chart.render(merged(values["laptop-cpu"], limited(memory)), name="demo", namespace="team")


@pytest.mark.parametrize("shm", ["17Gi", "17179869185", "18e9", "1Pi"])
def test_shared_memory_above_its_limit_is_refused_in_every_notation(
    shm: str, chart: helm_python.Chart, values: dict[str, Any]
) -> None:
    change = {"learner": {"shm": shm, "resources": {"limits": {"memory": "16Gi"}}}}
    with pytest.raises(helm_python.HelmError, match=r"learner\.shm is"):
        chart.render(merged(values["laptop-cpu"], change), name="demo", namespace="team")


def test_a_claim_has_a_size_in_every_notation(chart: helm_python.Chart, values: dict[str, Any]) -> None:
    for size in ("1e12", "1Pi", ".5Ti"):
        given = merged(values["laptop-cpu"], SEED, {"storage": {"runs": {"size": size}}})
        objects = objects_in(chart.render(given, name="demo", namespace="team"))
        claim = objects["PersistentVolumeClaim", "demo-runs"]["spec"]
        assert claim["resources"]["requests"]["storage"] == size
