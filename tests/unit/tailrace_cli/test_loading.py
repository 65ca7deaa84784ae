"""Checks that load what an experiment names: every kind of mistake names its place and the remedy."""

from __future__ import annotations

import json
import os
import threading
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tailrace.import_path import importable_from
from tailrace.toolbox.byte_tokenizer import build_byte_tokenizer
from tailrace_agents.core.environments import EnvHandle
from tailrace_cli.experiment import Experiment, decode, load
from tailrace_cli.loading.checks import Report, combined, steps_of
from tailrace_cli.loading.facts import Loaded, MachineFacts
from tailrace_cli.loading.first_step import notes_of_first_step
from tailrace_cli.loading.process import Loader
from tailrace_cli.validation import problems_of
from tailrace_envs.frozen_lake_tokenizer import build_frozen_lake_tokenizer

EXAMPLES = Path(__file__).parents[3] / "examples"
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
}
EXPERIMENT: dict[str, Any] = {
    "exp_name": "loading",
    "scheduler": {"tags": ["lake"]},
    "agents": {
        "custom_envs": {"lake": {"env_type": "frozen_lake"}},
        "max_episode_tokens": 256,
        "generating_args": {"max_new_tokens": 64},
        "eval_generating_args": {"max_new_tokens": 64},
    },
    "reward": {"rewards": [{"name": "success", "kind": "env_return"}]},
    "learner": {
        "from_scratch": {
            "model_type": "qwen3",
            "tokenizer": "tailrace.toolbox.byte_tokenizer:build_byte_tokenizer",
            "config": SIZES,
        },
        "tensorboard": False,
    },
}
MODULE = '''
import sys
from tailrace.sdk import tool

class Env:
    def __init__(self, text="Go."): self.text = text
    def reset(self, seed=None): return self.text, {}
    def step(self, action): return "", 1.0, True, False, {}
    def close(self): ...

class Old(Env):
    def step(self, action): return "", 1.0, True, {}

class Numb(Env):
    def step(self, action): return "", None, True, False, {}

class Strict(Env):
    def step(self, action): raise ValueError("no move")

class Leaving(Env):
    def __init__(self): sys.exit("no more")

class Unready(Env):
    def reset(self, seed=None): raise KeyError("board")

class Wordless(Env):
    def reset(self, seed=None): return 3, {}

class Deaf(Env):
    def step(self): return "", 1.0, True, False, {}

class Bare(Env):
    def reset(self, seed=None): return "Go"

class Waiting(Env):
    async def reset(self, seed=None): return "Go", {}

class Half:
    def reset(self, seed=None): return "", {}

class Agent:
    def __init__(self, style="short"): ...
    async def run(self, data): return 1.0

class Blocking:
    def run(self, data): return 1.0

class Needy:
    async def run(self, data, judge): return 1.0

class NoLoop: ...
class BlockingLoop:
    def run(self, row, policy): ...
class NeedyLoop:
    async def run(self, row): ...

def nothing(): ...

class Tracker:
    def __init__(self, run, *, folder: str): ...
    def write(self, row): ...
    def flush(self): ...
    def close(self): ...

def rows(split): yield {"prompt": "What is 2 + 3?"}
def broken_rows(split): yield {"prompt": ["2 + 3"]}
def nameless_rows(split): yield {"question": "2 + 3"}
def lost_rows(split): yield {"prompt": "2 + 3", "agent_name": "tool_agnet"}
def long_rows(split): yield {"prompt": "2 + 3 " * 100}
def tool_rows(split): yield {"prompt": "2 + 3", "agent_name": "tool_agent", "tools": ["adder"]}
def shell_rows(split): yield {"prompt": "ls", "agent_name": "tool_agent", "tools": ["shell"]}
def no_rows(split): yield from ()
def uncertain_rows(split):
    yield {"prompt": "2 + 3", "data_source": "openai/gsm8k", "answer": "#### 5"}
    yield {"prompt": "2 + 3", "data_source": "openai/gsm8k", "answer": ""}
def wordy_rows(split): yield {"prompt": "2 + 3", "data_source": "openai/gsm8k", "answer": "five"}
def untested_rows(split): yield {"prompt": "Write f.", "data_source": "apps"}
def broken_text(split): yield {"prompt": "2 + 3 " + chr(0xD800)}
def raising_rows(split): yield 1 / 0
def drop(row): return None

def fair(task, messages, metrics): return 1.0
def greedy(task): return 1.0
def yielding(task, messages, metrics): yield 1.0
number = 3

@tool
def adder(a: int) -> str:
    """Adds one."""
    return str(a + 1)

def demonstrations(renderer, *, seed, num_episodes):
    for _ in range(num_episodes): yield [1, 2, 3], [0, 1, 1]
def uneven(renderer, *, seed, num_episodes): yield [1, 2, 3], [0, 1]
def strange(renderer, *, seed, num_episodes): yield [1, -1, 3], [0, 1, 1]
def silent(renderer, *, seed, num_episodes): yield from ()

def no_tokenizer(folder): ...
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an experiment with modules and models of a user."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "loading_parts.py").write_text(MODULE)
    (folder / "loading_typo.py").write_text("import nmupy\n")
    (folder / "loading_script.py").write_text("raise SystemExit(3)\n")
    (folder / "rows.jsonl").write_text('{"prompt": "2 + 3"}\nnot JSON\n')
    whole = build_byte_tokenizer(folder / "whole")
    _write_config(whole, 262)
    header = json.dumps({"w": {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]}}).encode()
    (whole / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(60))
    for name, change in {
        "small_vocabulary": lambda at: _set(at / "config.json", vocab_size=99),
        "other_tokens": lambda at: _swap_tokens(at / "tokenizer.json"),
        "no_template": lambda at: _set(at / "tokenizer_config.json", chat_template=None),
        "wrong_template": lambda at: _set(
            at / "tokenizer_config.json", chat_template="{{ raise_exception('no') }}"
        ),
        "no_tokenizer": lambda at: [path.unlink() for path in at.glob("tokenizer*")],
        "no_weights": lambda at: (at / "model.safetensors").unlink(),
        "no_shard": lambda at: (at / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"w": "model-00002.safetensors"}})
        ),
        "no_index": lambda at: (at / "model.safetensors").rename(
            at / "model-00001-of-00002.safetensors"
        ),
        "no_bin": lambda at: (
            (at / "model.safetensors").unlink(),
            (at / "pytorch_model.bin.index.json").write_text(
                json.dumps({"weight_map": {"w": "pytorch_model-00002.bin"}})
            ),
        ),
        "adapters": lambda at: (
            (at / "model.safetensors").rename(at / "adapter_model.safetensors"),
            (at / "adapter_config.json").write_text("{}"),
        ),
        "no_config": lambda at: (at / "config.json").unlink(),
        "broken_config": lambda at: (at / "config.json").write_text("{"),
        "other_config": lambda at: (at / "config.json").write_text("[]"),
        "unknown_kind": lambda at: (at / "config.json").write_text('{"model_type": "qwen99"}'),
        "broken_tokenizer": lambda at: (at / "tokenizer.json").write_text("{"),
        "broken_tokenizer_config": lambda at: (at / "tokenizer_config.json").write_text("{"),
        "cut_header": lambda at: (at / "model.safetensors").write_bytes(b"cut"),
        "long_header": lambda at: (at / "model.safetensors").write_bytes(b"\xff" * 8 + b"{}"),
        "cut_weights": lambda at: os.truncate(at / "model.safetensors", 100),
        "broken_index": lambda at: (at / "model.safetensors.index.json").write_text("{}"),
    }.items():
        other = folder / name
        other.mkdir()
        for path in whole.iterdir():
            (other / path.name).write_bytes(path.read_bytes())
        change(other)
    return folder


def _write_config(folder: Path, vocab_size: int) -> None:
    content = {"model_type": "qwen3", "vocab_size": vocab_size, **SIZES}
    (folder / "config.json").write_text(json.dumps(content))


def _swap_tokens(path: Path) -> None:
    """Exchange the ids of two tokens."""
    content = json.loads(path.read_text())
    ids = content["model"]["vocab"]
    first, second = list(ids)[:2]
    ids[first], ids[second] = ids[second], ids[first]
    path.write_text(json.dumps(content))


def _set(path: Path, **keys: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def changed(changes: dict[str, Any]) -> Experiment:
    """The experiment with other values at dotted keys; None removes a key."""
    content = deepcopy(EXPERIMENT)
    for dotted, value in changes.items():
        *parents, last = dotted.split(".")
        place = content
        for step in parents:
            place = place.setdefault(step, {})
        if value is None:
            del place[last]
        else:
            place[last] = value
    return decode(content, "run.yaml")


def report_of(experiment: Experiment, *, on_machine: bool = False) -> Report:
    """The checks in this process."""
    loader = Loader(experiment)
    steps = steps_of(experiment, with_architecture=False, on_machine=on_machine)
    return combined(experiment, problems_of(experiment), [loader.load(step) for step in steps])


def own_env(name: str, **env_config: object) -> dict[str, Any]:
    env = {"env_type": f"loading_parts:{name}", "env_config": env_config}
    return {"agents.custom_envs": {"lake": env}}


def data(function: str, **keys: object) -> dict[str, Any]:
    path = function if "." in function else f"loading_parts:{function}"
    fair = {"name": "own", "kind": "function", "function": "loading_parts:fair"}
    return {
        "agents.custom_envs": None,
        "agents.datasets": {"lake": {"path": path, **keys}},
        "reward.rewards": [fair],
    }


def workflow(agent: str, **keys: object) -> dict[str, Any]:
    return data("rows") | {"agents.workflow": {"agent": agent, **keys}}


def pretrained(name: str) -> dict[str, Any]:
    return {"learner.from_scratch": None, "pretrain": name}


def scored(**entry: object) -> dict[str, Any]:
    return {"reward.rewards": [{"name": "own", "kind": "function", **entry}]}


JUDGE = {"base_url": "http://localhost:1", "model": "j", "prompt": "{{ answer }}"}
WARM = {"num_steps": 1, "demonstrations": "loading_parts:demonstrations"}
PROBLEMS: dict[str, tuple[dict[str, Any], str, str]] = {
    "module with a typo": (
        {"agents.custom_envs": {"lake": {"env_type": "loading_typo:Env"}}},
        "agents.custom_envs.lake",
        "No module named 'nmupy'",
    ),
    "module that is a script": (
        {"agents.custom_envs": {"lake": {"env_type": "loading_script:Env"}}},
        "agents.custom_envs.lake",
        "__main__",
    ),
    "class that is not there": (own_env("Envy"), "agents.custom_envs.lake", "did you mean 'Env'"),
    "constructor that exits": (own_env("Leaving"), "agents.custom_envs.lake", "ended its process"),
    "constructor without the key": (own_env("Env", size=3), "agents.custom_envs.lake", "'size'"),
    "environment without step": (own_env("Half"), "agents.custom_envs.lake", "no step and no close"),
    "environment whose step takes no reply": (
        own_env("Deaf"),
        "agents.custom_envs.lake",
        "step cannot be called as step(reply)",
    ),
    "environment of gym's old form": (
        own_env("Old"),
        "agents.custom_envs.lake",
        "it must return (observation, reward, terminated, truncated, info), found tuple of 4",
    ),
    "environment without a reward": (
        own_env("Numb"),
        "agents.custom_envs.lake",
        "rewards must be numbers, found NoneType",
    ),
    "environment that returns a text alone": (
        own_env("Bare"),
        "agents.custom_envs.lake",
        "must return (observation, info), found str",
    ),
    "environment that is async": (own_env("Waiting"), "agents.custom_envs.lake", "plain `def reset`"),
    "function that makes no environment": (
        own_env("nothing"),
        "agents.custom_envs.lake",
        "has no reset and no step and no close",
    ),
    "path of a module": (
        {"agents.custom_envs": {"lake": {"env_type": "./loading_parts.py:Env"}}},
        "agents.custom_envs.lake",
        "must look like package.module:name",
    ),
    "environment that cannot begin": (
        own_env("Unready"),
        "agents.custom_envs.lake",
        "env.reset raised KeyError",
    ),
    "observation that is no text": (
        own_env("Wordless"),
        "agents.custom_envs.lake",
        "must be str, found int",
    ),
    "observation longer than an episode": (
        own_env("Env", text="Go " * 200),
        "agents.max_episode_tokens",
        "no room",
    ),
    "file that is not there": (data("./no.jsonl"), "agents.datasets.lake", "cannot read no.jsonl"),
    "source that fails": (data("raising_rows"), "agents.datasets.lake", "ZeroDivisionError"),
    "line that is not JSON": (
        data("{folder}/rows.jsonl"),
        "agents.datasets.lake",
        "rows.jsonl:2: is not valid JSON",
    ),
    "source without rows": (data("no_rows"), "agents.datasets.lake", "gives no rows"),
    "converter that drops all": (
        data("rows", converter="loading_parts:drop"),
        "agents.datasets.lake",
        "no rows",
    ),
    "row of another form": (data("broken_rows"), "agents.datasets.lake", "[0]: key 'prompt'"),
    "row without a prompt": (
        data("nameless_rows"),
        "agents.datasets.lake",
        "'prompt' is missing (found question)",
    ),
    "row of an unknown loop": (data("lost_rows"), "agents.datasets.lake", "did you mean 'tool_agent'"),
    "prompt longer than an episode": (
        data("long_rows"),
        "agents.max_episode_tokens",
        "long_rows[0]: its prompt has",
    ),
    "loop that is none": (
        data("rows") | {"agents.agent_loops": {"mine": "loading_parts:NoLoop"}},
        "agents.agent_loops.mine",
        "no class with a method run",
    ),
    "loop that is not async": (
        data("rows") | {"agents.agent_loops": {"mine": "loading_parts:BlockingLoop"}},
        "agents.agent_loops.mine",
        "async def run(self, row, policy)",
    ),
    "loop with other arguments": (
        data("rows") | {"agents.agent_loops": {"mine": "loading_parts:NeedyLoop"}},
        "agents.agent_loops.mine",
        "run with (row, policy): too many positional arguments",
    ),
    "workflow that is not async": (
        workflow("loading_parts.Blocking"),
        "agents.workflow",
        "async def run",
    ),
    "workflow with other arguments": (workflow("loading_parts:Needy"), "agents.workflow", "'judge'"),
    "workflow with unknown kwargs": (
        workflow("loading_parts:Agent", kwargs={"stile": 1}),
        "agents.workflow",
        "correct agents.workflow.kwargs",
    ),
    "interpreter that is not there": (
        workflow("loading_parts:Agent", mode="subproc", python="/no/python"),
        "agents.workflow",
        "cannot start /no/python",
    ),
    "reward that is no function": (
        scored(function="loading_parts:number"),
        "reward.rewards[0]",
        "is a int, not a function",
    ),
    "reward with other arguments": (
        scored(function="loading_parts:greedy"),
        "reward.rewards[0]",
        "cannot be called with (task, messages, metrics)",
    ),
    "reward with other keyword arguments": (
        scored(function="loading_parts:fair", args={"scale": 2}),
        "reward.rewards[0]",
        "(task, messages, metrics, scale)",
    ),
    "row of a data source without a scorer": (
        data("rows") | {"reward.rewards": [{"name": "own", "kind": "scorer"}]},
        "agents.datasets.lake",
        "reward 'own'",
    ),
    "reward that yields": (
        scored(function="loading_parts:yielding"),
        "reward.rewards[0].function",
        "with `return`",
    ),
    "row without a truth": (
        data("uncertain_rows") | {"reward.rewards": [{"name": "own", "kind": "scorer"}]},
        "agents.datasets.lake",
        "uncertain_rows[1]: reward 'own': the row has no true answer",
    ),
    "truth that its scorer cannot read": (
        data("wordy_rows") | {"reward.rewards": [{"name": "own", "kind": "scorer"}]},
        "agents.datasets.lake",
        "'five' has no number",
    ),
    "program without tests": (
        data("untested_rows")
        | {"reward.rewards": [{"name": "own", "kind": "scorer"}], "cluster.num_sandboxes": 1},
        "agents.datasets.lake",
        "untested_rows[0]: reward 'own'",
    ),
    "row that no UTF-8 has": (
        data("broken_text"),
        "agents.datasets.lake",
        "broken_text[0]: key 'prompt'",
    ),
    "epochs over less than a step": (
        data("rows") | {"num_epochs": 3, "groups_per_step": 4},
        "num_epochs",
        "3 groups are fewer than groups_per_step (4)",
    ),
    "epochs over no data": ({"num_epochs": 3}, "num_epochs", "scheduler.tags names no data set"),
    "judge without its key": (
        scored(kind="judge", judge=JUDGE | {"api_key_env": "NO_SUCH_KEY"})
        | {"cluster.keep_environment": ["NO_SUCH_KEY"]},
        "reward.rewards[0]",
        "the variable NO_SUCH_KEY is not set",
    ),
    "judge with a broken prompt": (
        scored(kind="judge", judge=JUDGE | {"prompt": "{{ answer"}),
        "reward.rewards[0]",
        "judge.prompt is no template",
    ),
    "judge that asks for a column that rows lack": (
        data("rows")
        | scored(
            kind="judge", judge=JUDGE | {"prompt": "{{ answer }} {{ row.truth }} {{ metrics.x }}"}
        ),
        "agents.datasets.lake",
        "rows[0]: reward 'own': judge 'own' (http://localhost:1) cannot be asked: judge.prompt: "
        "'dict object' has no attribute 'truth'",
    ),
    "judge with an unknown name": (
        scored(kind="judge", judge=JUDGE | {"prompt": "{{ anser }}"}),
        "reward.rewards[0]",
        "did you mean 'answer'",
    ),
    "reward model that is no folder": (
        scored(kind="model", pretrain="./scorer"),
        "reward.rewards[0].pretrain",
        "no model directory",
    ),
    "tool that is none": (
        {"cluster.tool_workers": ["loading_parts:greedy"]},
        "cluster.tool_workers[0]",
        "is no tool",
    ),
    "tool without a name": (
        {"cluster.tool_workers": [""]},
        "cluster.tool_workers[0]",
        "it names no tool",
    ),
    "tracker without an argument": (
        {"learner.trackers": {"loading_parts:Tracker": {}}},
        "learner.trackers",
        "loading_parts:Tracker.folder is missing",
    ),
    "tracker with a wrong argument": (
        {"learner.trackers": {"jsonl": {"path": 3}}},
        "learner.trackers",
        "jsonl.path: Expected `str`",
    ),
    "tracker without its package": (
        {"learner.trackers": {"mlflow": {}}},
        "learner.trackers",
        "pip install 'tailrace[mlflow]'",
    ),
    "demonstrations with other arguments": (
        {"learner.warm_start": WARM | {"options": {"size": 4}}},
        "learner.warm_start",
        "'size'",
    ),
    "demonstrations of uneven rows": (
        {"learner.warm_start": WARM | {"demonstrations": "loading_parts:uneven"}},
        "learner.warm_start",
        "loss_mask of shape (2,)",
    ),
    "demonstrations of another vocabulary": (
        {"learner.warm_start": WARM | {"demonstrations": "loading_parts:strange"}},
        "learner.warm_start",
        "loading_parts:strange: it yields the token id -1, which the model lacks",
    ),
    "no demonstrations": (
        {"learner.warm_start": WARM | {"demonstrations": "loading_parts:silent"}},
        "learner.warm_start",
        "yields no row",
    ),
    "parser of no class": (
        {"chat.tool_parser": "loading_parts:Agent"},
        "chat.tool_parser",
        "subclass of",
    ),
    "tokenizer function that writes nothing": (
        {"learner.from_scratch.tokenizer": "loading_parts:no_tokenizer"},
        "learner.from_scratch",
        "wrote no tokenizer.json",
    ),
    "model that is no folder": (pretrained("./no/model"), "pretrain", "it does not exist"),
    "model path with a slash at its end": (pretrained("checkpoints/"), "pretrain", "it does not exist"),
    "model that is a file": (pretrained("{folder}/rows.jsonl"), "pretrain", "it is a file"),
    "model that nobody has": (
        pretrained("nobody/has-this-model"),
        "pretrain",
        "no folder here, and the hub",
    ),
    "model without config.json": (pretrained("{folder}/no_config"), "pretrain", "holds no config.json"),
    "model without weights": (pretrained("{folder}/no_weights"), "pretrain", "holds no weights"),
    "model without one file": (
        pretrained("{folder}/no_shard"),
        "pretrain",
        "lacks model-00002.safetensors",
    ),
    "model without the index of its parts": (
        pretrained("{folder}/no_index"),
        "pretrain",
        "holds model-00001-of-00002.safetensors without model.safetensors.index.json",
    ),
    "model without one part of torch's form": (
        pretrained("{folder}/no_bin"),
        "pretrain",
        "lacks pytorch_model-00002.bin, which pytorch_model.bin.index.json names",
    ),
    "adapters without their model": (
        pretrained("{folder}/adapters"),
        "pretrain",
        "merged with their model",
    ),
    "config.json that is cut": (pretrained("{folder}/broken_config"), "pretrain", "cannot read"),
    "config.json that is a list": (pretrained("{folder}/other_config"), "pretrain", "holds a list"),
    "model of an unknown kind": (
        pretrained("{folder}/unknown_kind"),
        "pretrain",
        "knows no model_type 'qwen99'",
    ),
    "tokenizer that is cut": (
        pretrained("{folder}/broken_tokenizer"),
        "pretrain",
        "cannot read tokenizer.json",
    ),
    "tokenizer with a broken configuration": (
        pretrained("{folder}/broken_tokenizer_config"),
        "pretrain",
        "cannot read tokenizer_config.json",
    ),
    "weights without a header": (
        pretrained("{folder}/cut_header"),
        "pretrain",
        "no safetensors file",
    ),
    "weights with a wrong header": (
        pretrained("{folder}/long_header"),
        "pretrain",
        "copy or download it again",
    ),
    "weights that are cut": (pretrained("{folder}/cut_weights"), "pretrain", "has 100 bytes of 133"),
    "weights with a broken index": (
        pretrained("{folder}/broken_index"),
        "pretrain",
        "no readable weight_map",
    ),
    "model without a tokenizer": (
        pretrained("{folder}/no_tokenizer"),
        "pretrain",
        "holds no tokenizer",
    ),
    "model without a chat template": (
        pretrained("{folder}/no_template"),
        "pretrain",
        "put chat_template.jinja",
    ),
    "chat template that refuses": (
        pretrained("{folder}/wrong_template"),
        "pretrain",
        "put another chat_template.jinja",
    ),
    "tokenizer of another model": (
        pretrained("{folder}/small_vocabulary"),
        "pretrain",
        "vocabulary 99",
    ),
    "reference with too few vectors": (
        {
            "learner.init_kl_coef": 0.1,
            "learner.reference": {"pretrain": "{folder}/small_vocabulary"},
        },
        "learner.reference.pretrain",
        "has vectors for 99 tokens",
    ),
    "reference of other tokens": (
        {
            "learner.init_kl_coef": 0.1,
            "learner.reference": {"pretrain": "{folder}/other_tokens"},
        },
        "learner.reference.pretrain",
        "use a model with the policy's tokenizer",
    ),
    "episode longer than the context": (
        {"agents.max_episode_tokens": 1024},
        "agents.max_episode_tokens",
        "1024 is more than the context of qwen3 from scratch (512 tokens)",
    ),
    "episode longer than the cache": (
        {"inference.kv_cache_tokens": 128, "inference.max_running": 8},
        "inference.kv_cache_tokens",
        "cannot hold one episode",
    ),
    "length penalty that nothing reaches": (
        {"learner.overlong_max_tokens": 1000, "learner.overlong_buffer_tokens": 100},
        "learner.overlong_max_tokens",
        "begins at 900",
    ),
}


def _placed(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        return {key: _placed(inner, folder) for key, inner in value.items()}
    return value.replace("{folder}", str(folder)) if isinstance(value, str) else value


@pytest.mark.parametrize("case", PROBLEMS)
def test_a_mistake_names_its_place_and_the_remedy(folder: Path, case: str) -> None:
    changes, key, expected = PROBLEMS[case]
    with importable_from(folder):
        report = report_of(changed(_placed(changes, folder)))
    assert len(report.problems) >= 1
    assert report.problems[0].startswith(key)
    assert expected in report.problems[0]
    assert len(report.problems) == len({problem.partition(": ")[0] for problem in report.problems})


def test_a_gpu_by_number_needs_one_here(folder: Path) -> None:
    alone = changed({"cluster.learner_gpus": [0]})
    report = combined(alone, [], [Loaded(machine=MachineFacts(host_bytes=1 << 35, shm_bytes=1 << 35))])
    assert [problem.partition(",")[0] for problem in report.problems] == [
        "cluster.learner_gpus: it asks for GPU 0"
    ]


def test_a_valid_experiment_has_a_summary_and_all_of_its_mistakes_come_at_once(folder: Path) -> None:
    with importable_from(folder):
        teacher = {
            "learner.init_kl_coef": 0.1,
            "learner.reference": {"pretrain": str(folder / "whole")},
        }
        valid = report_of(changed(pretrained(str(folder / "whole")) | teacher), on_machine=True)
        wrong = report_of(
            changed(
                own_env("Envy")
                | scored(function="loading_parts:greedy")
                | {
                    "learner.trackers": {"jsonl": {}},
                    "agents.max_episode_tokens": 4096,
                }
            )
        )
    assert valid.problems == ()
    assert valid.model is not None
    assert (valid.model.num_parameters, valid.model.context_tokens) == (15, 512)
    assert valid.model.role_sizes == {"reference": 15}
    assert valid.machine is not None
    assert [prompt.num_tokens > 10 for prompt in valid.prompts] == [True]
    assert {problem.partition(": ")[0] for problem in wrong.problems} == {
        "agents.custom_envs.lake",
        "reward.rewards[0].function",
        "learner.trackers.jsonl.path is missing",
        "agents.max_episode_tokens",
    }


def test_every_tool_of_the_sandbox_is_served_by_its_services(folder: Path) -> None:
    with importable_from(folder):
        wanted = data("shell_rows") | {"agents.max_episode_tokens": 512}
        alone = report_of(changed(wanted))
        served = report_of(changed(wanted | {"cluster.num_sandboxes": 1}))
    assert any("'shell', which this run serves nowhere" in note for note in alone.notes)
    assert not any("shell" in note for note in served.notes)


def test_an_environment_that_fails_at_an_unreadable_reply_is_noted(folder: Path) -> None:
    with importable_from(folder):
        report = report_of(changed(own_env("Strict")))
    assert report.problems == ()
    (note,) = [note for note in report.notes if "empty reply" in note]
    assert note.startswith("agents.custom_envs.lake: ")
    assert "env.step raised ValueError: no move (at loading_parts.py:" in note


def test_a_slow_first_step_is_given_up_without_a_word() -> None:
    class Slow:
        is_left = False

        def step(self, action: str) -> Any:
            try:
                threading.Event().wait()
            finally:
                self.is_left = True

    env = Slow()
    assert list(notes_of_first_step(EnvHandle(env), "agents.custom_envs.lake", 0.05)) == []  # type: ignore[arg-type]
    assert env.is_left


def test_rows_that_are_trained_and_evaluated_are_noted(folder: Path) -> None:
    held_out = {"path": "loading_parts:long_rows"}
    same = {"path": "loading_parts:rows", "split": "test"}
    sets = {"lake": {"path": "loading_parts:rows"}, "same": same, "held_out": held_out}
    longer = data("rows") | {"agents.datasets": sets, "agents.max_episode_tokens": 512}
    noted = {
        "lake": "agents.datasets.lake: it is trained (scheduler.tags) and evaluated",
        "same": "agents.datasets.same: it is evaluated, and 1 of its first 1 rows are rows of "
        "agents.datasets.lake too",
        "held_out": "",
    }
    for tag, said in noted.items():
        with importable_from(folder):
            report = report_of(changed(longer | {"evaluations": {"held": {"tag": tag}}}))
            alone = report_of(changed(longer | {"evaluations": {"held": {"tag": tag}}, "max_steps": 0}))
        found = [note for note in report.notes if "evaluated" in note]
        assert len(found) == bool(said)
        assert all(note.startswith(said) for note in found)
        assert not any("evaluated" in note for note in alone.notes)


def test_a_tool_that_the_run_does_not_serve_is_noted(folder: Path) -> None:
    with importable_from(folder):
        wanted = data("tool_rows") | {"agents.max_episode_tokens": 512}
        alone = report_of(changed(wanted))
        served = report_of(changed(wanted | {"cluster.tool_workers": ["loading_parts:adder"]}))
    assert alone.problems == served.problems == ()
    assert any("the tool 'adder', which this run serves nowhere" in note for note in alone.notes)
    assert not any("adder" in note for note in served.notes)
    assert served.prompts[0].num_tokens > alone.prompts[0].num_tokens  # the template names it


PRETRAINED = ("frozen_lake_8x8", "gsm8k", "gsm8k_7b_8gpu", "search_agent_32b_64gpu")


def _teacher(folder: Path, model: Path) -> Path:
    """A model folder with the tokens of frozen lakes."""
    build_frozen_lake_tokenizer(folder)
    num_tokens = len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    _write_config(folder, num_tokens)
    (folder / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    return folder


def _overrides(path: Path, folder: Path) -> list[str]:
    is_pretrained = path.parent.name in PRETRAINED or path.stem == "published"
    begins_at_random = path.stem in ("tiny", "lake_4x4")
    overrides = [f"pretrain={folder / 'wide'}"] if is_pretrained and not begins_at_random else []
    if path.parent.name == "distillation":
        overrides.append(f"learner.reference.pretrain={_teacher(folder / 'teacher', folder / 'wide')}")
    if path.stem != "attempts":
        return overrides
    entry = "agents.custom_envs.{}.env_config.dataset.path={}"
    return overrides + [entry.format(name, folder / "gsm8k") for name in ("gsm8k", "gsm8k_test")]


# Frameworks take seconds to import.
PATHS = [
    pytest.param(
        path,
        id=f"{path.parent.name}/{path.stem}",
        marks=[pytest.mark.heavy] if path.parent.parent.name == "frameworks" else [],
    )
    for path in sorted(EXAMPLES.rglob("*.yaml"))
]


@pytest.mark.parametrize("path", PATHS)
def test_every_example_is_clean(
    path: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = tmp_path / "wide"
    wide.mkdir()
    for file in (folder / "whole").iterdir():
        (wide / file.name).write_bytes(file.read_bytes())
    _set(wide / "config.json", max_position_embeddings=16384)
    rows = tmp_path / "gsm8k"
    rows.mkdir()
    for split in ("train", "test"):
        (rows / f"{split}.jsonl").write_text('{"question": "1 + 1?", "answer": "1 + 1 = 2\\n#### 2"}\n')
    monkeypatch.setenv("TAILRACE_GSM8K", str(rows))
    monkeypatch.chdir(EXAMPLES.parent)
    experiment = load(path, _overrides(path, tmp_path))
    workflow = experiment.agents.workflow
    if workflow and workflow.python and not Path(workflow.python).exists():
        pytest.skip(f"no {workflow.python}: make it as the example says")
    monkeypatch.setenv("PYTHONPATH", str(path.parent), prepend=os.pathsep)  # of another interpreter
    with importable_from(path.parent):
        report = report_of(experiment)
    if path.stem == "published" and report.problems and not os.environ.get("TAILRACE_WEBSHOP"):
        pytest.skip(f"no published catalogue: {report.problems[0]}")
    assert report.problems == ()
