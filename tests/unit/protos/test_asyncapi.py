"""The contract for workers in other languages says what the messages say."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import jsonschema
import msgspec
import pytest
import yaml

from tailrace_protos.base import encode_json
from tailrace_protos.tool import CallTool, ProbeTools, ToolAccepted, ToolErrorKind, ToolResult

PROTOS = Path(__file__).parents[3] / "protos"
MESSAGES = (
    CallTool("c", "t", {"a": 1}, lease_s=3.0),
    ToolAccepted("c", "w", is_idempotent=True),
    ToolResult("c", "t", "text", is_error=True, error_kind=ToolErrorKind.RAISED),
    ProbeTools(("c",)),
)


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_asyncapi", PROTOS / "make_asyncapi.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_generated_files_are_up_to_date() -> None:
    stale = [
        path.name
        for path, content in generator().documents().items()
        if not path.exists() or path.read_text() != content
    ]
    assert stale == [], "run python protos/make_asyncapi.py"


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_fit_their_schemas(message: msgspec.Struct) -> None:
    sent = json.loads(encode_json(message))
    schema = json.loads((PROTOS / "schemas" / f"{sent['type']}.json").read_text())
    jsonschema.validate(sent, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**sent, "type": "something_else"}, schema)


def test_every_reference_of_the_description_leads_somewhere() -> None:
    document = yaml.safe_load((PROTOS / "asyncapi.yaml").read_text())
    references = {part.split('"')[0] for part in json.dumps(document).split('"$ref": "#/')[1:]}
    assert len(references) > 20
    for reference in references:
        node = document
        for step in reference.split("/"):
            node = node[step]
