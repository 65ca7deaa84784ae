"""A call that is about to be made: where it stands in the tree and which tokens it is asked with."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailrace_protos.chat import ChatMessage, ToolSchema


class Prompt(NamedTuple):
    """Give `prompt_ids` to the engine and the whole thing back to `Ledger.record`.

    `is_rendered_whole`: the parent's messages are continued, but none of its tokens.
    `is_fork`: text of a reply was inserted instead of its tokens, or all was rendered anew.
    """

    parent_id: str  # empty: a conversation begins here
    messages: tuple[ChatMessage, ...]  # the new ones
    inserted_ids: NDArray[np.int32]  # [o]
    prompt_ids: NDArray[np.int32]  # [P] all tokens; its last o are `inserted_ids`
    is_fork: bool
    tools: tuple[ToolSchema, ...] = ()
    is_rendered_whole: bool = False
