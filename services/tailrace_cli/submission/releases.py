"""Submitted runs, by the names of their releases: state, logs and end."""

from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Column, Table

from tailrace.config import ConfigError
from tailrace_cli.console import tell_error
from tailrace_cli.log_text import print_log, readable
from tailrace_cli.submission.cluster import Cluster, Pod

_PROGRESS_LINES = 5


def status(cluster: Cluster, release: str, console: Console) -> None:
    """Print a submitted run's state, its pods, and the newest lines of its progress."""
    values = _known(cluster, release)
    run = values.get("experiment", {}).get("exp_name", "")
    console.print(f"{release}: run {run} {cluster.run_state(release)}", soft_wrap=True)
    name = Column("pod", overflow="fold")  # never cut: other commands need it whole
    table = Table(name, "component", "state", "ready", "restarts", box=None, pad_edge=False)
    pods = cluster.pods(release)
    for pod in pods:
        ready = "yes" if pod.is_ready else "no"
        table.add_row(pod.name, pod.component, pod.state, ready, str(pod.restarts))
    if pods:
        console.print(table)
    for pod in pods:
        if pod.error:
            console.print(
                f"{pod.name} ended: {pod.error}", soft_wrap=True, markup=False, highlight=False
            )
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
        tell_error(f"pods still end after {timeout_s:g} s: {names}")
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
