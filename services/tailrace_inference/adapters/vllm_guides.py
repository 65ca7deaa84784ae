"""Guided replies in vLLM's engine core: our matchers in the place of its grammar backends.

vLLM's own backends begin at the first token of a request, so that a call which another server began
could not go on. Ours get the tokens so far, and mean the same as in the torch engine.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import (
    StructuredOutputBackend,
    StructuredOutputGrammar,
)

from tailrace_inference.adapters.vllm_release import ReleasesContexts
from tailrace_inference.adapters.vllm_resume import ResumesInTurn
from tailrace_inference.engine.guided import GuideMatcher, read_guides


class GuidedSampling(SamplingParams):  # type: ignore[misc]  # vLLM has no types here
    """Parameters whose `structured_outputs.grammar` is a `GuideSpec`, which is checked already."""

    def _validate_structured_outputs(self, *_: Any) -> None:
        """Leaves out vLLM's check of the grammar, which needs a tokenizer."""


class _Grammar(StructuredOutputGrammar):  # type: ignore[misc]
    """The matcher of one request."""

    def __init__(self, matcher: GuideMatcher) -> None:
        self._matcher = matcher

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return all(self._matcher.consume(token) for token in tokens)

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        return self._matcher.fitting(tokens)

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    def fill_bitmask(self, bitmask: Tensor, batch_index: int) -> None:
        if self._matcher.allowed.any():
            bitmask[batch_index] = torch.from_numpy(self._matcher.packed())
        else:  # whatever comes does not fit, and ends the request with an error
            bitmask[batch_index] = -1

    def is_terminated(self) -> bool:
        return self._matcher.is_ended

    def reset(self) -> None:
        """Nothing: a request is never begun again."""


class _Backend(StructuredOutputBackend):  # type: ignore[misc]
    """Makes the grammars of requests."""

    def __init__(self, vllm_config: Any) -> None:
        model = vllm_config.model_config
        super().__init__(vllm_config, None, model.get_vocab_size())
        self._guides = read_guides(Path(model.model), self.vocab_size)

    def compile_grammar(
        self, request_type: Any, grammar_spec: str, stop_token_ids: set[int] | None = None
    ) -> _Grammar:
        return _Grammar(self._guides.matcher_of(grammar_spec))

    def allocate_token_bitmask(self, max_num_seqs: int) -> Tensor:
        return torch.full((max_num_seqs, -(-self.vocab_size // 32)), -1, dtype=torch.int32)

    def destroy(self) -> None:
        """Nothing is held."""


class _Manager(StructuredOutputManager):  # type: ignore[misc]
    """Manager that reads a request's grammar at once: it takes milliseconds."""

    backend: _Backend | None

    def grammar_init(self, request: Any) -> None:
        if request.structured_output_request is None:
            return
        if self.backend is None:
            self.backend = _Backend(self.vllm_config)
        request.structured_output_request.grammar = self._create_grammar(request)


class _Scheduler(ReleasesContexts, ResumesInTurn, Scheduler):  # type: ignore[misc]
    """See its parts."""


class _AsyncScheduler(ReleasesContexts, ResumesInTurn, AsyncScheduler):  # type: ignore[misc]
    """See its parts."""


def make_scheduler(*, vllm_config: Any, structured_output_manager: Any, **named: Any) -> Scheduler:
    """vLLM's own scheduler with our parts; the manager of grammars, which it shares with the core,
    becomes ours."""
    structured_output_manager.__class__ = _Manager
    is_async = vllm_config.scheduler_config.async_scheduling
    return (_AsyncScheduler if is_async else _Scheduler)(
        vllm_config=vllm_config, structured_output_manager=structured_output_manager, **named
    )
