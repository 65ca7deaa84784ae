"""`tailrace`: the command line. Exit codes: 0 done, 1 the run failed, 2 the user can mend it."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from tailrace.config import ConfigError
from tailrace.log import configure
from tailrace_cli.cluster.attached import Attachment
from tailrace_cli.cluster.supervisor import USER_ERROR, RunEndedError
from tailrace_cli.commands.cluster_run import keep_up, prepare_run_dir
from tailrace_cli.commands.explain import explain as explain_key
from tailrace_cli.commands.import_config import import_config as convert_config
from tailrace_cli.commands.import_config import write as write_config
from tailrace_cli.commands.tools import app as tools_app
from tailrace_cli.commands.validate import print_resolved
from tailrace_cli.commands.validate import validate as validate_experiment
from tailrace_cli.experiment import Experiment, load, locate
from tailrace_cli.validation import check_experiment

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train language-model agents with reinforcement learning, as services over message queues.",
)
app.add_typer(tools_app, name="tools")
console = Console()

ExperimentArgument = Annotated[
    str | None, typer.Argument(help="Experiment file, or a folder with experiment.yaml.")
]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value changes.")]
ConfigPath = Annotated[str | None, typer.Option("--config_path", help="Folder of the experiment file.")]
ConfigName = Annotated[str | None, typer.Option("--config_name", help="Its name without .yaml.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Delete an earlier run of this name.")]
Attach = Annotated[
    tuple[str, str] | None,
    typer.Option("--attach", metavar="NATS_URL REDIS_URL", help="Use servers that already run."),
]


def _experiment(
    experiment: str | None,
    overrides: list[str] | None,
    config_path: str | None,
    config_name: str | None,
) -> Experiment:
    """Load; with `--config_path` or `--config_name` all arguments are overrides."""
    given = list(overrides or [])
    if (config_path or config_name) and experiment is not None:
        given.insert(0, experiment)
        experiment = None
    return load(locate(experiment, config_path, config_name), given)


def _with_workflow(overrides: list[str] | None, workflow: str) -> list[str]:
    return [*(overrides or []), *([f"agents.workflow.agent={workflow}"] if workflow else [])]


def _attachment(attach: tuple[str, str] | None, overwrite: bool) -> Attachment | None:
    return Attachment(*attach, overwrite) if attach else None


@app.command()
def train(
    experiment: ExperimentArgument = None,
    overrides: Overrides = None,
    config_path: ConfigPath = None,
    config_name: ConfigName = None,
    overwrite: Overwrite = False,
    attach: Attach = None,
    workflow: Annotated[
        str, typer.Option(metavar="MODULE.CLASS", help="Your agent: plays the rows of the data sets.")
    ] = "",
    summary_file: Annotated[
        str, typer.Option(help="Write the run's directory and last metrics there, as JSON.")
    ] = "",
) -> None:
    """Train on a local cluster of every service; ends with a summary and report.html."""
    from tailrace_cli.commands import train as train_command  # draws curves: matplotlib takes a second

    settings = _with_workflow(overrides, workflow)
    loaded = _experiment(experiment, settings, config_path, config_name)
    attachment = _attachment(attach, overwrite)
    exit_code = train_command.train(loaded, console, overwrite=overwrite, attachment=attachment)
    if summary_file and exit_code == 0:
        train_command.write_summary(loaded, summary_file)
    raise typer.Exit(exit_code)


@app.command("eval")
def evaluate(
    experiment: ExperimentArgument = None,
    overrides: Overrides = None,
    checkpoint: Annotated[str, typer.Option(help="Checkpoint folder; default: the run's newest.")] = "",
    config_path: ConfigPath = None,
    config_name: ConfigName = None,
    attach: Attach = None,
) -> None:
    """Evaluate a checkpoint on the experiment's fixed evaluation set."""
    from tailrace_cli.commands import train as train_command

    first = _experiment(experiment, overrides, config_path, config_name)
    check_experiment(first)
    evaluation = train_command.evaluation_of(first, checkpoint)
    attachment = _attachment(attach, overwrite=True)
    raise typer.Exit(train_command.evaluate(evaluation, console, attachment=attachment))


@app.command()
def up(
    experiment: ExperimentArgument = None,
    overrides: Overrides = None,
    config_path: ConfigPath = None,
    config_name: ConfigName = None,
    overwrite: Overwrite = False,
    attach: Attach = None,
) -> None:
    """Start the local cluster and keep it up until Ctrl-C."""
    loaded = _experiment(experiment, overrides, config_path, config_name)
    prepare_run_dir(loaded, console, overwrite=overwrite)
    keep_up(loaded, console, _attachment(attach, overwrite))


