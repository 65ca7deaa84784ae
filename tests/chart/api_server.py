"""A Kubernetes API server in memory: it keeps the objects that are sent, and runs nothing."""

from __future__ import annotations

import base64
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

GROUPS = {
    "v1": ["Secret", "ConfigMap", "Service", "ServiceAccount", "PersistentVolumeClaim", "Pod"],
    "apps/v1": ["Deployment", "StatefulSet"],
    "batch/v1": ["Job"],
    "policy/v1": ["PodDisruptionBudget"],
    "networking.k8s.io/v1": ["NetworkPolicy", "Ingress"],
    "rbac.authorization.k8s.io/v1": ["Role", "RoleBinding"],
}
Key = tuple[str, str, str]  # namespace, plural, name


def plural(kind: str) -> str:
    """Name of a kind in paths."""
    return f"{kind.lower()[:-1]}ies" if kind.endswith("y") else f"{kind.lower()}s"


KINDS = {plural(kind): (kind, group) for group, kinds in GROUPS.items() for kind in kinds}


def merge(base: Any, change: Any) -> Any:
    """JSON merge patch."""
    if not isinstance(change, dict) or not isinstance(base, dict):
        return change
    merged = base | {key: merge(base.get(key), value) for key, value in change.items()}
    return {key: value for key, value in merged.items() if value is not None}


def fields(message: bytes) -> list[tuple[int, bytes]]:
    """Fields of a protobuf message that have a length, in order."""
    found, at = [], 0

    def number() -> int:
        nonlocal at
        value, shift = 0, 0
        while True:
            byte = message[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(message):
        tag = number()
        length = number()
        if tag & 7 == 2:
            found.append((tag >> 3, message[at : at + length]))
            at += length
    return found


def table(pairs: list[bytes]) -> dict[str, bytes]:
    """A protobuf map with keys of text."""
    entries = [dict(fields(each)) for each in pairs]
    return {each[1].decode(): each.get(2, b"") for each in entries}


def decoded(body: bytes) -> Any:
    """A request's body; Helm's record of a release, a Secret, comes as protobuf."""
    if not body.startswith(b"k8s\0"):
        return yaml.safe_load(body) if body else None
    envelope = dict(fields(body[4:]))
    secret = fields(envelope[2])
    metadata = fields(dict(secret).get(1, b""))
    labels = table([value for number, value in metadata if number == 11])
    data = table([value for number, value in secret if number == 2])
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": dict(metadata).get(1, b"").decode(),
            "labels": {key: value.decode() for key, value in labels.items()},
        },
        "type": dict(secret).get(3, b"").decode(),
        "data": {key: base64.b64encode(value).decode() for key, value in data.items()},
    }


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # Helm opens many connections at once


