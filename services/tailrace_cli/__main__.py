"""`tailrace`: the command line. Exit codes: 0 done, 1 the run failed, 2 the user can mend it."""

import sys
from collections.abc import Sequence
from itertools import takewhile
from typing import Annotated, Any

import typer

import tailrace
from tailrace.config import ConfigError
from tailrace.log import configure
from tailrace_cli.command_table import CommandTable, load_command
from tailrace_cli.console import stdout, tell_error
from tailrace_cli.exit_codes import USER_ERROR, RunEndedError

app = typer.Typer(
    cls=CommandTable,
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        stdout.print(f"tailrace {tailrace.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Train language-model agents with reinforcement learning, as services over message queues."""


def refuse_dashed_keys(arguments: Sequence[str]) -> None:
    """Raise `ConfigError` for a key that is written as an option (`--group_size=4`)."""
    own = list(takewhile(lambda each: each != "--", arguments))
    options = _options(arguments) if any(each[:2] == "--" for each in own) else set()
    for argument, behind in zip(own, [*own[1:], ""], strict=True):
        name, _, value = argument.partition("=")
        is_option = name[:2] != "--" or name.replace("_", "-") in options
        if not is_option and _is_key(key := name[2:].replace("-", "_")):
            raise ConfigError(f"{name} is a key, no option: write {key}={_meant(value, behind)}")


def _meant(value: str, behind: str) -> str:
    """Value of a key: behind its `=`, or the next argument if that is no option and no key."""
    is_value = behind[:1] != "-" and "=" not in behind
    return value or (behind if is_value else "") or "..."


def _options(arguments: Sequence[str]) -> set[str]:
    """Options of the command that the arguments name, and of the groups around it."""
    found: list[Any] = [typer.main.get_command(app)]
    for word in arguments:
        name, below = word.replace("_", "-"), getattr(found[-1], "commands", {})
        if name not in below:
            break
        found.append(below[name] if len(found) > 1 else load_command(name))
    return {"--help", *(name for each in found for one in each.params for name in one.opts)}


def _is_key(name: str) -> bool:
    from tailrace_cli.reference import is_key  # loads every section: half a second

    return is_key(name)


def main() -> None:
    """Entry point: users' mistakes end with one line and exit code 2, never with a traceback."""
    try:
        configure(form="console")
        refuse_dashed_keys(sys.argv[1:])
        app()
    except (ConfigError, RunEndedError) as error:
        tell_error(error)
        sys.exit(USER_ERROR if getattr(error, "exit_code", USER_ERROR) == USER_ERROR else 1)
    except PermissionError as error:  # a run's files are its owner's alone
        tell_error(f"{error.filename} is not this user's: be its owner")
        sys.exit(USER_ERROR)


if __name__ == "__main__":
    main()
