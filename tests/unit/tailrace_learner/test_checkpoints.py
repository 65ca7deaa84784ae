"""Checkpoints: complete or absent, and training goes on from them as if nothing had happened."""

from __future__ import annotations

import json
import os
import resource
import signal
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM, AutoTokenizer

from tailrace.config import ConfigError, RunConfig
from tailrace.weights.tensors import TensorBytes
from tailrace_learner.adapters import hf_model
from tailrace_learner.adapters.checkpoints import (
    CheckpointFolder,
    CheckpointNotSavedError,
    IncompatibleCheckpointError,
    check_compatible,
    read_checkpoint,
)
from tailrace_learner.adapters.hf_model import TrainableModel
from tailrace_learner.adapters.snapshots import Snapshot, load_optimizer, take_snapshot
from tailrace_learner.adapters.strategies.base import Strategy
from tailrace_learner.config import FromScratch, LearnerConfig, LoraArgs, TrainingArgs
from tailrace_learner.core.step.run_state import Origin, RunState, changed_keys, origin, resumed_state
from tailrace_learner.core.step.step import StepTrainer
from tests.unit.tailrace_learner.factory import make_rows
from tests.unit.tailrace_learner.step.test_step import prepared

SCRATCH = FromScratch(
    model_type="qwen3",
    tokenizer="tailrace_envs.frozen_lake_tokenizer:build_frozen_lake_tokenizer",
    init_std=0.1,
    config={
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "rope_theta": 100.0,
        "tie_word_embeddings": True,
    },
)
CONFIG = LearnerConfig(
    from_scratch=SCRATCH,
    device="cpu",
    min_tokens_per_micro_batch=0,
    training_args=TrainingArgs(learning_rate=1e-2, lr_scheduler_type="linear", weight_decay=0.01),
)
RUN = RunConfig(exp_name="unit", seed=3)


class Session:
    """A model, its optimizer and trainer, as the process would put them together."""

    def __init__(self, loaded: TrainableModel, optimizer_name: str = "adamw") -> None:
        self.loaded = loaded
        self.optimizer_name = optimizer_name
        args = msgspec.structs.replace(CONFIG.training_args, optimizer=optimizer_name)
        policy = hf_model.make_policy(loaded, CONFIG)
        self.strategy = Strategy()
        optimizer = self.strategy.make_optimizer(policy, args)
        self.trainer = StepTrainer(policy, optimizer, CONFIG, groups_per_step=1, max_steps=8)

    def train(self, steps: range) -> None:
        for step in steps:
            self.trainer.begin(step)
            self.trainer.add(prepared(make_rows(4, seed=step)))
            self.trainer.work()
            self.trainer.finish()

    def snapshot(self) -> Snapshot:
        return take_snapshot(self.loaded, self.strategy, self.optimizer_name)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.loaded.model.state_dict().items()}


@pytest.fixture
def fresh() -> Session:
    return Session(hf_model.make_model(SCRATCH, CONFIG, 3))


@cache
def untrained() -> Session:
    return Session(hf_model.make_model(SCRATCH, CONFIG, 3))


@pytest.fixture
def still() -> Session:
    """A session that no test trains, made once."""
    return untrained()


def state(step: int, **changes: Any) -> RunState:
    return RunState(**{"step": step, "lineage": "0-a", "saved_unix_s": float(step), **changes})


FACTORED = """
import torch
from tailrace_learner.core.algorithms import Optimizer

ADAFACTOR = Optimizer(lambda groups, args: torch.optim.Adafactor(groups, lr=args.learning_rate))
"""


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "my_factored:ADAFACTOR"])
def test_training_continues_bit_for_bit(
    tmp_path: Path, optimizer: str, user_module: Callable[[str, str], str]
) -> None:
    user_module("my_factored", FACTORED)  # its moments are sums of rows and columns
    fresh = Session(hf_model.make_model(SCRATCH, CONFIG, 3), optimizer)
    fresh.train(range(3))
    path = CheckpointFolder(tmp_path).write(fresh.snapshot(), state(3))
    fresh.train(range(3, 6))

    again = Session(hf_model.load_model(str(path), CONFIG), optimizer)
    load_optimizer(path, again.loaded, again.strategy, optimizer)
    again.train(range(3, 6))
    for name, tensor in fresh.weights().items():
        assert torch.equal(tensor, again.weights()[name]), name


