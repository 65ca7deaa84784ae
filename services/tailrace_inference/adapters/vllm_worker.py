"""Extension of vLLM's workers: loads staged weights, and log-probabilities after the temperature.

vLLM reports log-probabilities before the temperature (`raw`), or after all filters (`processed`). Ours
are those after the temperature and before the filters, which neither of them is. Runs in the processes
of the engine, which import it by name at their start; from then on they end with the server.
"""

from collections.abc import Iterator
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.v1.sample.sampler import Sampler

from tailrace_inference.adapters.staging import end_with_server

_GREEDY = 1e-5  # vLLM takes temperatures below it as 0


class ScaledLogprobs(Sampler):  # type: ignore[misc]  # vLLM has no types here
    """vLLM's sampler, whose raw log-probabilities are those after the temperature."""

    _scale: Tensor | None = None

    def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        """See `Sampler`."""
        temperature = None if sampling_metadata.all_greedy else sampling_metadata.temperature
        if temperature is not None:
            scale = torch.where(temperature < _GREEDY, 1.0, temperature)
            self._scale = scale.to(torch.float32).unsqueeze(1)
        try:
            return super().forward(logits, sampling_metadata, *args, **kwargs)
        finally:
            self._scale = None

    def compute_logprobs(self, logits: Tensor) -> Tensor:
        """Log-probabilities [n, vocabulary] float32 after the temperature of the step."""
        scaled = logits.float()
        if self._scale is not None:
            scaled = scaled / self._scale
        return scaled.log_softmax(dim=-1)


class WeightLoader:
    """Methods that vLLM adds to its worker class."""

    model_runner: Any

    def tailrace_scale_logprobs(self) -> None:
        """Lets the sampler report log-probabilities after the temperature."""
        self.model_runner.sampler.__class__ = ScaledLogprobs

    def tailrace_load(self, path: str) -> None:
        """Loads a safetensors file into the model, layer by layer; tensor-parallel ranks cut it."""
        self.model_runner.reload_weights(weights_iterator=_tensors(path))
        for layer in self.model_runner.get_model().modules():
            # On the CPU an output layer tied to the embedding keeps a packed copy, which vLLM forgets.
            if hasattr(layer, "cpu_linear") and layer.weight.numel():
                layer.quant_method.process_weights_after_loading(layer)


def _tensors(path: str) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, framework="pt") as file:
        names: list[str] = file.keys()
        for name in names:
            yield name, file.get_tensor(name)


end_with_server()
