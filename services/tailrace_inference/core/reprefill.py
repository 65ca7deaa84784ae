"""Tokens that an engine computes again since a context left its cache between two turns.

A turn that continues its episode's last context should find it in the cache. Tokens that it does not
find were evicted, unless new weights arrived between: these change keys and values in any case. Prompts
that do not continue the last context (history windows, rewritten messages) are new work.
"""

import zlib
from collections import OrderedDict
from typing import NamedTuple

from tailrace_inference.config import InferenceConfig
from tailrace_inference.ports import EngineFeatures
from tailrace_protos.generation import GenerateRequest, TokenChunk

_MAX_EPISODES = 65_536  # the least recently used are forgotten
_ID_BYTES = 4


class _Context(NamedTuple):
    num_bytes: int
    checksum: int
    policy_version: int  # of the last token


class Turn:
    """One call from its request to its last chunk."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.num_bytes = 0  # sampled
        self.checksum = 0  # of prompt and sampled tokens; set by `ContextRecord.begun`
        self.first_version = self.last_version = -1

    def take(self, chunk: TokenChunk) -> None:
        """Take the tokens of a chunk."""
        self.num_bytes += len(chunk.token_ids)
        self.checksum = zlib.crc32(chunk.token_ids, self.checksum)
        if chunk.spans:
            if self.first_version < 0:
                self.first_version = chunk.spans[0].policy_version
            self.last_version = chunk.spans[-1].policy_version


class ContextRecord:
    """Last context of each episode. `block_tokens`: a lack of fewer tokens is rounding."""

    def __init__(self, block_tokens: int) -> None:
        self.num_recomputed_tokens = 0
        self._block_tokens = block_tokens
        self._contexts: OrderedDict[str, _Context] = OrderedDict()
        self._expected: dict[str, _Context] = {}  # by call: the context that it continues

    def begun(self, request: GenerateRequest) -> Turn:
        """Take a request."""
        turn = Turn(request)
        prompt, known = memoryview(request.prompt_ids), self._contexts.get(request.episode_id)
        cut = known.num_bytes if known is not None and known.num_bytes <= len(prompt) else 0
        start = zlib.crc32(prompt[:cut])
        turn.checksum = zlib.crc32(prompt[cut:], start)
        if cut and known is not None and known.checksum == start:
            self._expected[request.call_id] = known
        return turn

    def ended(self, turn: Turn, num_cached_tokens: int) -> None:
        """Take the end of a call that sampled tokens, and the prompt tokens it found in the cache."""
        request = turn.request
        known = self._expected.pop(request.call_id, None)
        if not turn.num_bytes:
            return
        if known is not None and known.policy_version == turn.first_version:
            # The last token of a turn was sampled but never computed.
            num_missing = known.num_bytes // _ID_BYTES - 1 - num_cached_tokens
            if num_missing > self._block_tokens:
                self.num_recomputed_tokens += num_missing
        num_bytes = len(request.prompt_ids) + turn.num_bytes
        self._contexts[request.episode_id] = _Context(num_bytes, turn.checksum, turn.last_version)
        self._contexts.move_to_end(request.episode_id)
        if len(self._contexts) > _MAX_EPISODES:
            self._contexts.popitem(last=False)


def kept_contexts(config: InferenceConfig, features: EngineFeatures) -> ContextRecord | None:
    """Record for an engine that keeps contexts between turns; None for one that computes all again.

    The scheduler gives servers fewer episodes while contexts leave their cache, which helps only there.
    """
    if not (config.prefix_cache and features.prefix_reuse):
        return None
    return ContextRecord(config.kv_block_tokens)
