"""Release of ended episodes' contexts in vLLM's scheduler.

vLLM keeps the blocks of a finished request until they are the least recently used. It has no call to
give them up, but it passes the ids of aborted requests to its scheduler, also unknown ones. An id of
`release_id` names an episode: the blocks of its last request go to the head of the free queue, without
those of its first prompt, which its siblings share.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

EPISODE = "episode_id"  # key of `SamplingParams.extra_args`
_PREFIX = "release "
_MAX_EPISODES = 4096  # the least recently used are forgotten: their blocks go in vLLM's own order


def release_id(episode_id: str) -> str:
    """Id for `abort_requests_async` that releases the context of an episode."""
    return _PREFIX + episode_id


class ReleasesContexts:
    """Part of a scheduler class, before vLLM's own in its bases."""

    kv_cache_manager: Any

    def __init__(self, *parts: Any, **named: Any) -> None:
        super().__init__(*parts, **named)
        # By episode: number of its first prompt's blocks, and the hashes of its newest request's.
        self._contexts: OrderedDict[str, tuple[int, list[bytes]]] = OrderedDict()

    def _free_blocks(self, request: Any) -> None:
        """Remembers the context of a finished request."""
        arguments = request.sampling_params.extra_args or {}
        episode_id = arguments.get(EPISODE)
        if episode_id is not None:
            size = self.kv_cache_manager.block_pool.hash_block_size
            num_first, _ = self._contexts.pop(episode_id, (request.num_prompt_tokens // size, []))
            self._contexts[episode_id] = num_first, request.block_hashes
            if len(self._contexts) > _MAX_EPISODES:
                self._contexts.popitem(last=False)
        super()._free_blocks(request)  # type: ignore[misc]

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        """Releases what is named; vLLM's own ignores these ids."""
        finished = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        if isinstance(request_ids, Iterable) and not isinstance(request_ids, str):
            for request_id in request_ids:
                if request_id.startswith(_PREFIX):
                    self._release(request_id.removeprefix(_PREFIX))
        return finished

    def _release(self, episode_id: str) -> None:
        num_first, hashes = self._contexts.pop(episode_id, (0, []))
        pool, manager = self.kv_cache_manager.block_pool, self.kv_cache_manager
        free = []
        for group in range(manager.num_kv_cache_groups):
            for block_hash in hashes[num_first:]:
                for block in pool.get_cached_block(block_hash, [group]) or ():
                    if block.ref_cnt == 0 and not block.is_null:
                        pool.free_block_queue.remove(block)
                        free.append(block)
        pool.free_block_queue.prepend_n(free[::-1])  # the tail of a context first, as vLLM does
