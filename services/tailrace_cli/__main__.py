"""`tailrace`: the command line. Exit codes: 0 done, 1 the run failed, 2 the user can mend it."""

import errno
import io
import os
import signal
import sys
from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import Annotated, Any

import typer

import tailrace
from tailrace.config import ConfigError
from tailrace.log import configure
from tailrace.processes import ProcessStartError
from tailrace.start import allow_many_files
from tailrace_cli.command_table import CommandTable, load_command
from tailrace_cli.console import stdout, tell_error
from tailrace_cli.exit_codes import USER_ERROR, RunEndedError

_MORE_PROCESSES = "end other processes of this user, or raise `ulimit -u`"
_REMEDIES = {
    errno.EAGAIN: _MORE_PROCESSES,
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise `ulimit -n`, or end other programs"),
    errno.ENOMEM: "free some memory, or raise `ulimit -v`",
    **dict.fromkeys((errno.ENOLCK, errno.EOPNOTSUPP), "choose a folder on a file system with locks"),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space"),
    errno.EROFS: "choose a folder that can be written",
    **dict.fromkeys(
        (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP), "correct the path"
    ),
}

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
    for argument, behind in pairwise([*own, ""]):
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


def use_ordinary_signals() -> None:
    """Undo what the starting process may have left to this one and its children.

    An ignored SIGCHLD hides their exit codes, and blocked signals end nobody.
    """
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _require_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError(
            "the folder in which this command was started has been deleted: change to another one"
        ) from error


def _refused(error: OSError | RuntimeError) -> str:
    """The system's refusal and the remedy; empty for an error that no user can mend."""
    if isinstance(error, RuntimeError):
        said = str(error)
        return f"{said}: {_MORE_PROCESSES}" if said == "can't start new thread" else ""
    if isinstance(error, PermissionError):  # a run's files are its owner's alone
        return f"{error.filename or 'the process'} is not this user's: be its owner"
    if error.errno not in _REMEDIES:
        return ""
    is_file = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
    place = error.filename or ("the disk" if is_file else "this machine")
    return f"{place}: {error.strerror}: {_REMEDIES[error.errno]}"


def main() -> None:
    """Entry point: users' mistakes end with one line and exit code 2, never with a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of files have bytes that no encoding knows
            stream.reconfigure(errors="backslashreplace")
    use_ordinary_signals()
    allow_many_files()
    try:
        configure(form="console")
        _require_folder()
        refuse_dashed_keys(sys.argv[1:])
        app()
    except (ConfigError, RunEndedError) as error:
        tell_error(error)
        sys.exit(USER_ERROR if getattr(error, "exit_code", USER_ERROR) == USER_ERROR else 1)
    except ProcessStartError as error:
        tell_error(f"{error}: {_MORE_PROCESSES}, or `ulimit -n`")
        sys.exit(USER_ERROR)
    except (OSError, RuntimeError) as error:
        refused = _refused(error)
        if not refused:
            raise
        tell_error(refused)
        sys.exit(USER_ERROR)


if __name__ == "__main__":
    main()
