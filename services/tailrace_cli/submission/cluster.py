"""Releases, pods and logs of one namespace, by the Helm SDK and the official client of Kubernetes.

Every failure is a `ConfigError` that names context, namespace or release and the remedy.
"""

import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import tailrace_cli
from tailrace.config import ConfigError
from tailrace.import_path import load_extra

_PACKAGE = Path(tailrace_cli.__file__).parent
_TIMEOUT_S = 30
_CHART = "tailrace"


class Pod(NamedTuple):
    """A pod of a release, as its status says."""

    name: str
    component: str
    state: str
    is_ready: bool
    restarts: int
    error: str = ""


class LogLine(NamedTuple):
    """A line of a pod's log."""

    component: str
    text: str


def chart_folder() -> Path:
    """Folder of the chart: inside the installed package, or beside the sources of a checkout."""
    shipped = _PACKAGE / "chart"
    return shipped if shipped.is_dir() else _PACKAGE.parents[1] / "helm" / "tailrace"


class Cluster:
    """One namespace, reached by a context of the kubeconfig; `kubeconfig` empty: the usual one."""

    def __init__(self, context: str, namespace: str, kubeconfig: str = "") -> None:
        self.context = context
        self.namespace = namespace
        self._kubeconfig = kubeconfig or None
        self._helm = load_extra("helm_python", "submit", "--context")
        self._client = load_extra("kubernetes.client", "submit", "--context")
        http = load_extra("urllib3.exceptions", "submit", "--context")
        self._no_answer: tuple[type[Exception], ...] = (OSError, http.HTTPError)
        self._check_context(load_extra("kubernetes.config", "submit", "--context"))

    def _check_context(self, config: Any) -> None:
        """Find the context, and take the namespace that it names unless one is given."""
        try:
            contexts, _ = config.list_kube_config_contexts(config_file=self._kubeconfig)
            found = next((each for each in contexts if each["name"] == self.context), None)
            if found is None:
                names = ", ".join(each["name"] for each in contexts) or "none"
                raise ConfigError(
                    f"--context: {self.context!r} is not in the kubeconfig (there: {names})"
                )
            self.namespace = self.namespace or found["context"].get("namespace") or "default"
            self._api = config.new_client_from_config(self._kubeconfig, context=self.context)
        except config.ConfigException as error:
            raise ConfigError(
                f"--context: no usable kubeconfig ({error}): set KUBECONFIG, or name it in --kubeconfig"
            ) from error

    @contextmanager
    def _releases(self) -> Iterator[Any]:
        helm = self._helm
        given = {"kubeconfig_path": self._kubeconfig, "kube_context": self.context}
        try:
            with helm.Config(**given, namespace=self.namespace) as config:
                yield config
        except helm.HelmKubeError as error:
            raise ConfigError(
                f"--context {self.context}: {error}: is the cluster there, and may you use namespace "
                f"{self.namespace}?"
            ) from error

    def values(self, release: str) -> dict[str, Any] | None:
        """Values that a release of the chart was given; None without a release of this name."""
        with self._releases() as config:
            try:
                if config.get_metadata(release).get("chart", _CHART) != _CHART:
                    return None
                return dict(config.get_values(release) or {})
            except self._helm.HelmNotFoundError:
                return None

    def names(self) -> list[str]:
        """Names of the namespace's releases of the chart."""
        with self._releases() as config:
            return [each["name"] for each in config.list() if each.get("chart_name", _CHART) == _CHART]

    def install(self, release: str, values: Mapping[str, Any], chart: Path) -> None:
        """Install the chart; values that it refuses are `ConfigError` with the keys' names."""
        with self._releases() as config:
            try:
                config.install(chart, release, dict(values), namespace=self.namespace)
            except self._helm.HelmKubeError:
                raise
            except self._helm.HelmError as error:
                if release in self.names():  # failed on its way
                    config.uninstall(release, ignore_not_found=True)
                raise ConfigError(f"release {release} was not installed: {error}") from error

    def uninstall(self, release: str, timeout_s: float) -> None:
        """Remove a release, and wait until its pods have ended."""
        with self._releases() as config:
            try:
                config.uninstall(release, timeout=max(1, int(timeout_s)), wait="watcher")
            except self._helm.HelmNotFoundError as error:
                raise self.unknown(release) from error
            except self._helm.HelmReleaseError as error:
                raise ConfigError(f"release {release}: {error}") from error

    def unknown(self, release: str) -> ConfigError:
        """The error for a release that is not there."""
        names = ", ".join(self.names()) or "none"
        return ConfigError(f"no release {release} in namespace {self.namespace} (there: {names})")

    def pods(self, release: str, component: str = "") -> list[Pod]:
        """Pods of a release, of all components or of those whose names begin so."""
        selector = f"app.kubernetes.io/instance={release}"
        call = self._client.CoreV1Api(self._api).list_namespaced_pod
        found = self._asked(call, self.namespace, label_selector=selector).items
        pods = sorted((_pod(each) for each in found), key=lambda pod: pod.name)
        return [pod for pod in pods if pod.component.startswith(component)]

    def run_state(self, release: str) -> str:
        """State of the run's newest Job: running, finished or failed; `not started` without one."""
        selector = f"app.kubernetes.io/instance={release},app.kubernetes.io/component=run"
        call = self._client.BatchV1Api(self._api).list_namespaced_job
        jobs = self._asked(call, self.namespace, label_selector=selector).items
        if not jobs:
            return "not started"
        ends = {"Complete": "finished", "Failed": "failed"}
        newest = max(jobs, key=lambda job: str(job.metadata.creation_timestamp or ""))
        conditions = newest.status.conditions if newest.status else None
        held = [each.type for each in conditions or () if each.status == "True"]
        return next((ends[each] for each in held if each in ends), "running")

    def log(self, pod: Pod, lines: int) -> list[LogLine]:
        """Newest lines of a pod's log; none while its container has not started."""
        call = self._client.CoreV1Api(self._api).read_namespaced_pod_log
        try:
            text = self._asked(call, pod.name, self.namespace, tail_lines=lines)
        except ConfigError:
            return []
        return [LogLine(pod.component, line) for line in str(text).splitlines()]

    def follow(self, pods: list[Pod], lines: int) -> Iterator[LogLine]:
        """Lines of several pods' logs as they come, until all have ended."""
        found: queue.SimpleQueue[LogLine | None] = queue.SimpleQueue()
        for pod in pods:
            threading.Thread(target=self._read, args=(pod, lines, found), daemon=True).start()
        num_open = len(pods)
        while num_open:
            line = found.get()
            if line is None:
                num_open -= 1
            else:
                yield line

    def _read(self, pod: Pod, lines: int, found: "queue.SimpleQueue[LogLine | None]") -> None:
        call = self._client.CoreV1Api(self._api).read_namespaced_pod_log
        options = {"follow": True, "tail_lines": lines, "_preload_content": False}
        try:
            response = call(pod.name, self.namespace, **options)
            for line in response:
                for each in line.decode(errors="replace").splitlines():
                    found.put(LogLine(pod.component, each))
        except (self._client.ApiException, *self._no_answer) as error:
            found.put(LogLine(pod.component, f"no log of {pod.name}: {error}".splitlines()[0]))
        finally:
            found.put(None)

    def _asked(self, call: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return call(*arguments, _request_timeout=_TIMEOUT_S, **options)
        except self._client.ApiException as error:
            raise ConfigError(
                f"the cluster of context {self.context} refuses: {error.status} {error.reason}: may "
                f"you read pods and jobs of namespace {self.namespace}?"
            ) from error
        except self._no_answer as error:
            raise ConfigError(
                f"the cluster of context {self.context} does not answer: {error}"
            ) from error


def _pod(found: Any) -> Pod:
    statuses = found.status.container_statuses or []
    waiting = [each.state.waiting.reason for each in statuses if each.state and each.state.waiting]
    return Pod(
        name=found.metadata.name,
        component=found.metadata.labels.get("app.kubernetes.io/component", ""),
        state=waiting[0] if waiting else found.status.phase,
        is_ready=bool(statuses) and all(each.ready for each in statuses),
        restarts=sum(each.restart_count for each in statuses),
        error=next(filter(None, map(_error, statuses)), ""),
    )


def _error(status: Any) -> str:
    """Last line of a container that waits to start again after a failure, or has failed for good."""
    if status.ready:
        return ""
    ends = [
        state.terminated for state in (status.state, status.last_state) if state and state.terminated
    ]
    lines = (ends[0].message or "").splitlines() if ends and ends[0].exit_code else []
    return lines[-1] if lines else ""
