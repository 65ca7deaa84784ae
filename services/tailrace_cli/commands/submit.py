"""`tailrace submit`, and `status`, `logs`, `stop` with `--context`: runs on Kubernetes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import typer
import yaml
from rich.console import Console
from rich.table import Table

from tailrace.config import ConfigError
from tailrace_cli.experiment import Experiment, composed, count_gateways, with_epochs
from tailrace_cli.log_text import print_log, readable
from tailrace_cli.submission.cluster import Cluster, Pod, chart_folder
from tailrace_cli.submission.plan import (
    check_paths,
    check_standing,
    merged,
    release_name,
    run_values,
    user_modules,
)
from tailrace_cli.validation import check_experiment

_PROGRESS_LINES = 5


class GivenExperiment(NamedTuple):
    """An experiment with the file and the changes that it comes from."""

    loaded: Experiment
    path: Path
    overrides: Sequence[str] = ()


class Wanted(NamedTuple):
    """Options of a submission. `name` empty: the run's; `values`: files of the chart's values."""

    standing: str
    name: str = ""
    values: Sequence[str] = ()


def submit(source: GivenExperiment, wanted: Wanted, cluster: Cluster, console: Console) -> None:
    """Install the run's release beside the standing one; `ConfigError` before anything is made."""
    run, standing = source.loaded.run.exp_name, wanted.standing
    release = release_name(run, wanted.name)
    content = composed(source.path, source.overrides)
    check_paths(content)
    check_experiment(source.loaded, elsewhere=True)
    standing_values = cluster.values(standing)
    if standing_values is None:
        raise ConfigError(
            f"no standing release {standing} in namespace {cluster.namespace} (releases: "
            f"{', '.join(cluster.names()) or 'none'}): helm install {standing} helm/tailrace "
            f"--namespace {cluster.namespace} --set mode=standing, or name another with --release"
        )
    check_standing(standing, standing_values, run)
    _check_free(cluster, release, run, standing)
    if content.pop("num_epochs", 0):
        content["max_steps"] = with_epochs(source.loaded).run.max_steps
    files = [_values_file(each) for each in wanted.values]
    modules = user_modules(source.path.parent)
    made = run_values(content, standing, standing_values, files, modules)
    if count_gateways(source.loaded):
        made = merged({"gateway": {"enabled": True}}, made)
    cluster.install(release, made, chart_folder())
    where = f"--context {cluster.context} --namespace {cluster.namespace}"
    console.print(f"{release}: run {run} is submitted to {standing} in namespace {cluster.namespace}")
    console.print(f"tailrace status {release} {where}", soft_wrap=True)
    console.print(f"tailrace logs {release} run -f {where}", soft_wrap=True)


def _check_free(cluster: Cluster, release: str, run: str, standing: str) -> None:
    """Raise `ConfigError` if the release, or the run's name on these servers, is taken."""
    for taken in cluster.names():
        known = cluster.values(taken) or {}
        is_same_run = known.get("experiment", {}).get("exp_name") == run
        on_servers = known.get("servers", {}).get("release") == standing
        if taken == release or (is_same_run and on_servers):
            raise ConfigError(
                f"the name is taken: release {taken} is a run ({cluster.run_state(taken)}): remove it "
                f"with tailrace stop {taken} --context {cluster.context} --namespace "
                f"{cluster.namespace}, or give another exp_name"
            )


def _values_file(path: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"--values: cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--values: {path} holds no keys of the chart's values")
    return content


def status(cluster: Cluster, release: str, console: Console) -> None:
    """Print a submitted run's state, its pods, and the newest lines of its progress."""
    values = _known(cluster, release)
    run = values.get("experiment", {}).get("exp_name", "")
    console.print(f"{release}: run {run} {cluster.run_state(release)}", soft_wrap=True)
    table = Table("pod", "component", "state", "ready", "restarts", box=None, pad_edge=False)
    pods = cluster.pods(release)
    for pod in pods:
        ready = "yes" if pod.is_ready else "no"
        table.add_row(pod.name, pod.component, pod.state, ready, str(pod.restarts))
    if pods:
        console.print(table)
    for pod in _of_run(pods):
        print_log(console, (readable(*line, "") for line in cluster.log(pod, _PROGRESS_LINES)))


def logs(
    cluster: Cluster, release: str, component: str, lines: int, follow: bool, console: Console
) -> None:
    """Print the newest lines of the pods' logs; `follow`: go on until the pods have ended."""
    _known(cluster, release)
    component = component.replace("_", "-")
    pods = cluster.pods(release, component)
    if not pods:
        there = ", ".join(sorted({pod.component for pod in cluster.pods(release)})) or "none"
        raise ConfigError(
            f"no pod of {component or 'any service'} in release {release} (there: {there})"
        )
    if follow:
        for line in cluster.follow(pods, lines):
            print_log(console, [readable(*line, "")])
        return
    found = [readable(*line, "") for pod in pods for line in cluster.log(pod, lines)]
    print_log(console, sorted(found, key=lambda line: line[0])[-lines:] if lines else ())


def stop(cluster: Cluster, release: str, timeout_s: float, console: Console) -> None:
    """Remove a submitted run: its services drain, the learner saves a checkpoint; wait for the end."""
    values = _known(cluster, release)
    if values.get("mode", "job") == "standing":
        raise ConfigError(f"{release} is a standing release, no run: helm uninstall removes it")
    cluster.uninstall(release, timeout_s)
    if rest := cluster.pods(release):
        names = ", ".join(pod.name for pod in rest)
        console.print(f"pods still end after {timeout_s:g} s: {names}", style="red")
        raise typer.Exit(1)
    kept = values.get("storage", {}).get("runs", {})
    volume = kept.get("existingClaim") or (f"{release}-runs" if kept.get("keep") else "")
    console.print(
        f"{release}: removed" + (f"; volume {volume} keeps its checkpoints" if volume else "")
    )


def _known(cluster: Cluster, release: str) -> dict[str, Any]:
    values = cluster.values(release)
    if values is None:
        raise cluster.unknown(release)
    return values


def _of_run(pods: Sequence[Pod]) -> list[Pod]:
    return [pod for pod in pods if pod.component == "run"]
