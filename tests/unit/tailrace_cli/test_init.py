"""`tailrace init`, `--version`, and the one line where an extra is missing."""

import importlib.util
import re
import shutil
import stat
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tailrace
from tailrace.__main__ import extra_of, main
from tailrace.config import ConfigError
from tailrace.sdk.tool import as_offer
from tailrace_cli.__main__ import app
from tailrace_cli.commands.init import examples, examples_folder


def run(*arguments: str) -> str:
    """Run a command that succeeds; its output."""
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_an_example_is_copied_into_the_current_folder_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "tailrace train own_algorithm" in run("init", "own_algorithm")
    copied = {each.name for each in (tmp_path / "own_algorithm").iterdir()}
    assert copied == {"experiment.yaml", "my_algorithm.py"}


def test_a_folder_of_any_name_is_told_as_a_shell_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "tailrace train 'my lake'" in run("init", "examples/frozen_lake/", "--to", "my lake")


def test_a_copy_of_a_package_that_is_for_reading_alone_can_be_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, copy = tmp_path / "package", tmp_path / "mine"
    compiled = shutil.ignore_patterns("__pycache__")  # it changes while other tests import the example
    shutil.copytree(examples_folder() / "own_algorithm", package / "own_algorithm", ignore=compiled)
    for path in (*package.glob("*/*"), package / "own_algorithm"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    monkeypatch.setattr("tailrace_cli.commands.init.examples_folder", lambda: package)
    run("init", "own_algorithm", "--to", str(copy))
    assert all(path.stat().st_mode & stat.S_IWUSR for path in (copy, *copy.iterdir()))


@pytest.mark.parametrize("name", examples())
def test_links_and_commands_of_a_copy_lead_somewhere(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run("init", name, "--to", "mine")
    for file in (each for each in Path("mine").rglob("*") if each.suffix in (".md", ".yaml")):
        text = file.read_text()
        links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
        lost = [link for link in links if "//" not in link and not (file.parent / link).exists()]
        assert lost == [], file
        named = re.findall(r"tailrace (?:train|episode|eval|validate) ([\w./-]+)", text)
        assert [each for each in named if not Path(each).exists()] == [], file


def test_the_pages_of_the_documentation_are_named(tmp_path: Path) -> None:
    listed = run("init")
    (page,) = re.findall(r"Documentation: (\S+)", listed)
    assert Path(page).read_text().startswith("# ")


def test_a_copied_example_passes_validation(tmp_path: Path) -> None:
    run("init", "frozen_lake", "--to", str(tmp_path / "mine"))
    assert "valid" in run("validate", str(tmp_path / "mine"), "--fast")


@pytest.mark.parametrize("name", ["tools", "tool_worker_js", "notebooks"])
def test_an_example_without_an_experiment_is_copied_and_its_page_says_how_to_use_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"follow {name}/README.md" in run("init", name)
    source = examples_folder() / name
    shipped = {each.name for each in source.iterdir()} - {"node_modules", "__pycache__", "runs"}
    assert {each.name for each in (tmp_path / name).iterdir()} == shipped
    assert "```bash" in (tmp_path / name / "README.md").read_text()


def test_copied_tools_are_tools(tmp_path: Path) -> None:
    run("init", "tools", "--to", str(tmp_path / "mine"))
    spec = importlib.util.spec_from_file_location("copied_tools", tmp_path / "mine" / "my_tools.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert as_offer(module.add).spec.name == "add"


def test_copied_notebooks_find_the_example_that_their_page_has_one_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run("init", "notebooks")
    page = (tmp_path / "notebooks" / "README.md").read_text()
    for command in re.findall(r"^tailrace (.+)$", page, re.MULTILINE):
        run(*command.split())
    text = (tmp_path / "notebooks" / "train_from_python.ipynb").read_text()
    (experiment,) = re.findall(r'tailrace\.Trainer\(\\"(.+?)\\"\)', text)
    assert (tmp_path / "notebooks" / experiment / "experiment.yaml").is_file()


def test_a_misspelt_example_gets_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean frozen_lake"):
        run("init", "frozenlake", "--to", str(tmp_path / "mine"))


def test_explain_without_a_name_lists_all_names() -> None:
    listed = run("explain")
    assert "learner" in listed
    assert "max_staleness" in listed


def test_without_a_name_every_example_is_listed_with_what_it_trains() -> None:
    listed = run("init")
    assert {name for name in examples() if name in listed} == set(examples())
    assert all(examples().values())


def test_an_unknown_example_is_refused_with_the_names_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"no example 'lake'.*frozen_lake"):
        run("init", "lake")


def test_a_folder_that_exists_is_never_written_to(tmp_path: Path) -> None:
    (tmp_path / "experiment.yaml").write_text("mine")
    with pytest.raises(ConfigError, match="--to"):
        run("init", "frozen_lake", "--to", str(tmp_path))
    assert (tmp_path / "experiment.yaml").read_text() == "mine"


def test_examples_lie_beside_the_sources_or_in_the_package() -> None:
    assert (examples_folder() / "frozen_lake" / "experiment.yaml").is_file()


def test_the_version_is_that_of_the_installed_package() -> None:
    assert tailrace.__version__ == version("tailrace")
    assert run("--version").strip() == f"tailrace {version('tailrace')}"


@pytest.mark.parametrize(
    ("module", "extra"),
    [("typer", "cli"), ("hydra", "cli"), ("nats_server", "cli"), ("torch", "inference"), ("foo", None)],
)
def test_a_missing_module_is_told_with_an_extra_that_brings_it(module: str, extra: str | None) -> None:
    assert extra_of(module) == extra


def test_a_command_that_lacks_a_package_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tailrace_cli.__main__", None)
    monkeypatch.setattr("tailrace.__main__.extra_of", lambda module: "cli")
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    target = tmp_path / "file" / "lake"
    with pytest.raises(ConfigError, match=f"cannot copy to {target}: Not a directory: .* --to"):
        run("init", "own_algorithm", "--to", str(target))


def test_a_wrong_variable_of_the_logs_is_a_mistake_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tailrace", "init"])
    monkeypatch.setenv("TAILRACE_LOG", "xml")
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: TAILRACE_LOG='xml': use one of json, console\n"


def test_a_summary_that_could_not_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    example, summary = str(examples_folder() / "own_algorithm"), str(tmp_path / "none" / "it.json")
    with pytest.raises(ConfigError, match=f"--summary-file {summary}: name a file in a folder that"):
        run("train", example, f"output_dir={tmp_path}", "--summary-file", summary)
    assert not any(tmp_path.iterdir())


def test_an_interruption_while_the_command_line_is_loaded_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(_name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupt)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