def test_the_moments_of_another_optimizer_are_refused(tmp_path: Path, fresh: Session) -> None:
    fresh.train(range(1))
    path = CheckpointFolder(tmp_path).write(fresh.snapshot(), state(1))
    with pytest.raises(ConfigError, match=r"holds the moments of optimizer 'adamw'.* names 'sgd'"):
        load_optimizer(path, fresh.loaded, fresh.strategy, "sgd")


def test_a_checkpoint_loads_with_plain_hugging_face(tmp_path: Path, fresh: Session) -> None:
    fresh.train(range(1))
    path = CheckpointFolder(tmp_path).write(fresh.snapshot(), state(1))
    model = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = torch.tensor([tokenizer.encode("SFFF\n")])
    assert model(ids).logits.shape == (1, ids.shape[1], len(tokenizer))
    for name, tensor in fresh.weights().items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert tokenizer.chat_template


def test_the_state_survives_the_round_trip(tmp_path: Path, still: Session) -> None:
    saved = state(4, next_group_index=70, num_trained_groups=64, entry_ids=("1-0",), group_ids=("t7",))
    path = CheckpointFolder(tmp_path).write(still.snapshot(), saved)
    assert read_checkpoint(path).state == saved
    resumed = resumed_state(saved, {"seed": 1})
    assert resumed.lineage.startswith("4-")
    assert resumed.entry_ids == ()
    assert [(a.lineage, a.last_step) for a in resumed.ancestors] == [("0-a", 4)]


def test_a_changed_experiment_is_told_by_its_keys() -> None:
    before = {
        "seed": 1,
        "resume_from_checkpoint": False,
        "learner": {"lora": {"rank": 4}, "loss": "ppo"},
    }
    saved = state(4, experiment=before)
    assert changed_keys(saved, {**before, "resume_from_checkpoint": True}) == ()
    now = {"seed": 1, "learner": {"lora": {"rank": 8}, "loss": "ppo", "gamma": 1.0}}
    assert changed_keys(saved, now) == ("learner.gamma", "learner.lora.rank")
    assert changed_keys(state(4), now) == ()


def test_torn_and_unfinished_checkpoints_are_ignored_and_swept(tmp_path: Path, still: Session) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.write(still.snapshot(), state(2))
    (folder.root / "step_9").mkdir()
    (folder.root / "step_8").mkdir()
    (folder.root / "step_8" / "run_state.json").write_text('{"step": 8, "li')
    (folder.root / ".part-10-abc").mkdir()
    newest = folder.newest()
    assert newest is not None
    assert newest.state.step == 2
    folder.sweep()
    assert not (folder.root / ".part-10-abc").exists()


def test_the_newest_is_the_last_saved_not_the_highest_step(tmp_path: Path, still: Session) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.write(still.snapshot(), state(50, lineage="0-old", saved_unix_s=1.0))
    folder.write(still.snapshot(), state(5, lineage="0-new", saved_unix_s=2.0))
    newest, live = folder.newest(), folder.newest({"0-old"})
    assert newest is not None
    assert newest.state.step == 5
    assert live is not None
    assert live.state.step == 50
    assert folder.newest({"0-other"}) is None


def test_the_same_step_can_be_saved_again(tmp_path: Path, still: Session) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.write(still.snapshot(), state(2, lineage="0-old"))
    path = folder.write(still.snapshot(), state(2, lineage="0-new"))
    assert read_checkpoint(path).state.lineage == "0-new"
    assert [entry.name for entry in folder.root.iterdir()] == ["step_2"]