class FakeApiServer:
    """Answers as an API server does; `objects` and `logs` may be changed by a test."""

    def __init__(self, *namespaces: str) -> None:
        self.objects: dict[Key, dict[str, Any]] = {}
        self.logs: dict[str, str] = {}  # of pods
        self.namespaces = namespaces
        self.hooks: list[dict[str, Any]] = []  # objects of Helm's hooks; its Jobs complete at once
        self._lock = Lock()
        self._server = _Server(("127.0.0.1", 0), self._handler())
        Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def kubeconfig(self, *contexts: str) -> str:
        """A kubeconfig with these contexts, all of this server."""
        return yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "c", "cluster": {"server": self.url}}],
                "users": [{"name": "u", "user": {}}],
                "contexts": [{"name": n, "context": {"cluster": "c", "user": "u"}} for n in contexts],
                "current-context": contexts[0],
            }
        )

    def names(self, kind: str, namespace: str = "team") -> set[str]:
        """Names of the objects of a kind."""
        return {name for space, of, name in self.objects if (space, of) == (namespace, plural(kind))}

    def put(self, found: dict[str, Any], namespace: str = "team") -> None:
        """Keep an object, as a controller that makes it would."""
        self.objects[namespace, plural(found["kind"]), found["metadata"]["name"]] = found

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method: str, target: str, body: Any) -> tuple[int, Any]:
        """Status and content for a request."""
        parts = urlsplit(target)
        words = parts.path.strip("/").split("/")
        if found := self._discovery("/".join(words)):
            return 200, found
        if words[:3] == ["api", "v1", "namespaces"] and len(words) == 4:
            return (200, {"kind": "Namespace"}) if words[3] in self.namespaces else missing(words[3])
        if "namespaces" not in words:
            return missing(parts.path)
        namespace, of, *rest = words[words.index("namespaces") + 1 :]
        if namespace not in self.namespaces:
            return missing(namespace)
        if rest[1:] == ["log"]:
            return (200, self.logs[rest[0]]) if rest[0] in self.logs else missing(rest[0])
        with self._lock:
            if not rest:
                return self._collection(method, namespace, of, parse_qs(parts.query), body)
            return self._object(method, (namespace, of, rest[0]), body)

    def _collection(
        self, method: str, namespace: str, of: str, query: dict[str, list[str]], body: Any
    ) -> tuple[int, Any]:
        if method == "POST":
            return self._create((namespace, of, body["metadata"]["name"]), body)
        wanted = query.get("labelSelector", [""])[0]
        labels = dict(each.split("=", 1) for each in wanted.split(",") if "=" in each)
        items = [
            found
            for (space, kind, _), found in self.objects.items()
            if (space, kind) == (namespace, of)
            and labels.items() <= found["metadata"].get("labels", {}).items()
        ]
        kind, group = KINDS[of]
        return 200, {"kind": f"{kind}List", "apiVersion": group, "metadata": {}, "items": items}

    def _create(self, key: Key, body: dict[str, Any]) -> tuple[int, Any]:
        if key in self.objects:
            return 409, failure(409, "AlreadyExists", f"{key[2]} already exists")
        self.objects[key] = body | {"metadata": {"uid": key[2], "namespace": key[0]} | body["metadata"]}
        if "helm.sh/hook" in body["metadata"].get("annotations", {}):
            self.hooks.append(body)
            done = {"conditions": [{"type": "Complete", "status": "True"}], "succeeded": 1}
            self.objects[key] |= {"status": done}
        return 201, self.objects[key]

    def _object(self, method: str, key: Key, body: Any) -> tuple[int, Any]:
        if key not in self.objects:
            return self._create(key, body) if method == "PATCH" else missing(key[2])
        if method == "DELETE":
            return 200, self.objects.pop(key)
        if method in ("PUT", "PATCH"):
            self.objects[key] = merge(self.objects[key], body)
        return 200, self.objects[key]

    def _discovery(self, path: str) -> dict[str, Any] | None:
        if path == "version":
            return {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
        if path == "api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "apis":
            groups = [named_group(each) for each in GROUPS if "/" in each]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        if path == "openapi/v3":
            return {"paths": {path_of(each): {"serverRelativeURL": f"/openapi/v3/{path_of(each)}"}
                              for each in GROUPS}}  # fmt: skip
        if path.startswith("openapi/v3/"):
            return specification(path.removeprefix("openapi/v3/"))
        group = path.partition("/")[2]
        if group not in GROUPS:
            return None
        verbs = ["get", "list", "create", "update", "patch", "delete"]
        kinds = [
            {"name": plural(kind), "singularName": kind.lower(), "namespaced": True, "kind": kind,
             "verbs": verbs}
            for kind in GROUPS[group]
        ]  # fmt: skip
        return {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": group,
            "resources": kinds,
        }

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def _serve(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                text = self.rfile.read(length)
                status, found = server.answer(self.command, self.path, decoded(text))
                content = (found if isinstance(found, str) else json.dumps(found)).encode()
                self.send_response(status)
                kind = "text/plain" if isinstance(found, str) else "application/json"
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        return Handler


def path_of(group: str) -> str:
    """Path of a group of the API."""
    return f"apis/{group}" if "/" in group else f"api/{group}"


def specification(path: str) -> dict[str, Any]:
    """OpenAPI of a group: it says that the server itself checks the fields."""
    group, _, version = path.partition("/")[2].rpartition("/")
    patched = {}
    for kind in GROUPS[path.partition("/")[2]]:
        patch = {
            "parameters": [{"name": "fieldValidation", "in": "query"}],
            "x-kubernetes-group-version-kind": {"group": group, "version": version, "kind": kind},
        }
        patched[f"/{path}/namespaces/{{namespace}}/{plural(kind)}/{{name}}"] = {"patch": patch}
    return {"openapi": "3.0.0", "info": {"title": "api", "version": "1"}, "paths": patched}


def named_group(version: str) -> dict[str, Any]:
    """A group of the API in its list of groups."""
    both = {"groupVersion": version, "version": version.partition("/")[2]}
    return {"name": version.partition("/")[0], "versions": [both], "preferredVersion": both}


def failure(code: int, reason: str, message: str) -> dict[str, Any]:
    """An error as the API says it."""
    status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return {**status, "code": code, "reason": reason, "message": message}


def missing(name: str) -> tuple[int, dict[str, Any]]:
    """The answer for an object that is not there."""
    return 404, failure(404, "NotFound", f"{name!r} not found")
