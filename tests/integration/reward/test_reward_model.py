"""Reward models from scratch: their own numbers, whatever the batch; what is none is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import convert
from msgspec.structs import replace
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Qwen3Config,
)

from tailrace.bus import Bus
from tailrace.chat.model_files import read_chat_model
from tailrace.config import ConfigError
from tailrace_envs.frozen_lake_tokenizer import build_frozen_lake_tokenizer
from tailrace_protos import subjects
from tailrace_protos.chat import ChatMessage
from tailrace_protos.episode import EnvTask
from tailrace_protos.reward import ScoreItem, ScoreReply, ScoreRequest
from tailrace_protos.weights import ModelCard
from tailrace_reward.__main__ import build
from tailrace_reward.adapters.components import open_components
from tailrace_reward.adapters.reward_model import RewardModel
from tailrace_reward.config import RewardConfig
from tailrace_reward.core.scoring import Scorer
from tests.world.servers import ServerProcess
from tests.world.serving import endpoints_of, load_args, serving

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


def save(folder: Path, maker: Any, **config: Any) -> Path:
    """A model with random weights and the tokenizer of frozen lakes."""
    build_frozen_lake_tokenizer(folder)
    torch.manual_seed(1)
    maker.from_config(Qwen3Config(**SIZES | config)).save_pretrained(folder)
    return folder


def item(number: int) -> ScoreItem:
    said = [ChatMessage("user", "PFFF\nFHFH\nFFFH\nHFFG\n"), ChatMessage("assistant", "Right")]
    return ScoreItem(f"g.{number}", EnvTask("lake", number), tuple(said * (number + 1)), (), {})


async def scores_of(folder: Path, items: list[ScoreItem], **model_args: Any) -> list[Any]:
    config = convert({"reward_pretrain": str(folder), "model_args": model_args}, RewardConfig)
    components = await open_components(config, "run.yaml")
    scorer = Scorer(config.components, components.by_name)
    try:
        return list(await scorer.score(items))
    finally:
        await components.close()


def own_scores(folder: Path, maker: Any, items: list[ScoreItem]) -> list[float]:
    """Score of each conversation alone."""
    files = {path.name: path.read_bytes() for path in folder.glob("tokenizer*.json")}
    chat = read_chat_model(ModelCard(b"{}", files), {})
    model = maker.from_pretrained(folder).eval()
    scores = []
    for each in items:
        text = chat.template.render(each.messages, add_generation_prompt=False)
        ids = torch.tensor([chat.tokenizer.encode(text, add_special_tokens=False).ids])
        with torch.no_grad():
            scores.append(float(model(input_ids=ids).logits.reshape(-1)[-1]))
    return scores


@pytest.mark.parametrize("pad_token_id", [0, None])
@pytest.mark.parametrize("maker", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
async def test_a_score_is_the_models_own_for_the_conversation_alone(
    maker: Any, pad_token_id: int | None, tmp_path: Path
) -> None:
    folder = save(tmp_path, maker, num_labels=1, pad_token_id=pad_token_id)
    items = [item(number) for number in (0, 2, 1, 3, 0)]
    scores = await scores_of(folder, items)
    assert [score.error for score in scores] == [None] * 5
    expected = own_scores(folder, maker, items)
    assert len(set(expected)) == 4, "conversations that differ must score differently"
    assert [score.reward for score in scores] == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert list(scores[0].components) == ["reward_model"]


async def test_batch_size_and_type_change_the_work_and_not_the_meaning(tmp_path: Path) -> None:
    folder = save(tmp_path, AutoModelForSequenceClassification, num_labels=1, pad_token_id=0)
    items = [item(number) for number in range(4)]
    together = [score.reward for score in await scores_of(folder, items)]
    alone = [score.reward for score in await scores_of(folder, items, max_batch_tokens=1)]
    assert alone == pytest.approx(together, rel=1e-5, abs=1e-5)  # a sum near zero rounds as its parts
    rough = [score.reward for score in await scores_of(folder, items, dtype="bfloat16")]
    assert rough != alone
    assert rough == pytest.approx(alone, rel=0.2, abs=0.2)


async def test_models_compute_with_the_threads_that_they_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tmp_path, AutoModelForSequenceClassification, num_labels=1, pad_token_id=0)
    seen: list[int] = []
    forward = RewardModel._forward

    def watched(model: RewardModel, batch: Any) -> list[float]:
        seen.append(torch.get_num_threads())
        return forward(model, batch)

    monkeypatch.setattr(RewardModel, "_forward", watched)
    for num_threads in (1, 2):
        await scores_of(folder, [item(0)], num_threads=num_threads)
    assert seen == [1, 2]


async def test_a_conversation_that_is_too_long_has_no_score_and_others_have(tmp_path: Path) -> None:
    folder = save(tmp_path, AutoModelForSequenceClassification, num_labels=1, pad_token_id=0)
    short, long = await scores_of(folder, [item(0), item(3)], max_length=20)
    assert short.error is None
    assert long.error is not None
    assert "reads 1 to 20 tokens" in long.error.reason
    (too_long,) = await scores_of(folder, [item(30)])
    assert too_long.error is not None
    assert "reads 1 to 64 tokens" in too_long.error.reason


async def test_a_token_that_the_model_lacks_costs_its_own_conversation(tmp_path: Path) -> None:
    """Tokenizers may have more tokens than the model has embeddings."""
    maker, many = AutoModelForSequenceClassification, {"num_labels": 1, "pad_token_id": 0}
    folder = save(tmp_path, maker, **many)
    files = {path.name: path.read_bytes() for path in folder.glob("tokenizer*.json")}
    chat = read_chat_model(ModelCard(b"{}", files), {})
    moves = [replace(item(0), messages=(ChatMessage("user", move),)) for move in ("Up", "Left", "Down")]
    texts = [chat.template.render(each.messages, add_generation_prompt=False) for each in moves]
    most = [max(chat.tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]
    assert len(set(most)) == 3
    save(tmp_path, maker, vocab_size=max(most), **many)
    scores = await scores_of(folder, moves)
    assert [score.error is None for score in scores] == [each < max(most) for each in most]
    (reason,) = (score.error.reason for score in scores if score.error is not None)
    assert f"knows {max(most)} tokens, and its tokenizer gives the id {max(most)}" in reason


async def test_what_is_no_reward_model_is_refused_with_the_reason(tmp_path: Path) -> None:
    causal = save(tmp_path / "causal", AutoModelForCausalLM)
    with pytest.raises(ConfigError, match=r"it is none, for it lacks the weights of score\.weight"):
        await scores_of(causal, [])
    many = save(tmp_path / "many", AutoModelForSequenceClassification, num_labels=3)
    with pytest.raises(ConfigError, match="it has 3 labels, a reward model has one"):
        await scores_of(many, [])
    (many / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing"):
        await scores_of(many, [])
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ConfigError, match=r"reward model: \S*empty is no model directory \(it holds no config\.json\)"
    ):
        await scores_of(tmp_path / "empty", [])
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"reward\.model_args\.device is 'cuda'"):
            await scores_of(causal, [], device="cuda")


async def test_the_service_serves_the_model_that_the_experiment_names(
    bus: Bus, nats_server: ServerProcess, run_name: str, tmp_path: Path
) -> None:
    folder = save(tmp_path, AutoModelForSequenceClassification, num_labels=1, pad_token_id=0)
    path = tmp_path / "experiment.yaml"
    rewards = [
        {"name": "env", "weight": 2.0},
        {"name": "model", "kind": "model"},
        {"name": "again", "kind": "model", "weight": -1.0},
    ]
    path.write_text(
        json.dumps(
            {"exp_name": run_name, "reward_pretrain": str(folder), "reward": {"rewards": rewards}}
        )
    )
    async with serving(await build(load_args(path, "r0", endpoints_of(nats_server.url)))):
        played = ScoreItem("g.0", EnvTask("lake", 0), item(0).messages, (0.5, 0.25), {})
        reply = await bus.request(
            subjects.score(run_name), ScoreRequest((played,)), ScoreReply, timeout_s=60
        )
    (score,) = reply.scores
    assert score.reward == pytest.approx(1.5)
    assert score.components["model"] == score.components["again"] != 0.0
