"""`tailrace submit`: a run on Kubernetes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
import yaml
from rich.console import Console

from tailrace.config import ConfigError
from tailrace_cli.commands.options import ExperimentArgument, Kubeconfig, Namespace, Overrides
from tailrace_cli.console import stdout
from tailrace_cli.experiment import Experiment, composed, count_gateways, load, locate, with_epochs
from tailrace_cli.submission.cluster import Cluster, chart_folder
from tailrace_cli.submission.plan import (
    check_paths,
    check_standing,
    merged,
    release_name,
    run_values,
    user_modules,
)
from tailrace_cli.validation import check_experiment


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


def submit(
    context: Annotated[str, typer.Option(help="Context of the kubeconfig.")],
    experiment: ExperimentArgument = None,
    overrides: Overrides = None,
    namespace: Namespace = "",
    release: Annotated[str, typer.Option(help="The standing release.")] = "shared",
    name: Annotated[str, typer.Option(help="Name of the run's release; default: exp_name.")] = "",
    values: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="Values of the chart; may be repeated.")
    ] = None,
    kubeconfig: Kubeconfig = "",
) -> None:
    """Submit an experiment to a standing release on Kubernetes (docs/kubernetes.md).

    `tailrace status`, `logs` and `stop` follow it with the same --context.
    """
    path = locate(experiment, None, None)
    source = GivenExperiment(load(path, overrides or []), path, overrides or [])
    cluster = Cluster(context, namespace, kubeconfig)
    install(source, Wanted(release, name, values or []), cluster, stdout)


def install(source: GivenExperiment, wanted: Wanted, cluster: Cluster, console: Console) -> None:
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
    if num_sandboxes := source.loaded.cluster.num_sandboxes:
        made = merged({"sandbox": {"replicas": num_sandboxes}}, made)
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
