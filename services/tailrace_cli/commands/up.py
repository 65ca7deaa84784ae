"""`tailrace up`: the local cluster of an experiment, until Ctrl-C."""

from tailrace_cli.cluster.attached import Attachment
from tailrace_cli.commands.cluster_run import keep_up, prepare_run_dir
from tailrace_cli.commands.options import (
    Attach,
    ConfigName,
    ConfigPath,
    ExperimentArgument,
    Overrides,
    Overwrite,
)
from tailrace_cli.experiment import load_given


def up(
    experiment: ExperimentArgument = None,
    overrides: Overrides = None,
    config_path: ConfigPath = None,
    config_name: ConfigName = None,
    overwrite: Overwrite = False,
    attach: Attach = None,
) -> None:
    """Start the local cluster and keep it up until Ctrl-C."""
    loaded = load_given(experiment, overrides, config_path, config_name)
    loaded, num_gpus = prepare_run_dir(loaded, overwrite=overwrite)
    keep_up(loaded, Attachment(*attach, overwrite) if attach else None, num_gpus)
