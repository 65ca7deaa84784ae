"""One episode's conversations with their tokens: what was asked, what was sampled, what it was worth.

Invariants: a token is trained only if an engine sampled it, and by one row only; a prompt is made of
recorded ids and newly inserted ones, never of a reply encoded again; recording a call twice changes
nothing; a ledger restored from its nodes is the same ledger.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace.chat import ParsedReply, Renderer
from tailrace.config.chat import ReasoningPolicy
from tailrace.ledger.export import export_rows
from tailrace.ledger.prompt import Prompt, Sampled
from tailrace.ledger.prompting import prompt_of_messages, prompt_of_tokens
from tailrace.ledger.returns import conversations, own_reward
from tailrace.ledger.row_builder import trained_tokens
from tailrace.ledger.tree import CallTree
from tailrace_protos.base import pack_float32, pack_int32
from tailrace_protos.chat import ChatMessage, ToolSchema
from tailrace_protos.generation import FinishReason
from tailrace_protos.session import ExportStyle, LedgerNode
from tailrace_protos.trajectory import TokenRow


class Ledger:
    """A tree of calls; pure: it reads no clock, calls no engine and keeps nothing anywhere else."""

    def __init__(self, renderer: Renderer, *, reasoning: ReasoningPolicy = "keep") -> None:
        self._renderer = renderer
        self._reasoning: ReasoningPolicy = reasoning
        self._tree = CallTree()
        self._num_sampled = 0

    @classmethod
    def restore(
        cls,
        renderer: Renderer,
        nodes: Iterable[LedgerNode],
        *,
        reasoning: ReasoningPolicy = "keep",
    ) -> Ledger:
        """The ledger whose `nodes` these are."""
        ledger = cls(renderer, reasoning=reasoning)
        for node in nodes:
            ledger.add(node)
        return ledger

    def prepare(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSchema] = ()) -> Prompt:
        """How to ask for the next reply of a conversation given as text; records nothing.

        Raises `ValueError` without messages, `TemplateError` if the template cannot render them.
        """
        if not messages:
            raise ValueError("a conversation needs at least one message")
        return prompt_of_messages(
            self._tree, self._renderer, self._reasoning, tuple(messages), tuple(tools)
        )

    def prepare_tokens(
        self, prompt_ids: NDArray[np.int32], messages: Sequence[ChatMessage] = ()
    ) -> Prompt:
        """How to ask with these ids [P]; `messages` are the new ones, if the caller has them as text.

        Ids that go exactly through a recorded call continue it; all others begin a conversation.
        """
        if not len(prompt_ids):
            raise ValueError("a prompt needs at least one token")
        return prompt_of_tokens(self._tree, prompt_ids, tuple(messages))

    def record(
        self,
        prompt: Prompt,
        generation: Sampled,
        parsed: ParsedReply | ChatMessage,
        completion_id: str,
    ) -> LedgerNode:
        """Keep a call's tokens and its reply; a call that is there already is returned as it is."""
        if completion_id in self._tree:
            return self._tree.find(completion_id).node
        if isinstance(parsed, ChatMessage):
            parsed = ParsedReply(parsed)
        node = LedgerNode(
            completion_id=completion_id,
            parent_id=prompt.parent_id,
            messages=prompt.messages,
            inserted_ids=pack_int32(prompt.inserted_ids),
            token_ids=pack_int32(generation.token_ids),
            inference_logprobs=pack_float32(generation.inference_logprobs),
            spans=generation.spans,
            finish_reason=generation.finish_reason or FinishReason.ABORT,
            reply=parsed.message,
            tools=prompt.tools,
            is_rendered_whole=prompt.is_rendered_whole,
            is_fork=prompt.is_fork,
            num_malformed=parsed.num_malformed,
        )
        self.add(node)
        return node

    def add(self, node: LedgerNode) -> None:
        """Take over a node as it is, also in the place of one with the same id.

        Raises `UnknownCompletionError` if its parent is not there.
        """
        if node.completion_id not in self._tree:
            self._num_sampled += len(node.token_ids) // 4
        self._tree.add(node)

    def mask(self, completion_id: str, reason: str) -> LedgerNode:
        """Never train the tokens of a call; raises `UnknownCompletionError`."""
        node = self._tree.find(completion_id).node
        return self._replace(msgspec.structs.replace(node, is_masked=True, mask_reason=reason))

    def set_reward(self, reward: float, completion_id: str = "") -> LedgerNode:
        """What a call was worth, the last one for an empty id; raises `UnknownCompletionError`."""
        node = self._tree.find(completion_id).node
        return self._replace(msgspec.structs.replace(node, reward=float(reward)))

    def settle(self, reward: float) -> None:
        """Let the rewards of all calls add up to `reward`, the episode's; needs a call.

        What is missing belongs to the newest call of the conversations that were given a reward, to the
        newest of all where none was.
        """
        homes = conversations(self._tree)
        rewarded = [name for name, home in homes.items() if home.has_reward]
        missing = reward - math.fsum(own_reward(call) for call in self._tree)
        if missing or not rewarded:
            newest = self._tree.find(rewarded[-1] if rewarded else "")
            self.set_reward(own_reward(newest) + missing, newest.node.completion_id)

    @property
    def num_sampled(self) -> int:
        """Tokens sampled by all calls."""
        return self._num_sampled

    @property
    def nodes(self) -> tuple[LedgerNode, ...]:
        """All calls in the order of their recording."""
        return tuple(call.node for call in self._tree)

    def rows(self, style: ExportStyle, turn_discount: float = 1.0) -> tuple[TokenRow, ...]:
        """The rows to train (`tailrace.ledger.export`)."""
        return export_rows(self._tree, style, turn_discount)

    def messages(self, completion_id: str = "") -> tuple[ChatMessage, ...]:
        """The conversation of a call with its reply; of the last call for an empty id."""
        path = self._tree.find(completion_id).message_path()
        return tuple(message for call in path for message in (*call.node.messages, call.node.reply))

    def counts(self) -> dict[str, float]:
        """What is to be counted of the calls, as metrics."""
        nodes = self.nodes
        unfit = sum(int((~trained_tokens(node)).sum()) for node in nodes if not node.is_masked)
        counts = {
            "num_calls": len(nodes),
            "num_sampled_tokens": self._num_sampled,
            "num_forks": sum(node.is_fork for node in nodes),
            "num_malformed_tool_calls": sum(node.num_malformed for node in nodes),
            "num_tool_calls": sum(len(node.reply.tool_calls) for node in nodes),
            "num_masked_calls": sum(node.is_masked for node in nodes),
            "num_nonfinite_tokens": unfit,
        }
        return {name: float(count) for name, count in counts.items()}

    def _replace(self, node: LedgerNode) -> LedgerNode:
        self._tree.add(node)
        return node