def test_a_kill_while_a_checkpoint_is_replaced_loses_none(
    tmp_path: Path, still: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CheckpointFolder(tmp_path)
    path = folder.write(still.snapshot(), state(2, lineage="0-old"))
    rename = Path.rename

    def die_before_the_new_one(source: Path, target: Path) -> Path:
        if source.name.startswith(".part-"):
            raise KeyboardInterrupt
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", die_before_the_new_one)
    with pytest.raises(KeyboardInterrupt):
        folder.write(still.snapshot(), state(2, lineage="0-new"))
    monkeypatch.undo()
    assert not path.exists()
    folder.sweep()
    assert read_checkpoint(path).state.lineage == "0-old"
    assert [entry.name for entry in folder.root.iterdir()] == ["step_2"]


@pytest.mark.parametrize(
    ("resume", "has_saved", "expected"),
    [
        (False, True, Origin.LIVE),
        ("there/step_2", True, Origin.LIVE),  # from which the run began
        ("there/step_2", False, Origin.NAMED),
        (True, False, Origin.NEWEST),
        (False, False, Origin.NEW),
    ],
)
def test_a_learner_that_died_before_it_saved_is_followed_by_one_that_starts_where_it_did(
    resume: bool | str, has_saved: bool, expected: Origin
) -> None:
    assert origin(resume, has_saved=has_saved) is expected


def test_only_the_newest_of_our_lineages_are_kept(tmp_path: Path, still: Session) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2, 3):
        folder.write(still.snapshot(), state(step))
    folder.write(still.snapshot(), state(9, lineage="0-other"))
    folder.prune(2, {"0-a"})
    assert {path.name for path in folder.root.iterdir()} == {"step_2", "step_3", "step_9"}
    folder.prune(0, {"0-a"})
    assert len(folder.all()) == 3


def test_an_old_checkpoint_that_cannot_be_removed_ends_nothing(
    tmp_path: Path, still: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2, 3):
        folder.write(still.snapshot(), state(step))
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(int=0))
    (folder.root / ".old-00000000").mkdir()
    (folder.root / ".old-00000000" / "left").touch()  # no folder takes its place
    with capture_logs() as lines:
        folder.prune(1, {"0-a"})
    assert [line["event"] for line in lines] == ["old checkpoint stays"] * 2
    assert len(folder.all()) == 3


@contextmanager
def no_room() -> Iterator[None]:
    """Files may not grow beyond 20 kB, pytest's own output among them: keep the block short."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_without_room_leaves_the_old_checkpoint_and_says_what_to_do(
    tmp_path: Path, still: Session
) -> None:
    folder = CheckpointFolder(tmp_path)
    old = folder.write(still.snapshot(), state(1))
    with pytest.raises(CheckpointNotSavedError, match="free space"), no_room():
        folder.write(still.snapshot(), state(2))
    assert [checkpoint.path for checkpoint in folder.all()] == [old]
    assert os.listdir(folder.root) == ["step_1"]


def test_a_disk_without_room_for_the_tokenizer_leaves_the_old_checkpoint(
    tmp_path: Path, still: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its library raises a plain `Exception`."""
    folder, snapshot = CheckpointFolder(tmp_path), still.snapshot()
    folder.write(snapshot, state(1))
    tokenizer = snapshot.loaded.tokenizer
    full = partial(tokenizer.backend_tokenizer.save, "/dev/full")
    monkeypatch.setattr(tokenizer, "save_pretrained", lambda _: full())
    with pytest.raises(CheckpointNotSavedError, match="No space left on device"):
        folder.write(snapshot, state(2))
    assert os.listdir(folder.root) == ["step_1"]


def test_a_checkpoint_of_another_schema_is_refused(tmp_path: Path, still: Session) -> None:
    path = CheckpointFolder(tmp_path).write(still.snapshot(), state(1))
    other = msgspec.structs.replace(state(1), schema=99)
    (path / "run_state.json").write_bytes(msgspec.json.encode(other))
    with pytest.raises(ConfigError, match="schema 99"):
        read_checkpoint(path)


def test_a_path_that_is_no_checkpoint_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no checkpoint"):
        read_checkpoint(tmp_path / "nothing")
    (tmp_path / "run_state.json").write_bytes(b'{"lineage": "\xff"}')
    with pytest.raises(ConfigError, match="is no checkpoint"):
        read_checkpoint(tmp_path)


