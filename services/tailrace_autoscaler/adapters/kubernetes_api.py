"""Scale of workloads by the official client, in threads."""

import asyncio
from http import HTTPStatus
from typing import Any

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException
from urllib3.exceptions import HTTPError

from tailrace.config import ConfigError
from tailrace_autoscaler.ports import MissingWorkloadError, WorkloadsUnavailableError

_TIMEOUT_S = 10.0
_GROUPS = {
    "Deployment": "apps",
    "StatefulSet": "apps",
    "LeaderWorkerSet": "leaderworkerset.x-k8s.io",
}


def in_cluster() -> tuple[Any, str]:
    """The API client of this pod's ServiceAccount, and its namespace; `ConfigError` elsewhere."""
    try:
        config.load_incluster_config()  # type: ignore[no-untyped-call]
    except ConfigException as error:
        raise ConfigError(f"no Kubernetes API here: {error}; run in a pod with a token") from error
    with open("/var/run/secrets/kubernetes.io/serviceaccount/namespace", encoding="utf-8") as file:
        return client.ApiClient(), file.read().strip()


class KubernetesWorkloads:
    """`Workloads` of one namespace."""

    def __init__(self, api: Any, namespace: str) -> None:
        self._objects = client.CustomObjectsApi(api)  # all groups have the same paths
        self._namespace = namespace

    async def replicas(self, kind: str, name: str) -> int:
        """Replicas in the object's scale."""
        return int((await self._call("get", kind, name)).get("spec", {}).get("replicas") or 0)

    async def num_pods(self, kind: str, name: str) -> int:
        """Pods that exist."""
        return int((await self._call("get", kind, name)).get("status", {}).get("replicas") or 0)

    async def set_replicas(self, kind: str, name: str, replicas: int) -> None:
        """Patch the object's scale."""
        await self._call("patch", kind, name, body={"spec": {"replicas": replicas}})

    async def delete_scaled_object(self, name: str) -> bool:
        """Delete a ScaledObject of KEDA; False if it is gone: KEDA no longer sets replicas."""
        try:
            await asyncio.to_thread(
                self._objects.delete_namespaced_custom_object,
                "keda.sh",
                "v1alpha1",
                self._namespace,
                "scaledobjects",
                name,
                _request_timeout=_TIMEOUT_S,
            )
        except (ApiException, HTTPError, OSError) as error:
            if getattr(error, "status", 0) == HTTPStatus.NOT_FOUND:
                return False
            raise _unavailable(f"delete of ScaledObject {name}", error) from error
        return True

    async def _call(self, verb: str, kind: str, name: str, **body: Any) -> dict[str, Any]:
        method = getattr(self._objects, f"{verb}_namespaced_custom_object_scale")
        if body:
            body["_content_type"] = "application/merge-patch+json"
        try:
            scale: dict[str, Any] = await asyncio.to_thread(
                method,
                _GROUPS[kind],
                "v1",
                self._namespace,
                f"{kind.lower()}s",
                name,
                _request_timeout=_TIMEOUT_S,
                **body,
            )
            return scale
        except (ApiException, HTTPError, OSError) as error:
            raise _unavailable(f"{verb} scale of {kind} {name}", error) from error


def _unavailable(doing: str, error: Exception) -> WorkloadsUnavailableError:
    is_missing = getattr(error, "status", 0) == HTTPStatus.NOT_FOUND
    kind = MissingWorkloadError if is_missing else WorkloadsUnavailableError
    return kind(f"{doing}: {getattr(error, 'reason', '') or error}")
