"""The page of settings says what the tables say, and tables set keys that there are."""

from __future__ import annotations

import dataclasses
import runpy
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest
import yaml

from tailrace.config import RunConfig
from tailrace.config.settings import TABLES
from tailrace_cli.commands.import_config import SYSTEMS
from tailrace_cli.experiment import Experiment, decode

DOCS = Path(__file__).parents[3] / "docs"
SECTIONS = {
    field.name: get_type_hints(Experiment)[field.name] for field in dataclasses.fields(Experiment)
}
SET = {
    key
    for table in (*TABLES.values(), *(system.rules for system in SYSTEMS.values()))
    for setting in table
    for key in setting.sets
}


def test_the_page_is_up_to_date() -> None:
    made = runpy.run_path(str(DOCS / "make_settings.py"))["page"]()
    assert (DOCS / "settings.md").read_text() == made, "make docs"


def test_the_example_on_the_page_is_an_experiment() -> None:
    example = (DOCS / "settings.md").read_text().split("```yaml")[1].split("```")[0]
    experiment = decode({"exp_name": "a", **yaml.safe_load(example)}, "settings.md")
    assert experiment.learner.num_mini_batches == 4
    assert experiment.cluster.num_inference_servers == 2


def below(info: Any, step: str) -> Any:
    """The type of `step` in a Struct or dict, optional or not; None: there is no such key."""
    for inner in getattr(info, "types", (info,)):
        for field in getattr(inner, "fields", ()):
            if field.encode_name == step:
                return field.type
        if isinstance(inner, msgspec.inspect.AnyType | msgspec.inspect.DictType):
            return getattr(inner, "value_type", inner)  # an environment's own keys may be any
    return None


@pytest.mark.parametrize("key", sorted(SET))
def test_every_key_that_a_table_sets_is_one_of_a_service_or_of_the_run(key: str) -> None:
    section, *steps = key.split(".")
    in_run = section not in SECTIONS
    info = msgspec.inspect.type_info(RunConfig if in_run else SECTIONS[section])
    for step in [section, *steps] if in_run else steps:
        info = below(info, step)
        assert info is not None, f"{key}: nothing is called {step!r} there"
