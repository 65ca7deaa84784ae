"""Queries of dashboards and alerts ask each metric for what its type can answer; pages name metrics as
Prometheus stores them.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client import REGISTRY
from prometheus_client.metrics import MetricWrapperBase

from tailrace_inference.metrics import COUNTERS, GAUGES

ROOT = Path(__file__).parents[3]
FILES = ROOT / "helm" / "tailrace" / "files"
OF_COUNTERS, OF_GAUGES = {"rate", "increase"}, {"changes", "resets", "delta", "min_over_time"}
_TARGET = {"namespace", "run", "service", "pod", "instance", "job"}  # labels of a scrape
_NAMED = re.compile(r"`(tailrace_[a-z]+_[a-z_]+)(?:\{[^}]*\})?`")
_PACKAGES = {
    path.name for folder in ("protos", "shared", "services") for path in (ROOT / folder).iterdir()
}
PAGES = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("services/*/README.md")]
_USE = re.compile(r"(?:(\w+)\()?((?:tailrace|process)_[a-z0-9_]+)(\{[^}]*\})?")


def known() -> dict[str, tuple[str, set[str]]]:
    """Type and labels of each series name."""
    for path in [*ROOT.glob("services/*/metrics.py"), *ROOT.glob("shared/tailrace/**/*.py")]:
        if "Counter(" in path.read_text() or path.name == "metrics.py":
            folder = ROOT / ("services" if "services" in path.parts else "shared")
            importlib.import_module(".".join(path.relative_to(folder).with_suffix("").parts))
    found: dict[str, tuple[str, set[str]]] = {"process_resident_memory_bytes": ("gauge", set())}
    for metric in set(REGISTRY._collector_to_names):
        if not isinstance(metric, MetricWrapperBase):
            continue
        labels = set(metric._labelnames)
        if metric._type == "histogram":
            found |= {f"{metric._name}_{part}": ("counter", labels) for part in ("sum", "count")}
            found[f"{metric._name}_bucket"] = ("counter", labels | {"le"})
        else:
            end = "_total" if metric._type == "counter" else ""
            found[metric._name + end] = (metric._type, labels)
    found |= {f"tailrace_inference_{name}": ("gauge", set()) for name in GAUGES}
    found |= {f"tailrace_inference_{name}_total": ("counter", set()) for name, _ in COUNTERS.values()}
    return found


def queries() -> Iterator[tuple[str, str]]:
    for path in sorted(FILES.glob("dashboards/*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                yield f"{path.stem}: {panel['title']}", target["expr"]
    for rule in yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"][0]["rules"]:
        yield rule["alert"], rule["expr"]


KNOWN = known()
QUERIES = list(queries())


@pytest.mark.parametrize(
    ("name", "query"), QUERIES, ids=[f"{at} {n}" for at, (n, _) in enumerate(QUERIES)]
)
def test_a_query_fits_the_types_and_labels_of_its_metrics(name: str, query: str) -> None:
    uses = _USE.findall(query)
    assert uses
    labels_of_all: set[str] = set()
    for function, series, chosen in uses:
        kind, labels = KNOWN[series]
        labels_of_all |= labels
        assert not (function in OF_COUNTERS and kind != "counter"), f"{function} of a gauge: {series}"
        assert not (function in OF_GAUGES and kind != "gauge"), f"{function} of a counter: {series}"
        assert kind == "gauge" or function in OF_COUNTERS, f"a bare counter: {series}"
        given = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", chosen))
        assert given <= labels | _TARGET, f"{series} has no {given - labels - _TARGET}"
        assert not series.endswith("_bucket") or "le" in given or "histogram_quantile(" in query
    for group in re.findall(r"by \(([^)]*)\)", query):
        asked = {label.strip() for label in group.split(",")}
        assert asked <= labels_of_all | _TARGET, f"no {asked - labels_of_all - _TARGET}"
        assert "histogram_quantile(" not in query or "le" in asked


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_metrics_of_a_page_have_the_names_of_their_series(page: Path) -> None:
    of_histograms = {name.removesuffix("_sum") for name in KNOWN if name.endswith("_sum")}
    named = set(_NAMED.findall(page.read_text())) - _PACKAGES
    assert sorted(named - KNOWN.keys() - of_histograms) == []
