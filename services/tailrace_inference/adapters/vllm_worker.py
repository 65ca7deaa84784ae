"""Extension of vLLM's workers: loads staged weights, and log-probabilities after the temperature.

vLLM reports log-probabilities before the temperature (`raw`), or after all filters (`processed`). Ours
are those after the temperature and before the filters, which neither of them is. Runs in the processes
of the engine, which import it by name at their start; from then on they end with the server.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from vllm import _custom_ops
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import inplace
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler

from tailrace_inference.adapters.staging import FOLLOWER_FOLDER, end_with_server

_GREEDY = 1e-5  # vLLM takes temperatures below it as 0


class ScaledLogprobs(Sampler):  # type: ignore[misc]  # vLLM has no types here
    """vLLM's sampler, whose raw log-probabilities are those after the temperature."""

    _scale: Tensor | None = None

    def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        """See `Sampler`."""
        self._scale = _scale(sampling_metadata)
        try:
            return super().forward(logits, sampling_metadata, *args, **kwargs)
        finally:
            self._scale = None

    def compute_logprobs(self, logits: Tensor) -> Tensor:
        """Log-probabilities [n, vocabulary] float32 after the temperature of the step.

        `n`: calls, or the places of each in turn, after a step that checked drafts.
        """
        scaled = logits.float()
        if self._scale is not None:
            places = len(logits) // len(self._scale)
            scaled = scaled / self._scale.repeat_interleave(places, dim=0)
        return scaled.log_softmax(dim=-1)


class ScaledRejections(RejectionSampler):  # type: ignore[misc]
    """vLLM's check of drafts, with log-probabilities as those of `ScaledLogprobs`."""

    sampler: ScaledLogprobs
    _scale: Tensor | None = None

    def forward(
        self, metadata: Any, draft_probs: Tensor | None, logits: Tensor, sampling_metadata: Any
    ) -> Any:
        """See `RejectionSampler`. vLLM fails at a step with a top-k and without any draft."""
        if not any(metadata.num_draft_tokens):
            return self.sampler(logits=logits, sampling_metadata=sampling_metadata)
        self._scale = _scale(sampling_metadata)
        return super().forward(metadata, draft_probs, logits, sampling_metadata)

    def _get_logprobs_tensors(self, *args: Any) -> Any:
        self.sampler._scale = self._scale
        try:
            return super()._get_logprobs_tensors(*args)
        finally:
            self.sampler._scale = None


def _scale(sampling_metadata: Any) -> Tensor | None:
    """Temperatures [calls, 1] float32 of log-probabilities; None: all are 1."""
    if sampling_metadata.all_greedy or sampling_metadata.temperature is None:
        return None
    temperature = sampling_metadata.temperature
    scale: Tensor = torch.where(temperature < _GREEDY, 1.0, temperature)
    return scale.to(torch.float32).unsqueeze(1)


def _of_each_draft(
    values: Tensor, ends: Tensor, num_drafts: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Values [calls] for each draft [num_drafts]; `ends`: number of drafts up to each call's last.

    vLLM's own fills a copy on the CPU, and checks drafts at temperatures that nobody wrote.
    """
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    found = values.repeat_interleave(counts, output_size=num_drafts)
    return found if replace_from == replace_to else found.masked_fill(found == replace_from, replace_to)


class WeightLoader:
    """Methods that vLLM adds to its worker class."""

    model_runner: Any

    def tailrace_scale_logprobs(self) -> None:
        """Lets the sampler report log-probabilities after the temperature."""
        self.model_runner.sampler.__class__ = ScaledLogprobs
        if hasattr(self.model_runner, "rejection_sampler"):  # with speculative decoding
            self.model_runner.rejection_sampler.__class__ = ScaledRejections
            rejection_sampler.expand_batch_to_tokens = _of_each_draft

    def tailrace_load(self, path: str) -> None:
        """Loads a safetensors file into the model, layer by layer; tensor-parallel ranks cut it.

        `path` is the leader's; another node has the file of this name in a folder of its own.
        """
        if folder := os.environ.get(FOLLOWER_FOLDER):
            path = str(Path(folder) / Path(path).name)
        layers = list(self.model_runner.get_model().modules())
        if self.model_runner.device.type == "cpu":
            for layer in layers:
                # Experts are packed for the CPU where their kernel is made, which vLLM does once.
                if getattr(getattr(layer, "quant_method", None), "moe_kernel", None) is not None:
                    layer.quant_method.moe_kernel = None
        self.model_runner.reload_weights(weights_iterator=_tensors(path))
        for layer in layers:
            # On the CPU an output layer tied to the embedding keeps a packed copy, which vLLM forgets.
            if hasattr(layer, "cpu_linear") and layer.weight.numel():
                layer.quant_method.process_weights_after_loading(layer)


_finalize = inplace.finalize_layerwise_reload


def _finalize_whole(model: Any, model_config: Any) -> None:
    """Ends a reload, unless layers got none of their weights: vLLM would say so in its log alone.

    Models whose loader copies into the parameters themselves lose what they copy (GPT-OSS's experts).
    """
    is_tied = getattr(model_config.hf_text_config, "tie_word_embeddings", False)
    if lost := _not_loaded(model, is_tied):
        raise RuntimeError(
            f"vLLM loads no update of {len(lost)} layers of {type(model).__name__}, such as {lost[0]}: "
            "take another engine for this model"
        )
    _finalize(model, model_config)


def _not_loaded(model: Any, is_tied: bool) -> list[str]:
    """Names of the text model's layers with weights of which a reload has loaded none.

    `is_tied`: the output layer's are those of the embedding.
    """
    text = model.get_language_model() if hasattr(model, "get_language_model") else model
    return [
        name
        for name, layer in text.named_modules()
        if next(layer.parameters(recurse=False), None) is not None
        and not (is_tied and isinstance(layer, ParallelLMHead))
        and not is_deferred_attention_layer(layer)
        and _is_empty(get_layerwise_info(layer))
    ]


def _is_empty(info: Any) -> bool:
    """Tells whether a layer waits for its first weight; one that has all of them waits for none."""
    return info.can_load() and not info.load_numel


def _tensors(path: str) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        names: list[str] = file.keys()
        for name in names:
            yield name, file.get_tensor(name)


def leave_weights_alone() -> None:
    """Has torch compute linear layers on a CPU without AVX-512, before vLLM loads a model.

    There vLLM with drafts computed small batches wrongly after an update: its oneDNN packs nothing, and
    seems to read weights whose memory vLLM gave up. The contract's tests of updates see it.
    """
    if not torch.cpu._is_avx512_supported():
        _custom_ops._supports_onednn = False


inplace.finalize_layerwise_reload = _finalize_whole
end_with_server()
leave_weights_alone()
