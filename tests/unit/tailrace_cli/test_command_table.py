"""The table of commands: complete without an import, and the same lines as the commands' own help."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from tailrace_cli.__main__ import app
from tailrace_cli.command_table import COMMANDS, load_command

HEAVY = {
    "torch", "transformers", "tokenizers", "hydra", "omegaconf", "matplotlib", "kubernetes",
    "nats", "redis", "zmq", "jinja2", "psutil",
}  # fmt: skip


def imported(program: str, **environment: str) -> set[str]:
    """Modules that a program has imported at its end."""
    last = "\nimport sys\nprint(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", program + last],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stderr.split())


def test_the_command_line_begins_without_a_heavy_package_or_a_command() -> None:
    names = imported("import tailrace_cli.__main__")
    assert names & HEAVY == set()
    assert {name for name in names if name.startswith("tailrace_cli.commands")} == set()


@pytest.mark.parametrize("arguments", [["--help"], ["tools", "--help"], ["status", "--help"]])
def test_help_loads_no_model_and_no_experiment(arguments: list[str]) -> None:
    program = f"""
from tailrace_cli.__main__ import app
app({arguments}, standalone_mode=False)
"""
    assert imported(program) & {"torch", "transformers", "hydra", "matplotlib"} == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_says_what_the_command_says(name: str) -> None:
    command = load_command(name)
    assert command.name == name
    assert " ".join(command.help.partition("\n\n")[0].split()) == COMMANDS[name].summary


def test_no_command_loads_a_model_before_its_arguments_are_read() -> None:
    program = """
from tailrace_cli.command_table import COMMANDS, load_command
for name in COMMANDS:
    load_command(name)
"""
    assert imported(program) & {"torch", "transformers", "matplotlib"} == set()


# As the installed program begins, without arguments.
BARE = "import sys; sys.argv = ['tailrace']; from tailrace.__main__ import main; main()"


def test_the_command_alone_prints_its_help() -> None:
    done = subprocess.run([sys.executable, "-c", BARE], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert "Train on a local cluster of every service" in done.stdout


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_the_command_runs_without_standard_streams(closed: str, tmp_path: Path) -> None:
    words = ["tailrace", "init", "frozen_lake", "--to", str(tmp_path / "mine")]
    program = BARE.replace("['tailrace']", str(words))
    command = f'exec "{sys.executable}" -c "$0" {closed}'
    done = subprocess.run(["/bin/sh", "-c", command, program], check=False)
    assert done.returncode == 0
    assert (tmp_path / "mine" / "experiment.yaml").exists()


def completed(words: str) -> list[str]:
    """Completions of the last word in a shell."""
    environment = {"_TAILRACE_COMPLETE": "complete_bash", "COMP_WORDS": words}
    environment["COMP_CWORD"] = str(len(words.split(" ")) - 1)
    done = subprocess.run(
        [sys.executable, "-c", BARE],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("tailrace st", ["status", "stop"]),
        ("tailrace tools ", ["serve", "ls", "call"]),
        ("tailrace validate --fa", ["--fast"]),
        ("tailrace tools ls --js", ["--json"]),
    ],
)
def test_names_of_commands_and_options_are_completed(words: str, found: list[str]) -> None:
    assert completed(words) == found


def test_a_misspelt_command_gets_the_nearest_names() -> None:
    group = typer.main.get_command(app)
    with pytest.raises(Exception, match="Did you mean 'validate'"):
        app(["valdate"], standalone_mode=False)
    assert set(group.commands) == set(COMMANDS)  # type: ignore[attr-defined]