def test_models_from_scratch_follow_the_seed() -> None:
    first = untrained().loaded.model
    same, other = (hf_model.make_model(SCRATCH, CONFIG, seed).model for seed in (3, 4))
    name, weight = next(iter(first.named_parameters()))
    assert torch.equal(weight, dict(same.named_parameters())[name])
    assert not torch.equal(weight, dict(other.named_parameters())[name])


@pytest.mark.parametrize(
    ("source", "match"),
    [("/nowhere/model", "no model directory"), ("./a/b/c", "no model directory")],
)
def test_a_missing_model_is_the_users_mistake(source: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        hf_model.load_model(source, CONFIG)


def test_a_directory_without_a_model_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        hf_model.load_model(str(tmp_path), CONFIG)


def test_a_model_without_some_of_its_weights_is_refused(tmp_path: Path) -> None:
    """Published trunks, and reward models, have no output matrix: a random one cannot be seen later."""
    untied = msgspec.structs.replace(SCRATCH, config=SCRATCH.config | {"tie_word_embeddings": False})
    whole = hf_model.make_model(untied, CONFIG, 3)
    path = str(tmp_path / "trunk")
    whole.model.base_model.save_pretrained(path)
    whole.tokenizer.save_pretrained(path)
    with pytest.raises(ConfigError, match=r"^pretrain: .*lacks the weights of lm_head\.weight.*random"):
        hf_model.load_model(path, CONFIG)
    assert hf_model.load_model(path, CONFIG, needs_head=False).num_parameters == whole.num_parameters


def test_a_model_with_a_weight_of_another_shape_is_refused(still: Session, tmp_path: Path) -> None:
    still.loaded.model.save_pretrained(tmp_path)
    still.loaded.tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 64}))
    match = r"^pretrain: .*mlp\.down_proj\.weight of shape \(32, 48\), .* asks for \(32, 64\)"
    with pytest.raises(ConfigError, match=match):
        hf_model.load_model(str(tmp_path), CONFIG)


def test_a_model_with_adapters_beside_it_is_refused(still: Session, tmp_path: Path) -> None:
    """transformers would add them and freeze all weights."""
    still.loaded.model.save_pretrained(tmp_path)
    still.loaded.tokenizer.save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(ConfigError, match=r"^pretrain: .*adapters.*merged with their model"):
        hf_model.load_model(str(tmp_path), CONFIG)