@app.command()
def validate(
    experiment: ExperimentArgument = None,
    overrides: Overrides = None,
    fast: Annotated[bool, typer.Option("--fast", help="Check keys and values alone.")] = False,
    show: Annotated[
        bool, typer.Option("--print", help="Print the experiment with every default first.")
    ] = False,
    elsewhere: Annotated[
        bool,
        typer.Option("--elsewhere", help="The run will be on another machine: skip devices, memory."),
    ] = False,
    config_path: ConfigPath = None,
    config_name: ConfigName = None,
) -> None:
    """Load what an experiment names, compare sizes, and print problems; starts no service.

    Modules, environments, data (first rows), tokenizer, chat template, devices, lengths, memory.
    """
    loaded = _experiment(experiment, overrides, config_path, config_name)
    if show:
        print_resolved(loaded, console)
    validate_experiment(loaded, console, fast=fast, on_machine=not elsewhere)


@app.command()
def episode(
    experiment: ExperimentArgument = None,
    overrides: Overrides = None,
    checkpoint: Annotated[str, typer.Option(help="Checkpoint folder; default: the run's newest.")] = "",
    task_seed: Annotated[
        int, typer.Option(help="Seed of the task to play, or number of the row.", min=0)
    ] = 0,
    tag: Annotated[str, typer.Option(help="What to play; default: the first of eval_tags.")] = "",
    endpoint: Annotated[
        str, typer.Option(help="Base URL of an OpenAI endpoint to use instead of a checkpoint.")
    ] = "",
    model: Annotated[str, typer.Option(help="The model's name at --endpoint.")] = "",
    tool: Annotated[
        list[str] | None, typer.Option(help="module:tool to run in this process; may be repeated.")
    ] = None,
    config_path: ConfigPath = None,
    config_name: ConfigName = None,
) -> None:
    """Play one episode in this terminal, turn by turn, without any cluster.

    The key of --endpoint is taken from OPENAI_API_KEY.
    """
    from tailrace_cli.commands.episode import play_in_terminal  # loads torch: seconds

    loaded = _experiment(experiment, overrides, config_path, config_name)
    check_experiment(loaded)
    play_in_terminal(
        loaded,
        console,
        checkpoint=checkpoint,
        task_seed=task_seed,
        tag=tag,
        endpoint=endpoint,
        model=model,
        tools=tool or (),
        user_modules=locate(experiment, config_path, config_name).parent,
    )


@app.command("import-config")
def import_config(
    system: Annotated[str, typer.Argument(help="roll, verl or areal.")],
    words: Annotated[
        list[str],
        typer.Argument(
            help="A file (YAML, or a list of key=value), with key=value changes behind it; or, behind "
            "--, the words that a shell passes to the trainer."
        ),
    ],
    output: Annotated[str, typer.Option("-o", "--output", help="Write there, not to stdout.")] = "",
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 2 if anything is left.")] = False,
) -> None:
    """Write another system's configuration in our keys; settings without a place go to stderr.

    A recipe that is a shell script: put `tailrace import-config SYSTEM --` in place of
    `python3 -m ...` in a copy of the script, and run that copy.
    """
    converted = convert_config(system, words)
    if output:
        write_config(converted, Path(output))
    else:
        sys.stdout.write(converted.text)
    for line in (*converted.left, *converted.notes):
        sys.stderr.write(f"{line}\n")
    raise typer.Exit(USER_ERROR if strict and converted.left else 0)


@app.command()
def explain(
    key: Annotated[str, typer.Argument(help="A key of an experiment, or a section: learner.critic.")],
) -> None:
    """Print a key's meaning, type, default and readers; of a section, all its keys."""
    explain_key(key, console)


@app.command()
def export(
    to: Annotated[str, typer.Option(help="New folder for the model.")],
    experiment: ExperimentArgument = None,
    overrides: Overrides = None,
    checkpoint: Annotated[str, typer.Option(help="Checkpoint folder; default: the run's newest.")] = "",
    dtype: Annotated[
        Literal["", "float32", "bfloat16", "float16"],
        typer.Option(help="Type of the weights; default: as they were trained."),
    ] = "",
    config_path: ConfigPath = None,
    config_name: ConfigName = None,
) -> None:
    """Write a checkpoint as a plain Hugging Face model: weights, configuration, tokenizer."""
    from tailrace_cli.commands.export import export as export_model  # loads torch: seconds

    loaded = _experiment(experiment, overrides, config_path, config_name)
    check_experiment(loaded)
    export_model(loaded, to, console, checkpoint=checkpoint, dtype=dtype)


@app.command()
def doctor() -> None:
    """Say what this machine gives, what is missing, and what to do about it."""
    from tailrace_cli.commands.doctor import doctor as report

    raise typer.Exit(report(console))


def main() -> None:
    """Entry point: users' mistakes end with one line and exit code 2, never with a traceback."""
    configure(service="cli", run="", instance_id="cli")
    try:
        app()
    except ConfigError as error:
        console.print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(USER_ERROR)
    except RunEndedError as error:
        console.print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(USER_ERROR if error.exit_code == USER_ERROR else 1)


if __name__ == "__main__":
    main()
