"""Every torch-free image imports its service with what its build installs, and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STAGE = re.compile(r"^FROM (\S+) AS (\S+)\n((?:(?!FROM ).*\n?)*)", re.MULTILINE)
ALONE = {"tokenizers"}  # installed without what it requires, which serves downloads
PROGRAM = """
import importlib, sys
from importlib.machinery import PathFinder
blocked = set(sys.argv[2].split(","))
class Present:
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in blocked else PathFinder.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Present()
importlib.import_module(sys.argv[1])
"""


def images() -> dict[str, tuple[str, str]]:
    """Extras and module of each image without torch, by target."""
    stages = {
        name: (base, body) for base, name, body in STAGE.findall((ROOT / "Dockerfile").read_text())
    }
    found = {}
    for name, (base, body) in stages.items():
        if base == "service":
            builder = re.search(r"--from=(build-\S+) /opt/extra", body)
            extras = re.search(r"install.sh (\S+)", stages[builder.group(1)][1]) if builder else None
            module = re.search(r'ENTRYPOINT \["python", "-m", (?:"tailrace.start", )?"(\S+)"\]', body)
            assert module is not None, name
            found[name] = (extras.group(1) if extras else "", module.group(1))
    return found


IMAGES = images()


def installed_with(extras: str) -> set[str]:
    """Distributions that the image has, with all that they require."""
    found: set[str] = set()
    wanted = [Requirement(each) for each in PROJECT["dependencies"]]
    for extra in filter(None, extras.split(",")):
        wanted += [Requirement(each) for each in PROJECT["optional-dependencies"][extra]]
    while wanted:
        each = wanted.pop()
        name = canonicalize_name(each.name)
        if name == "tailrace":
            own = [PROJECT["optional-dependencies"][extra] for extra in each.extras]
            wanted += [Requirement(line) for lines in own for line in lines]
        elif name not in found and (each.marker is None or each.marker.evaluate({"extra": ""})):
            found.add(name)
            wanted += [] if name in ALONE else _required_by(name, each.extras)
    return found


def _required_by(name: str, extras: set[str]) -> list[Requirement]:
    try:
        lines = [Requirement(line) for line in requires(name) or ()]
    except PackageNotFoundError:
        return []  # of another platform
    kinds = [{"extra": extra} for extra in ("", *extras)]
    kept = [each for each in lines if each.marker is None or any(map(each.marker.evaluate, kinds))]
    return [Requirement(str(each).split(";")[0]) for each in kept]


def test_the_images_start_services_as_a_local_cluster_does() -> None:
    started = re.findall(
        r'^ENTRYPOINT \["python", "-m", (.+)\]$', (ROOT / "Dockerfile").read_text(), re.MULTILINE
    )
    services = [each for each in started if not each.startswith('"tailrace_cli.')]
    assert len(services) == len(started) - 1
    assert all(re.fullmatch(r'"tailrace.start", "tailrace_\w+"', each) for each in services)


@pytest.mark.parametrize("target", IMAGES)
def test_an_image_has_all_that_its_service_imports(target: str) -> None:
    extras, module = IMAGES[target]
    present = installed_with(extras)
    absent = {
        package
        for package, distributions in packages_distributions().items()
        if not present & {canonicalize_name(each) for each in distributions}
        and not package.startswith(("tailrace", "_"))
    }
    assert "torch" in absent
    module = module if "." in module else f"{module}.__main__"
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, module, ",".join(absent)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
