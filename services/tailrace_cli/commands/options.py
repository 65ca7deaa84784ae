"""Options and arguments that several commands have, as types for their signatures."""

from typing import Annotated

import typer

ExperimentArgument = Annotated[
    str | None, typer.Argument(help="Experiment file, or a folder with experiment.yaml.")
]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value changes.")]
ConfigPath = Annotated[str | None, typer.Option("--config-path", help="Folder of the experiment file.")]
ConfigName = Annotated[str | None, typer.Option("--config-name", help="Its name without .yaml.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Delete an earlier run of this name.")]
Attach = Annotated[
    tuple[str, str] | None,
    typer.Option("--attach", metavar="NATS_URL REDIS_URL", help="Use servers that already run."),
]
Checkpoint = Annotated[str, typer.Option(help="Checkpoint folder; default: the run's newest.")]

Run = Annotated[str, typer.Argument(metavar="RUN", help="A run's name or directory.")]
OutputDir = Annotated[str, typer.Option("--output-dir", help="Folder of the runs.")]
Context = Annotated[str, typer.Option(help="Context of the cluster: RUN is a submitted run there.")]
Namespace = Annotated[str, typer.Option(help="Namespace; default: the context's.")]
Kubeconfig = Annotated[str, typer.Option(metavar="FILE", help="Instead of the usual kubeconfig.")]
