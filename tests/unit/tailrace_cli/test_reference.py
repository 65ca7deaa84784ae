"""The reference lists what the code reads, tables set keys that exist, and `explain` prints them."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import msgspec
import pytest
import yaml
from typer.testing import CliRunner

from tailrace.config import SECTIONS, ConfigError, RunConfig
from tailrace.config.keys import type_at
from tailrace.config.settings import TABLES
from tailrace_cli.__main__ import app, refuse_dashed_keys
from tailrace_cli.commands.explain import explanation
from tailrace_cli.experiment import SECTION_KINDS, decode
from tailrace_cli.importing.systems import SYSTEMS
from tailrace_cli.reference import READERS_OF_RUN, entries
from tailrace_protos.subjects import SERVICES

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference.md"
SET = {
    key
    for table in (*TABLES.values(), *(system.rules for system in SYSTEMS.values()))
    for rule in table
    for key in rule.sets
}
# Properties of `RunConfig`, and the keys from which they come.
DERIVED = {
    "run_dir": ("output_dir", "exp_name"),
    "logs_dir": ("logging_dir", "output_dir", "exp_name"),
    "export_style": ("granularity",),
}


def test_the_page_is_up_to_date() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_reference.py"))["page"]()
    assert PAGE.read_text() == made, "make docs"


def test_the_example_on_the_page_is_an_experiment() -> None:
    example = PAGE.read_text().split("```yaml")[1].split("```")[0]
    experiment = decode({"exp_name": "a", **yaml.safe_load(example)}, "reference.md")
    assert experiment.learner.num_mini_batches == 4
    assert experiment.cluster.num_inference_servers == 2


@pytest.mark.parametrize("key", sorted(SET))
def test_every_key_that_a_table_sets_is_one_of_a_service_or_of_the_run(key: str) -> None:
    section, _, below = key.partition(".")
    kind, path = (SECTION_KINDS[section], below) if section in SECTIONS else (RunConfig, key)
    assert type_at(msgspec.inspect.type_info(kind), path) is not None, f"there is no key {key}"


def test_every_key_says_what_it_means() -> None:
    assert [entry.name for entry in entries() if not entry.key.meaning] == []
    assert len(entries()) > 350


def test_the_readers_of_the_runs_keys_are_those_in_the_code() -> None:
    found: dict[str, set[str]] = {key: set() for key in RunConfig.__struct_fields__}
    for path in (ROOT / "services").rglob("*.py"):
        service = path.relative_to(ROOT / "services").parts[0].removeprefix("tailrace_")
        if service == "cli" and {"loading", "validate.py"} & set(path.parts):
            continue  # checks and their summary compare keys that others act on
        for name in re.findall(r"\b_?run\.(\w+)", path.read_text()):
            for key in DERIVED.get(name, (name,)):
                if key in found and not path.name.startswith("config"):
                    found[key].add(service)
    in_every_service = (ROOT / "shared/tailrace/tracing/__init__.py").read_text()
    for name in re.findall(r"\brun\.(\w+)", in_every_service):
        found[name] |= set(SERVICES)
    assert {key: set(readers) for key, readers in READERS_OF_RUN.items()} == found


def test_a_key_is_explained_with_type_default_unit_and_readers() -> None:
    said = list(explanation("agents.reward_timeout_s"))
    assert said[0] == "agents.reward_timeout_s"
    assert said[1].startswith("  ")
    assert "request to the reward service" in said[1]
    assert said[2:] == [
        "  type: number",
        "  default: 30.0",
        "  unit: seconds",
        "  read by: agents",
    ]


@pytest.mark.parametrize("key", ["learner.gamma", "gamma"])
def test_another_name_of_a_key_is_explained_by_the_key(key: str) -> None:
    said = "\n".join(explanation(key))
    assert "learner.gamma\n  Discount per policy token" in said
    assert said.endswith("also named: gamma")


def test_a_section_is_a_list_of_its_keys_with_their_defaults() -> None:
    said = list(explanation("learner.critic"))
    assert said[0] == "learner.critic"
    assert any(line.startswith("learner.critic.value_clip (0.2): ") for line in said)
    assert 'learner.critic.training_args ({"learning_rate":0.00001})' in "\n".join(said)
    whole = list(explanation("weight_sync"))
    assert len(whole) == len(SECTION_KINDS["weight_sync"].__struct_fields__)


def test_names_of_environments_stand_for_the_star() -> None:
    assert next(explanation("agents.custom_envs.lake.env_type")) == "agents.custom_envs.*.env_type"
    assert next(explanation("agents.custom_envs.lake.env_config.size")).endswith("env_config.size")


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("learner.gama", "did you mean learner.gamma"),
        ("max_new_tokens", "or agents.generating_args.max_new_tokens"),
        ("agents.max_new_token", "agents.generating_args.max_new_tokens"),
        ("zzz", "docs/reference.md lists all keys"),
    ],
)
def test_an_unknown_key_names_the_nearest(key: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(remedy)):
        list(explanation(key))


def test_the_command_prints_a_key() -> None:
    result = CliRunner().invoke(app, ["explain", "cluster.drain_s"])
    assert result.exit_code == 0
    assert "read by: cli" in result.stdout


@pytest.mark.parametrize(
    ("argument", "written"),
    [("--group_size=4", "group_size=4"), ("--learner.pg_clip", "learner.pg_clip=...")],
)
def test_a_key_written_as_an_option_is_refused_with_how_to_write_it(
    argument: str, written: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(written)):
        refuse_dashed_keys(["train", "examples/frozen_lake", argument])


def refusal(*arguments: str) -> str:
    """The error that a command line gets; empty if it gets none."""
    try:
        refuse_dashed_keys(arguments)
    except ConfigError as error:
        return str(error)
    return ""


def test_options_and_words_for_another_program_are_no_keys() -> None:
    assert refusal("train", "x", "--overwrite", "--help", "--unknown") == ""
    assert refusal("import-config", "verl", "--", "--group_size=3") == ""
    assert "write group_size=3" in refusal("import-config", "verl", "--group_size=3")
    assert "write group_size=4" in refusal("train", "x", "--group_size", "4", "seed=1")
    assert refusal("train", "x", "--group_size", "seed=1").endswith("write group_size=...")


@pytest.mark.parametrize(
    ("name", "title", "key"),
    [
        ("actor_rollout_ref.rollout.n", "verl", "group_size"),
        ("gconfig.n_samples", "AReaL", "group_size"),
        ("rollout_batch_size", "ROLL", "groups_per_step"),
    ],
)
def test_a_setting_of_another_system_is_explained_by_the_key_that_it_becomes(
    name: str, title: str, key: str
) -> None:
    first, *others = explanation(name)
    assert first == f"{name} (of {title}): {key}"
    assert key in others
