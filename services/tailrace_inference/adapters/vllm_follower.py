"""A node of a vLLM server that only computes: workers of the leader's engine, and their weights.

vLLM's own processes connect to those of the leader, and take its steps and control calls. Invariant:
the follower ends with the leader, and its workers with it.
"""

import asyncio
import os
from functools import partial
from typing import NoReturn

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from tailrace_inference.adapters.node_follower import LeaderLink
from tailrace_inference.adapters.node_link import Node, Welcome
from tailrace_inference.adapters.staging import (
    FOLLOWER_FOLDER,
    SERVER_PID,
    OwnFolder,
    kill_children,
    max_sequence_tokens,
    unless_failed,
    write_model_folder,
)
from tailrace_inference.adapters.vllm_arguments import check_engine_args, engine_arguments
from tailrace_inference.config import InferenceConfig
from tailrace_inference.ports import EngineFailedError
from tailrace_protos.generation import MAX_TOP_LOGPROBS
from tailrace_protos.weights import ModelCard

_LOOK_S = 0.25  # between two looks at the workers
_LOSS_TOLD_S = 2.0  # a dead leader breaks a worker's collective before its link is seen to end


class VllmFollower:
    """See `EngineFollower`."""

    def __init__(self, card: ModelCard, config: InferenceConfig, node: Node) -> None:
        check_engine_args(config.engine_args)
        self._card, self._config, self._node = card, config, node
        self._folder = OwnFolder()  # the model's configuration, and the versions
        self._link = LeaderLink(node, self._folder.path)
        self._obeying: asyncio.Task[NoReturn] | None = None

    async def start(self) -> None:
        """See `EngineFollower`."""
        welcome = await self._link.join()
        self._obeying = asyncio.create_task(self._link.obey(), name="follower")
        args = self._arguments(welcome)
        os.environ[SERVER_PID] = str(os.getpid())
        os.environ[FOLLOWER_FOLDER] = os.environ["VLLM_RPC_BASE_PATH"] = str(self._folder.path)
        self._executor = await unless_failed(partial(self._build, args), self._obeying)

    def _arguments(self, welcome: Welcome) -> AsyncEngineArgs:
        folder = self._folder.path
        return engine_arguments(
            self._config,
            str(folder),
            write_model_folder(self._card, folder),
            max_len=max_sequence_tokens(self._config, self._card),
            max_logprobs=MAX_TOP_LOGPROBS,
            sleeps=False,
            node=self._node,
            welcome=welcome,
        )

    def _build(self, args: AsyncEngineArgs) -> MultiprocExecutor:
        config = args.create_engine_config(headless=True)
        return MultiprocExecutor(config, monitor_workers=False)

    async def watch(self) -> NoReturn:
        """See `EngineFollower`."""
        assert self._obeying is not None, "watch before start"
        while all(worker.proc.is_alive() for worker in self._executor.workers):
            await asyncio.wait({self._obeying}, timeout=_LOOK_S)
            if self._obeying.done():
                self._obeying.result()
        await asyncio.wait({self._obeying}, timeout=_LOSS_TOLD_S)
        if self._obeying.done():
            self._obeying.result()
        raise EngineFailedError("a worker of vLLM died")

    async def close(self) -> None:
        """See `EngineFollower`. A worker may wait for those of a dead leader, so it is killed."""
        kill_children()
        if self._obeying is not None:
            self._obeying.cancel()
            await asyncio.wait({self._obeying})
        self._link.close()
        self._folder.remove()
