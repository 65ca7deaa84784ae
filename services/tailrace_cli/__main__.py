"""`tailrace`: the command line. Exit codes: 0 done, 1 the run failed, 2 the user can mend it."""

import sys
from collections.abc import Sequence
from functools import wraps
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import tailrace
from tailrace.config import ConfigError
from tailrace.log import configure
from tailrace_cli.cluster.attached import Attachment
from tailrace_cli.cluster.supervisor import USER_ERROR, RunEndedError
from tailrace_cli.commands import runs as run_commands
from tailrace_cli.commands import train as train_command
from tailrace_cli.commands.cluster_run import keep_up, prepare_run_dir
from tailrace_cli.commands.explain import explain
from tailrace_cli.commands.import_config import import_config as convert_config
from tailrace_cli.commands.import_config import write as write_config
from tailrace_cli.commands.init import init as init_example
from tailrace_cli.commands.simulate import app as simulate_app
from tailrace_cli.commands.simulate import simulate as simulate_clusters
from tailrace_cli.commands.submit import GivenExperiment, Wanted
from tailrace_cli.commands.submit import submit as submit_run
from tailrace_cli.commands.sweep import commands_of, sweep_runs
from tailrace_cli.commands.sweep import sweep as run_sweep
from tailrace_cli.commands.tools import app as tools_app
from tailrace_cli.commands.validate import Target
from tailrace_cli.commands.validate import validate as validate_experiment
from tailrace_cli.commands.why import why
from tailrace_cli.console import plain_console
from tailrace_cli.experiment import Experiment, load, locate
from tailrace_cli.reference import is_key
from tailrace_cli.submission.cluster import Cluster
from tailrace_cli.validation import check_experiment

