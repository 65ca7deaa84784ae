"""SGLang's scheduler process: Tailrace's sampler in it, and the loader of staged weights.

SGLang knows seeds only where its kernels are deterministic, which needs an accelerator, and takes top-p
of all tokens even with top-k. Here the random number of a token is a function of its call's seed and of
its place in the sequence alone, so it depends neither on the batch nor on the server, and a continued
call goes on with the numbers that it would have had.
"""

from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from sglang.srt.layers.sampler import Sampler, register_sampler_backend
from sglang.srt.managers import scheduler
from sglang.srt.managers.scheduler import run_scheduler_process
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from torch import Tensor

from tailrace_inference.adapters.sglang_guides import GuideManager
from tailrace_inference.adapters.staging import end_with_server
from tailrace_inference.engine.sampling import SamplingRows, draw, filtered, uniforms

LOADER = f"{__name__}.load_staged"
_made_info = SamplingBatchInfo.from_schedule_batch.__func__


class SeededSampler(Sampler):  # type: ignore[misc]  # SGLang has no types here
    """SGLang's sampler with the filters and random numbers of Tailrace's own engine."""

    def _sample_from_probs(
        self, probs: Tensor, sampling_info: Any, positions: Tensor, simple_sampling_case: bool
    ) -> tuple[Tensor, None]:
        top_k = sampling_info.top_ks.cpu().numpy().astype(np.int64)
        rows = SamplingRows(
            temperature=sampling_info.temperatures.view(-1).cpu().numpy(),
            top_p=sampling_info.top_ps.cpu().numpy(),
            top_k=np.where(top_k == TOP_K_ALL, 0, top_k),
            min_p=sampling_info.min_ps.cpu().numpy(),
            key=sampling_info.sampling_seed.cpu().numpy().view(np.uint64),
            counter=positions.cpu().numpy().astype(np.int64),
        )
        tokens = draw(filtered(probs.float(), rows), uniforms(rows.key, rows.counter))
        return tokens.view(-1).to(torch.int32), None


def _seeded_info(cls: type, batch: Any, vocab_size: int) -> Any:
    """`SamplingBatchInfo.from_schedule_batch`, with the calls' seeds on every device."""
    info = _made_info(cls, batch, vocab_size)
    sampling = [each.sampling_params for each in batch.reqs]
    info.sampling_seed = torch.tensor(
        [each.sampling_seed or 0 for each in sampling], dtype=torch.int64, device=batch.device
    )
    # Top-k of 1 counts as greedy, but its log-probabilities are still those after the temperature.
    info.is_all_greedy &= all(each.temperature == 1.0 for each in sampling)
    return info


def run_scheduler(*args: Any, **named: Any) -> None:
    """Body of the process; it ends with the server."""
    end_with_server()
    scheduler.GrammarManager = GuideManager
    register_sampler_backend("pytorch", SeededSampler)
    SamplingBatchInfo.from_schedule_batch = classmethod(_seeded_info)
    run_scheduler_process(*args, **named)


def load_staged(model: Any, named: list[tuple[str, Tensor]]) -> None:
    """Loads safetensors files, named by their paths; tensor-parallel ranks cut the tensors."""
    for path, _ in named:
        with safe_open(path, framework="pt") as file:
            model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
