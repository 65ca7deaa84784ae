"""Every values file renders, is valid for each supported Kubernetes, and breaks no policy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml

from tests.chart.conftest import (
    CHART,
    EVERYTHING,
    ROOT,
    SEED,
    TWO_NODES,
    VALUES_FILES,
    Render,
    merged,
)

NAMES = [path.stem for path in VALUES_FILES]
KUBERNETES = [f"1.{minor}" for minor in range(29, 36)]
CUSTOM = {
    "PodMonitor",
    "PrometheusRule",
    "ScaledObject",
    "LeaderWorkerSet",
}  # of operators; Kubernetes has no schema of them

# Checkov's checks that the chart does not follow, and why.
SKIPPED = {
    "CKV_K8S_11": "no CPU limits: throttling would stall token streams; requests share the cores",
    "CKV_K8S_43": "digests are values (image.digests); a default would pin an image of nobody",
    "CKV_K8S_15": "IfNotPresent by default: local images are in no registry; image.pullPolicy sets it",
    "CKV_K8S_38": "the run's Job sets replicas at the end, the builtin autoscaler during the run: "
    "both need their token",
    "CKV_K8S_8": "Job and test pod end by themselves; nothing restarts them for being slow",
    "CKV_K8S_9": "Job and test pod serve nobody",
}

MODES = [
    {"autoscaling": {"enabled": True, "mode": mode, "prometheusUrl": "http://p"}}
    for mode in ("metric", "keda", "hpa", "builtin")
]
STANDING = {"mode": "standing", "standing": {"runs": ["a", "b"]}}


def all_values() -> dict[str, tuple[str, dict[str, Any]]]:
    cases = {name: (name, {}) for name in NAMES}
    for mode in MODES:
        cases[f"everything-{mode['autoscaling']['mode']}"] = ("laptop-cpu", merged(EVERYTHING, mode))
    cases["nodes"] = ("laptop-cpu", TWO_NODES)
    cases["standing"] = ("laptop-cpu", STANDING)
    cases["on-standing"] = ("laptop-cpu", {"servers": {"release": "shared"}})
    return cases


@pytest.fixture(params=all_values(), name="case")
def chosen(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return all_values()[request.param]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("version", ["v1.29.0", "v1.35.0"])
def test_strict_lint_has_no_finding(name: str, version: str, values: dict[str, dict[str, Any]]) -> None:
    report = helm_python.lint(CHART, values[name], strict=True, kube_version=version)
    assert [each for each in report["messages"] if each["severity"] >= 2] == []
    assert report["errors"] == []


@pytest.fixture(scope="module")
def valid() -> set[str]:
    """Versions and contents found valid."""
    return set()


def test_every_object_is_valid_for_every_kubernetes(
    case: tuple[str, dict[str, Any]], render: Render, valid: set[str]
) -> None:
    checked = 0
    objects = render(case[0], case[1])
    for version in KUBERNETES:
        for (kind, name), each in objects.items():
            if kind in CUSTOM:
                continue
            checked += 1
            content = version + json.dumps(each, sort_keys=True)
            if content in valid:  # most objects are the same in several cases
                continue
            try:
                kubernetes_validate.validate(each, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                pytest.fail(f"{kind} {name} for {version}: {error}")
            valid.add(content)
    assert checked >= len(KUBERNETES) * 10


def test_the_same_values_give_the_same_objects(
    case: tuple[str, dict[str, Any]], render: Render
) -> None:
    without_tls = merged(case[1], {"tls": {"existingSecret": "mine"}})  # certificates have dates
    assert render(case[0], without_tls) == render(case[0], without_tls)


def test_checkov_finds_nothing_but_what_is_explained(tmp_path: Path, render: Render) -> None:
    for name, (file, change) in all_values().items():
        documents = render(file, change).values()
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump_all(documents))
    result = subprocess.run(
        [
            *(sys.executable, "-m", "checkov.main", "--framework", "kubernetes", "--skip-download"),
            *("--directory", str(tmp_path), "--output", "json", "--compact", "--quiet"),
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    report = json.loads(result.stdout)
    assert report["summary"]["resource_count"] > 200
    failed = {each["check_id"] for each in report["results"]["failed_checks"]}
    assert failed - SKIPPED.keys() == set()
    assert SKIPPED.keys() - failed == set(), "these are followed: explain them no more"
    tokens = {
        each["resource"]
        for each in report["results"]["failed_checks"]
        if each["check_id"] == "CKV_K8S_38"
    }
    assert all("demo-run" in each or "demo-autoscaler" in each for each in tokens)


@pytest.mark.parametrize("name", NAMES)
def test_the_experiment_of_a_values_file_is_valid(name: str, values: dict[str, dict[str, Any]]) -> None:
    program = (
        "import json, sys\n"
        "from tailrace_cli.experiment import decode\n"
        "from tailrace_cli.validation import check_experiment\n"
        "found = json.load(sys.stdin)\n"
        "if 'pretrain' in found:\n"  # a folder in a volume of the cluster
        "    assert found['pretrain'].startswith('/models/')\n"
        "    found['pretrain'] = 'owner/name'\n"
        "check_experiment(decode(found, 'values'))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(values[name]["experiment"]),
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr


def test_generated_files_are_up_to_date() -> None:
    result = subprocess.run([sys.executable, "helm/make_files.py", "--check"], cwd=ROOT, check=False)
    assert result.returncode == 0, "run make docs"


def test_the_seed_makes_passwords_and_nothing_is_random_with_it(render: Render) -> None:
    secret = render()["Secret", "demo-agents"]["stringData"]
    assert len(secret["nats-password"]) == 40
    assert secret["nats-password"] != secret["redis-password"]
    assert SEED["credentials"]["seed"] not in secret.values()
