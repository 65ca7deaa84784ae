"""Scale of Deployments and StatefulSets by the official client, in threads."""

import asyncio
from typing import Any

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException
from urllib3.exceptions import HTTPError

from tailrace.config import ConfigError
from tailrace_autoscaler.ports import WorkloadsUnavailableError

_TIMEOUT_S = 10.0


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
        self._apps = client.AppsV1Api(api)
        self._namespace = namespace

    async def replicas(self, kind: str, name: str) -> int:
        """Replicas in the object's scale."""
        return int((await self._call("read", kind, name)).spec.replicas or 0)

    async def num_pods(self, kind: str, name: str) -> int:
        """Pods that exist."""
        return int((await self._call("read", kind, name)).status.replicas or 0)

    async def set_replicas(self, kind: str, name: str, replicas: int) -> None:
        """Patch the object's scale."""
        await self._call("patch", kind, name, {"spec": {"replicas": replicas}})

    async def _call(self, verb: str, kind: str, name: str, *body: Any) -> Any:
        word = {"Deployment": "deployment", "StatefulSet": "stateful_set"}[kind]
        method = getattr(self._apps, f"{verb}_namespaced_{word}_scale")
        try:
            return await asyncio.to_thread(
                method, name, self._namespace, *body, _request_timeout=_TIMEOUT_S
            )
        except (ApiException, HTTPError, OSError) as error:
            reason = getattr(error, "reason", "") or error
            raise WorkloadsUnavailableError(f"{verb} scale of {kind} {name}: {reason}") from error
