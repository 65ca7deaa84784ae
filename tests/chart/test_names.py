"""Names of objects: long names of releases and pools, and who meets whom then."""

from __future__ import annotations

from typing import Any

import helm_python
import pytest

from tests.chart.conftest import SEED, Objects, merged, objects_in

LONG = "release-" * 6 + "abcde"  # as long as Helm takes
CUT = LONG[:34].rstrip("-")


@pytest.fixture(scope="module")
def objects(chart: helm_python.Chart, values: dict[str, Any]) -> Objects:
    given = merged(values["laptop-cpu"], SEED)
    return objects_in(chart.render(given, name=LONG, namespace="team"))


def test_objects_of_a_long_release_have_names_that_kubernetes_takes(objects: Objects) -> None:
    assert len(LONG) == 53
    for kind, name in objects:
        assert len(name) <= (52 if kind == "StatefulSet" else 63), name


@pytest.mark.parametrize("server", ["nats", "redis"])
def test_services_of_a_long_release_may_reach_its_servers(objects: Objects, server: str) -> None:
    template = objects["StatefulSet", f"{CUT}-{server}"]["spec"]["template"]
    labels = template["metadata"]["labels"].items()
    rules = objects["NetworkPolicy", f"{CUT}-agents"]["spec"]["egress"]
    selected = [peer.get("podSelector", {}) for rule in rules for peer in rule.get("to", ())]
    assert any(each and each["matchLabels"].items() <= labels for each in selected)