app = typer.Typer(
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(tools_app, name="tools")
app.add_typer(simulate_app, name="simulate")
console = plain_console()

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


def _print_version(is_asked: bool) -> None:
    if is_asked:
        console.print(f"tailrace {tailrace.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Train language-model agents with reinforcement learning, as services over message queues."""


@app.command()
def init(
    example: Annotated[str, typer.Argument(help="Name of an example; none: list them.")] = "",
    to: Annotated[str, typer.Option(help="New folder for it; default: its name, here.")] = "",
) -> None:
    """Copy an example into a folder of your own, to change it; without a name, list the examples."""
    init_example(example, to, console)


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
    jobs: Annotated[
        int, typer.Option(help="Runs of a sweep (seed=1,2,3) that go on at once.", min=1)
    ] = 1,
) -> None:
    """Train on a local cluster of every service; ends with a summary and report.html.

    Several values of a key (`seed=1,2,3`) are a sweep: a run for each, and a comparison at the end.
    """
    settings = _with_workflow(overrides, workflow)
    if (config_path or config_name) and experiment is not None:
        settings, experiment = [experiment, *settings], None
    if swept := sweep_runs(settings):
        if attach or summary_file:
            raise ConfigError("--attach and --summary-file are for one run, not for a sweep")
        path = locate(experiment, config_path, config_name)
        runs = commands_of(path, swept, ["--overwrite"] if overwrite else [])
        raise typer.Exit(run_sweep(runs, jobs, runs[0][0].path.parent, console))
    loaded = _experiment(experiment, settings, config_path, config_name)
    train_command.check_summary_file(summary_file)
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
    loaded, num_gpus = prepare_run_dir(loaded, console, overwrite=overwrite)
    keep_up(loaded, console, _attachment(attach, overwrite), num_gpus)


@app.command()
def submit(
    context: Annotated[str, typer.Option(help="Context of the kubeconfig.")],
    experiment: ExperimentArgument = None,
    overrides: Overrides = None,
    namespace: run_commands.Namespace = "",
    release: Annotated[str, typer.Option(help="The standing release.")] = "shared",
    name: Annotated[str, typer.Option(help="Name of the run's release; default: exp_name.")] = "",
    values: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="Values of the chart; may be repeated.")
    ] = None,
    kubeconfig: run_commands.Kubeconfig = "",
) -> None:
    """Submit an experiment to a standing release on Kubernetes (docs/kubernetes.md).

    `tailrace status`, `logs` and `stop` follow it with the same --context.
    """
    path = locate(experiment, None, None)
    loaded = load(path, overrides or [])
    cluster = Cluster(context, namespace, kubeconfig)
    source = GivenExperiment(loaded, path, overrides or [])
    submit_run(source, Wanted(release, name, values or []), cluster, console)


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
    gpus: Annotated[int, typer.Option(help="The machine has this number of GPUs.", min=0)] = 0,
    gpu_memory: Annotated[str, typer.Option(help="Memory of each of them, like 80GiB.")] = "",
    model_config: Annotated[
        str, typer.Option(metavar="FILE", help="With --fast: a config.json in place of the model's.")
    ] = "",
    config_path: ConfigPath = None,
    config_name: ConfigName = None,
) -> None:
    """Load what an experiment names, compare sizes, and print problems; starts no service.

    Modules, environments, data (first rows), tokenizer, chat template, devices, lengths, memory.
    `--gpus 8 --gpu-memory 80GiB` asks for a machine that is not here; with `--fast` only the model's
    configuration is read.
    """
    loaded = _experiment(experiment, overrides, config_path, config_name)
    target = Target(elsewhere, gpus, gpu_memory, model_config)
    validate_experiment(loaded, console, fast=fast, show=show, target=target)


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

    The key of --endpoint is taken from OPENAI_API_KEY. Exit code 1: no run would train the episode.
    """
    from tailrace_cli.commands.episode import play_in_terminal  # loads torch: seconds

    loaded = _experiment(experiment, overrides, config_path, config_name)
    check_experiment(loaded)
    exit_code = play_in_terminal(
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
    raise typer.Exit(exit_code)


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
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file of -o.")] = False,
    show_all: Annotated[bool, typer.Option("--all", help="List harmless settings, too.")] = False,
) -> None:
    """Write another system's configuration in our keys; settings without a place go to stderr.

    The last line says whether the experiment runs or what it needs. Exit code 2: it needs something.

    A recipe that is a shell script: put `tailrace import-config SYSTEM --` in place of
    `python3 -m ...` in a copy of the script, and run that copy.
    """
    converted = convert_config(system, words)
    if output:
        write_config(converted, Path(output), overwrite=overwrite)
    else:
        sys.stdout.write(converted.text)
    for line in converted.remarks(with_harmless=show_all):
        sys.stderr.write(f"{line}\n")
    raise typer.Exit(USER_ERROR if (strict and converted.left) or not converted.is_valid else 0)


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
def doctor(
    engine: Annotated[
        str, typer.Option(help="Check this engine with --model: torch, vllm, sglang, hf, module:Class.")
    ] = "",
    model: Annotated[str, typer.Option(help="Folder of the model for --engine.")] = "",
    engine_args: Annotated[str, typer.Option(help="Arguments of the engine, as JSON.")] = "",
) -> None:
    """Say what this machine gives, what is missing, and what to do about it."""
    from tailrace_cli.commands.doctor import doctor as report
    from tailrace_cli.commands.doctor_engine import doctor_engine

    if engine or model or engine_args:
        raise typer.Exit(doctor_engine(console, engine or "torch", model, engine_args))
    raise typer.Exit(report(console))


@simulate_app.callback(invoke_without_command=True)
@wraps(simulate_clusters)
def simulate(**options: Any) -> None:
    """Simulate, with the options of the function that it wraps, and draw the pictures."""
    done = simulate_clusters(**options)
    if done.to is not None:
        from tailrace_cli.simulation.pictures import draw  # matplotlib takes a second

        draw(done.rows, done.timelines, done.to)


for each in (explain, why, *run_commands.COMMANDS):
    app.command()(each)


def refuse_dashed_keys(arguments: Sequence[str]) -> None:
    """Raise `ConfigError` for a key that is written as an option (`--group_size=4`)."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    command = commands.get(next(iter(arguments), "").replace("_", "-"))
    options = {name for each in command.params for name in each.opts} if command else set()
    for argument in takewhile(lambda each: each != "--", arguments):
        name, _, value = argument.partition("=")
        key = name[2:].replace("-", "_")
        if argument.startswith("--") and name.replace("_", "-") not in options and is_key(key):
            raise ConfigError(f"{name} is a key, no option: write {key}={value or '...'}")


def main() -> None:
    """Entry point: users' mistakes end with one line and exit code 2, never with a traceback."""
    try:
        configure(form="console")
        refuse_dashed_keys(sys.argv[1:])
        app()
    except (ConfigError, RunEndedError) as error:
        console.print(f"error: {error}", style="red", soft_wrap=True)
        sys.exit(USER_ERROR if getattr(error, "exit_code", USER_ERROR) == USER_ERROR else 1)
    except PermissionError as error:  # a run's files are its owner's alone
        console.print(f"error: {error.filename} is not this user's: be its owner", style="red")
        sys.exit(USER_ERROR)


if __name__ == "__main__":
    main()