def test_an_output_matrix_beside_the_one_that_it_should_be_tied_to_is_its_own(tmp_path: Path) -> None:
    """So does transformers; an engine that reads the configuration would leave it out."""
    untied = msgspec.structs.replace(SCRATCH, config=SCRATCH.config | {"tie_word_embeddings": False})
    made = hf_model.make_model(untied, CONFIG, 3)
    made.model.config.tie_word_embeddings = True
    made.model.save_pretrained(tmp_path, state_dict=dict(made.model.state_dict()))
    made.tokenizer.save_pretrained(tmp_path)
    loaded = hf_model.load_model(str(tmp_path), CONFIG)
    assert torch.equal(loaded.model.lm_head.weight, made.model.lm_head.weight)
    card = json.loads(hf_model.model_card(loaded, CONFIG).config_json)
    assert card.get("tie_word_embeddings", True) is False


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"num_hidden_layers": 1}, r"^pretrain: cannot load .*layer_types.* \(2\)\. Give a directory"),
        (
            {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}},
            r"^pretrain: cannot load .*auto_map in config\.json.*not run\. Give a directory",
        ),
    ],
)
def test_a_configuration_that_cannot_be_read_is_refused(
    still: Session, keys: dict[str, Any], match: str, tmp_path: Path
) -> None:
    """Without a question on the terminal, where code of its own comes with it."""
    still.loaded.model.save_pretrained(tmp_path)
    still.loaded.tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    with pytest.raises(ConfigError, match=match):
        hf_model.load_model(str(tmp_path), CONFIG)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"tokenizer": "nowhere:build"}, "cannot import"),
        ({"tokenizer": "tailrace_envs:nothing"}, "has no .nothing."),
        ({"tokenizer": "nonsense"}, "package.module:name"),
        ({"model_type": "qwen99"}, "qwen99"),
        ({"config": {"vocab_size": 5}}, "vocab_size"),
        (
            {"config": {"num_hidden_layers": "2"}},
            r"from_scratch: .*num_hidden_layers.*correct its config",
        ),
        ({"config": {"layer_types": ["full_attention"]}}, r"from_scratch: .*layer_types.*correct"),
    ],
)
def test_an_impossible_model_from_scratch_names_the_key(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        hf_model.make_model(msgspec.structs.replace(SCRATCH, **changes), CONFIG, 0)


def published(session: Session, dtype: str) -> list[TensorBytes]:
    named = hf_model.named_weights(session.loaded.model)
    return [hf_model.tensor_bytes(name, tensor, dtype) for name, tensor in named]


def test_the_card_and_the_weights_describe_the_same_model(still: Session) -> None:
    card = hf_model.model_card(still.loaded, CONFIG)
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(card.tokenizer_files)
    assert msgspec.json.decode(card.config_json)["model_type"] == "qwen3"
    assert not card.trains_adapters
    with_lora = msgspec.structs.replace(CONFIG, lora=LoraArgs())
    assert hf_model.model_card(still.loaded, with_lora).trains_adapters
    tensors = published(still, "float32")
    names = [tensor.name for tensor in tensors]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    half = published(still, "bfloat16")
    for wide, narrow in zip(tensors, half, strict=True):
        assert wide.data.nbytes == 2 * narrow.data.nbytes
        restored = torch.frombuffer(bytearray(wide.data), dtype=torch.float32).view(wide.shape)
        assert torch.equal(restored, still.weights()[wide.name])


def test_published_bytes_do_not_follow_later_updates(fresh: Session) -> None:
    before = [bytes(tensor.data) for tensor in published(fresh, "float32")]
    tensors = published(fresh, "float32")
    fresh.train(range(1))
    assert [bytes(tensor.data) for tensor in tensors] == before


@cache
def reloaded(folder: Path) -> tuple[str, TrainableModel]:
    """A checkpoint, and the model as it is loaded from there, which is its own experiment's."""
    path = str(CheckpointFolder(folder).write(untrained().snapshot(), state(1)))
    loaded = hf_model.load_model(path, CONFIG)
    check_compatible(path, loaded, RUN, CONFIG)
    return path, loaded


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": "llama"}, "qwen3, here llama"),
        ({"config": SCRATCH.config | {"hidden_size": 64}}, r"\(107, 32\), here \(107, 64\)"),
        ({"config": SCRATCH.config | {"num_hidden_layers": 1}}, "here None"),
        ({"tokenizer": "tests.unit.tailrace_learner.tokenizers:reversed_tokenizer"}, "other tokens"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_with_the_difference(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any], match: str
) -> None:
    path, loaded = reloaded(tmp_path_factory.getbasetemp() / "still")
    other = msgspec.structs.replace(CONFIG, from_scratch=msgspec.structs.replace(SCRATCH, **changes))
    with pytest.raises(IncompatibleCheckpointError, match=match):
        check_compatible(path, loaded, RUN, other)


def test_a_checkpoint_is_compared_with_the_pretrained_model_that_its_run_began_with(
    tmp_path: Path, still: Session
) -> None:
    path = str(CheckpointFolder(tmp_path / "a").write(still.snapshot(), state(1)))
    pretrained = msgspec.structs.replace(CONFIG, from_scratch=None)
    loaded = hf_model.load_model(path, CONFIG)
    check_compatible(path, loaded, msgspec.structs.replace(RUN, pretrain=path), pretrained)
    wide = msgspec.structs.replace(SCRATCH, config=SCRATCH.config | {"intermediate_size": 64})
    other = Session(hf_model.make_model(wide, CONFIG, 3))
    start = str(CheckpointFolder(tmp_path / "b").write(other.snapshot(), state(1)))
    with pytest.raises(IncompatibleCheckpointError, match="down_proj"):
        check_compatible(path, loaded, msgspec.structs.replace(RUN, pretrain=start), pretrained)
