"""A new service in a copy of the tree: its own folder, and the few lines elsewhere that register it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FOLDER = {
    "__init__.py": "",
    "README.md": "# echo\n\nAnswers each request with its own text.\n",
    "config.py": '''"""Configuration of the echo service."""

from __future__ import annotations

from tailrace.config import Config


class EchoConfig(Config, frozen=True, kw_only=True):
    """Section `echo` of an experiment."""

    num_repeats: int = 1
    """Number of repetitions of a text in the answer."""
''',
    "metrics.py": '"""Prometheus metrics of the echo service."""\n',
    "__main__.py": '''"""Process of the echo service."""

from __future__ import annotations

import sys

from tailrace.runtime import Args, Service, run_service
from tailrace_echo.config import EchoConfig


def build(args: Args) -> Service:
    """Returns the service, not started."""
    args.section("echo", EchoConfig)
    return Service("echo", args.run, args.endpoints, instance_id=args.instance_id)


if __name__ == "__main__":
    sys.exit(run_service(build))
''',
}

# File -> (line after which the new line goes, or the text that it extends; new line or text).
REGISTRATION = {
    "protos/tailrace_protos/subjects.py": [('    "weight_sync",\n', '    "echo",\n')],
    "pyproject.toml": [
        ('    "tailrace_weight_sync",\n', '    "tailrace_echo",\n'),
        (" | tailrace_weight_sync", " | tailrace_echo"),
    ],
    "services/tailrace_cli/experiment.py": [
        (
            "from tailrace_agents.config import AgentsConfig\n",
            "from tailrace_echo.config import EchoConfig\n",
        ),
        ("    weight_sync: WeightSyncConfig\n", "    echo: EchoConfig\n"),
    ],
}  # fmt: skip

PROGRAM = """
from pathlib import Path
from tailrace_cli.cluster.permissions import SERVICE_USERS, nats_permissions
from tailrace_cli.cluster.plan import Site, service_specs
from tailrace_cli.cluster.servers import ServerAddresses
from tailrace_cli.experiment import decode
from tailrace_cli.reference import READERS_OF_RUN

made = decode({"exp_name": "a", "scheduler": {"tags": ["a"]}, "echo": {"num_repeats": 3}}, "x.yaml")
site = Site(Path("x.yaml"), Path("."), ServerAddresses("", "", {}), 1)
specs = {spec.name: spec for spec in service_specs(made.cluster, 0, site)}
print(made.echo.num_repeats, "num_repeats: 3" in made.to_yaml())
print(specs["echo"].argv[2:4], "echo" in SERVICE_USERS, "echo" in READERS_OF_RUN["exp_name"])
print(nats_permissions("echo", "r")["subscribe"]["allow"])
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources with the service `echo`."""
    root = tmp_path_factory.mktemp("tree")
    for name in ("protos", "shared", "services"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    folder = root / "services" / "tailrace_echo"
    folder.mkdir()
    for name, text in FOLDER.items():
        (folder / name).write_text(text)
    for name, additions in REGISTRATION.items():
        text = (root / name).read_text()
        for anchor, new in additions:
            assert text.count(anchor) == 1, (
                f"{name}: {anchor!r} stands there {text.count(anchor)} times"
            )
            text = text.replace(anchor, anchor + new)
        (root / name).write_text(text)
    return root


def run_in(tree: Path, *argv: str) -> str:
    paths = os.pathsep.join(str(tree / name) for name in ("protos", "shared", "services"))
    result = subprocess.run(
        argv,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_a_new_service_is_its_folder_and_at_most_six_lines_elsewhere(tree: Path) -> None:
    assert sum(map(len, REGISTRATION.values())) <= 6
    section, process, subscriptions = run_in(tree, sys.executable, "-c", PROGRAM).splitlines()
    assert section == "3 True"
    assert process == "['tailrace.start', 'tailrace_echo'] True True"
    assert "'r.echo.>'" in subscriptions


def test_the_import_walls_stand_around_a_new_service(tree: Path) -> None:
    linter = str(Path(sys.executable).parent / "lint-imports")
    assert "0 broken" in run_in(tree, linter, "--no-cache")
    core = tree / "services" / "tailrace_echo" / "core"
    core.mkdir()
    (core / "__init__.py").write_text("import nats\nimport tailrace_echo.__main__\n")
    with pytest.raises(AssertionError, match="cores import no handlers, adapters or __main__ BROKEN"):
        run_in(tree, linter, "--no-cache")
