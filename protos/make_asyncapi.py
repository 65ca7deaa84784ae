"""Writes `asyncapi.yaml` and `schemas/*.json`: the contract of tools for workers in other languages.

`python protos/make_asyncapi.py` writes them, `--check` only says whether they are what the messages say
(exit code 1 if not).
"""

import argparse
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import yaml

from tailrace_protos import subjects, tool
from tailrace_protos.base import JSON_CONTENT_TYPE, MSGPACK_CONTENT_TYPE

FOLDER = Path(__file__).parent
MESSAGES = (
    tool.CallTool,
    tool.ToolAccepted,
    tool.ToolResult,
    tool.ProbeTools,
    tool.ToolsProbed,
    tool.CancelTools,
    tool.ReleaseToolSession,
    tool.ToolSessionReleased,
)
HEADERS = {
    "Content-Type": f"`{JSON_CONTENT_TYPE}`, or `{MSGPACK_CONTENT_TYPE}` (default); also of the reply.",
    "traceparent": "W3C trace context, optional.",
}
REFUSAL_HEADERS = {
    "Nats-Service-Error-Code": "400: the request is wrong; 503: full or shutting down, try again.",
    "Nats-Service-Error": "Why.",
    "Tailrace-Error": "`invalid`, `overloaded`, `not_ready` or `internal`.",
    "Retry-After": "Seconds after which trying again makes sense; with 503.",
}


def documents() -> dict[Path, str]:
    """Every generated file and its content."""
    made = {FOLDER / "asyncapi.yaml": yaml.safe_dump(asyncapi(), sort_keys=False, width=100)}
    for kind in MESSAGES:
        schema = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            **msgspec.json.schema(kind),
        }
        _dedent(schema["$defs"])
        made[FOLDER / "schemas" / f"{_tag(kind)}.json"] = json.dumps(schema, indent=2) + "\n"
    return made


def asyncapi() -> dict[str, Any]:
    """The whole description, as AsyncAPI 3.0 wants it."""
    _, components = msgspec.json.schema_components(MESSAGES, ref_template="#/components/schemas/{name}")
    _dedent(components)
    to_worker = ("CallTool", "ProbeTools", "CancelTools", "ReleaseToolSession")
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Tailrace tools",
            "version": "1.0.0",
            "description": inspect.getdoc(tool),
        },
        "defaultContentType": JSON_CONTENT_TYPE,
        "channels": {
            "tool": _channel(subjects.tool("{name}"), ["CallTool"], "Calls for any worker, all runs."),
            "runTool": _channel(
                subjects.tool("{name}", "{run}"),
                ["CallTool"],
                "Calls for workers of one run; these win.",
            ),
            "worker": _channel(
                subjects.tool_worker("{worker_id}"), to_worker, "What is for one worker alone."
            ),
            "reply": {
                "address": None,
                "description": "The reply subject of a request.",
                "messages": _messages(
                    [kind.__name__ for kind in MESSAGES if _is_reply(kind)] + ["Refusal"]
                ),
            },
        },
        "operations": {
            "acceptCall": _operation("tool", "CallTool", ["ToolAccepted", "ToolResult", "Refusal"]),
            "acceptCallOfRun": _operation(
                "runTool", "CallTool", ["ToolAccepted", "ToolResult", "Refusal"]
            ),
            "acceptCallOfSession": _operation(
                "worker", "CallTool", ["ToolAccepted", "ToolResult", "Refusal"]
            ),
            "answerProbe": _operation("worker", "ProbeTools", ["ToolsProbed"]),
            "cancel": _operation("worker", "CancelTools", []),
            "releaseSession": _operation("worker", "ReleaseToolSession", ["ToolSessionReleased"]),
        },
        "components": {
            "messages": {
                **{kind.__name__: _message(kind) for kind in MESSAGES},
                "Refusal": {
                    "summary": "The request will not be served; the payload is empty.",
                    "headers": _headers(REFUSAL_HEADERS),
                },
            },
            "schemas": components,
        },
    }


def _channel(address: str, messages: Any, description: str) -> dict[str, Any]:
    names = [part.strip("{}") for part in address.split(".") if part.startswith("{")]
    return {
        "address": address,
        "description": description,
        "parameters": {name: {} for name in names},
        "messages": _messages(messages),
    }


def _operation(channel: str, message: str, replies: list[str]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "action": "receive",
        "channel": {"$ref": f"#/channels/{channel}"},
        "messages": [{"$ref": f"#/channels/{channel}/messages/{message}"}],
    }
    if replies:
        operation["reply"] = {
            "channel": {"$ref": "#/channels/reply"},
            "messages": [{"$ref": f"#/channels/reply/messages/{name}"} for name in replies],
        }
    return operation


def _messages(names: Any) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/messages/{name}"} for name in names}


def _message(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {
        "summary": (inspect.getdoc(kind) or "").splitlines()[0],
        "headers": _headers(HEADERS),
        "payload": {"$ref": f"#/components/schemas/{kind.__name__}"},
    }


def _headers(described: dict[str, str]) -> dict[str, Any]:
    properties = {name: {"type": "string", "description": text} for name, text in described.items()}
    return {"type": "object", "properties": properties}


def _dedent(components: dict[str, Any]) -> None:
    """Descriptions as they read, not as they are indented in the source."""
    for component in components.values():
        component["description"] = inspect.cleandoc(component.get("description", ""))


def _is_reply(kind: type[msgspec.Struct]) -> bool:
    return kind.__name__.startswith("Tool")


def _tag(kind: type[msgspec.Struct]) -> str:
    return str(kind.__struct_config__.tag)


def main() -> int:
    """Write, or check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if something changed"
    )
    is_check = parser.parse_args().check
    stale = [
        path
        for path, content in documents().items()
        if not path.exists() or path.read_text() != content
    ]
    for path in stale:
        if not is_check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(documents()[path])
        sys.stdout.write(f"{'out of date' if is_check else 'written'}: {path.relative_to(FOLDER)}\n")
    return 1 if stale and is_check else 0


if __name__ == "__main__":
    sys.exit(main())
