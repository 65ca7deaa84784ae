"""Reward models of Hugging Face, on torch.

A conversation's score is the model's own for it alone: batches are padded on the right with the token
that the model's pooling looks for, and a model without one gets no batches.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from tailrace.chat.model_files import present_folder, read_chat_model, read_model_card
from tailrace.chat.template import TemplateError
from tailrace.config import ConfigError
from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.model_probe import context_tokens
from tailrace_protos.reward import ScoreItem
from tailrace_reward import metrics
from tailrace_reward.config import RewardModelArgs
from tailrace_reward.core.batching import Batches, TokenIds
from tailrace_reward.ports import ComponentFailedError

_TOKENS = "ForTokenClassification"


class RewardModel:
    """`Component` of a model on this machine; close it.

    Raises `ConfigError` for a directory without a reward model that we can run.
    """

    def __init__(self, pretrain: str, args: RewardModelArgs) -> None:
        self._name = pretrain
        folder = _folder(pretrain)
        try:
            self._chat = read_chat_model(read_model_card(folder), {})
        except (TemplateError, OSError) as error:
            raise ConfigError(f"reward model {pretrain}: {error}") from error
        self._thread = ThreadPoolExecutor(
            1, "reward-model", lambda: torch.set_num_threads(args.num_threads)
        )
        self._model, self._scores_tokens = _load(folder, pretrain, args)
        self._pad_id = self._model.config.get_text_config().pad_token_id
        self._max_length = args.max_length or context_tokens(self._model.config)
        self._vocabulary = len(self._model.get_input_embeddings().weight)
        single = self._pad_id is None and not self._scores_tokens
        self._batches = Batches(self._run, 1 if single else args.max_batch_tokens)

    async def score(self, item: ScoreItem) -> float:
        """See `Component`."""
        try:
            text = self._chat.template.render(item.messages, add_generation_prompt=False)
        except TemplateError as error:
            raise self._failure(str(error)) from error
        token_ids = self._chat.tokenizer.encode(text, add_special_tokens=False).ids
        if not token_ids or (self._max_length and len(token_ids) > self._max_length):
            raise self._failure(
                f"reads 1 to {self._max_length} tokens, the conversation has {len(token_ids)}"
            )
        if max(token_ids) >= self._vocabulary:  # it would fail all of its batch, or the whole device
            raise self._failure(
                f"knows {self._vocabulary} tokens, and its tokenizer gives the id {max(token_ids)}"
            )
        return await self._batches.score(token_ids)

    async def close(self) -> None:
        """Let the batch at work end."""
        await asyncio.to_thread(self._thread.shutdown)

    async def _run(self, batch: Sequence[TokenIds]) -> Sequence[float]:
        try:
            scores = await asyncio.get_running_loop().run_in_executor(
                self._thread, self._forward, batch
            )
        except RuntimeError as error:  # torch's: out of memory, a shape that the model cannot take
            raise self._failure(f"failed: {error}") from error
        metrics.MODEL_ITEMS.labels(self._name).inc(len(batch))
        metrics.MODEL_BATCHES.labels(self._name).inc()
        return scores

    @torch.inference_mode()
    def _forward(self, batch: Sequence[TokenIds]) -> list[float]:
        """Scores of conversations [B]."""
        longest = max(map(len, batch))
        pad_id = 0 if self._pad_id is None else self._pad_id
        ids = [[*row, *[pad_id] * (longest - len(row))] for row in batch]
        mask = [[1] * len(row) + [0] * (longest - len(row)) for row in batch]
        device = self._model.device
        logits = self._model(
            input_ids=torch.tensor(ids, device=device),  # [B, T]
            attention_mask=torch.tensor(mask, device=device),
        ).logits.float()
        if self._scores_tokens:  # [B, T, 1]
            last = torch.tensor([len(row) - 1 for row in batch], device=device)
            logits = logits[torch.arange(len(batch), device=device), last]
        values: list[float] = logits[:, 0].tolist()
        return values

    def _failure(self, reason: str) -> ComponentFailedError:
        return ComponentFailedError(f"reward model {self._name}", reason)


def _folder(pretrain: str) -> Path:
    if (folder := present_folder(pretrain, "reward model")) is not None:
        return folder
    try:
        return Path(snapshot_download(pretrain, ignore_patterns=["*.bin", "*.pth", "*.gguf"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"reward model {pretrain}: neither a directory nor to be had from the hub: "
            f"{str(error).splitlines()[0]}"
        ) from error


def _load(folder: Path, name: str, args: RewardModelArgs) -> tuple[Any, bool]:
    """The model on its device, and whether it has a value for every token."""
    device = _device(args)
    try:
        with foreign_code("transformers"):
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            scores_tokens = any(kind.endswith(_TOKENS) for kind in config.architectures or ())
            maker: Any = (
                AutoModelForTokenClassification if scores_tokens else AutoModelForSequenceClassification
            )
            dtype = args.dtype if args.dtype != "auto" or device.type == "cuda" else "float32"
            model, info = maker.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    except ForeignCodeError as error:
        reason = " ".join(str(error.error).split())
        raise ConfigError(f"reward model {name} cannot be loaded: {reason}") from error
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"])[:3])
        raise ConfigError(f"reward model {name}: it is none, for it lacks the weights of {missing}")
    if config.num_labels != 1:
        raise ConfigError(
            f"reward model {name}: it has {config.num_labels} labels, a reward model has one"
        )
    return model.to(device).eval().requires_grad_(False), scores_tokens


def _device(args: RewardModelArgs) -> torch.device:
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "reward.model_args.device is 'cuda', but torch sees no CUDA device: set it to auto or cpu"
        )
    has_cuda = torch.cuda.is_available() and args.device != "cpu"
    return torch.device("cuda" if has_cuda else "cpu")
