"""JSON models of the dashboards, as Grafana reads them."""

from typing import Any

from dashboards import DASHBOARDS, Panel

_CHOSEN = 'namespace=~"$namespace",run=~"$run"'
_WIDTH, _HEIGHT, _PER_ROW = 8, 8, 3
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard(name: str) -> dict[str, Any]:
    """The JSON model of a dashboard."""
    title, panels = DASHBOARDS[name]
    return {
        "uid": f"tailrace-{name}",
        "title": title,
        "tags": ["tailrace"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [
            {"type": "dashboards", "tags": ["tailrace"], "title": "Tailrace", "asDropdown": True}
        ],
        "templating": {"list": [_source(), *(_variable(label) for label in ("namespace", "run"))]},
        "panels": [_panel(index, panel) for index, panel in enumerate(panels)],
    }


def _source() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus"}


def _variable(label: str) -> dict[str, Any]:
    return {
        "name": label,
        "type": "query",
        "datasource": _DATASOURCE,
        "query": f"label_values(tailrace_runtime_ready, {label})",
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    }


def _panel(index: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(index, _PER_ROW)
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": _DATASOURCE,
        "gridPos": {"h": _HEIGHT, "w": _WIDTH, "x": column * _WIDTH, "y": row * _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + number), "expr": _filled(query), "legendFormat": legend}
            for number, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def _filled(query: str) -> str:
    return query.replace("@{", f"{{{_CHOSEN},").replace("@", f"{{{_CHOSEN}}}")
