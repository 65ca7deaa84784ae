"""Writes the chart's generated files: schema, rights, drains, dashboards.

`python helm/make_files.py` writes them; `--check` exits with 1 if they differ from the code. The schema
of `experiment` comes from the configuration Structs; the rest from the Structs in `chart_values.py`.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parent))

from chart_values import ChartValues
from dashboards import DASHBOARDS
from grafana import dashboard

from tailrace.config import RunConfig
from tailrace.config.settings.tables import ROOTS
from tailrace_cli.cluster.permissions import SERVICE_USERS, nats_permissions, redis_rights
from tailrace_cli.experiment import SECTION_KINDS

CHART = Path(__file__).parent / "tailrace"
RUN = "@RUN@"  # the chart puts the run's name there


def schema() -> dict[str, Any]:
    """JSON Schema of the chart's values."""
    kinds = [ChartValues, *SECTION_KINDS.values()]
    refs, definitions = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    sections = {name: ref for name, ref in zip(SECTION_KINDS, refs[1:], strict=True) if name != "run"}
    run = definitions[RunConfig.__name__]
    run["properties"] |= sections | {name: {} for name in ROOTS if name not in sections}
    top = definitions.pop(ChartValues.__name__)
    top["properties"]["experiment"] = {"$ref": f"#/$defs/{RunConfig.__name__}"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_plain(top),
        "$defs": _plain(definitions),
    }


def _plain(node: Any) -> Any:
    """Without defaults and prose, which `tailrace explain` has; null removes a key of values."""
    if isinstance(node, dict):
        return {
            key: _plain(value) for key, value in node.items() if key not in ("default", "description")
        }
    return [_plain(each) for each in node] if isinstance(node, list) else node


def permissions() -> dict[str, Any]:
    """Rights of the NATS and Redis users, as the local cluster's."""
    return {
        "nats": {user: nats_permissions(user, RUN) for user in SERVICE_USERS},
        "redis": {user: redis_rights(user, RUN) for user in SERVICE_USERS},
    }


def drains() -> dict[str, float]:
    """Seconds for which a service drains by default, by its section; the others end at once."""
    fields = {
        name: {field.name: field.default for field in msgspec.structs.fields(kind)}
        for name, kind in SECTION_KINDS.items()
        if name != "cluster"
    }
    return {name: found["drain_s"] for name, found in fields.items() if "drain_s" in found}


FILES = {
    "values.schema.json": schema,
    "files/drains.json": drains,
    "files/permissions.json": permissions,
    **{f"files/dashboards/{name}.json": partial(dashboard, name) for name in DASHBOARDS},
}


def main() -> int:
    """Write the files, or check that they are up to date."""
    stale = []
    for name, make in FILES.items():
        path, content = CHART / name, json.dumps(make(), indent=1, sort_keys=True) + "\n"
        if not path.exists() or path.read_text() != content:
            stale.append(name)
        if "--check" not in sys.argv[1:]:
            path.write_text(content)
    return int(bool(stale) and "--check" in sys.argv[1:])


if __name__ == "__main__":
    raise SystemExit(main())
