"""OpenAI's chat completions: requests, responses and streams.

A response has the thoughts under both names of vLLM, `reasoning` and the older `reasoning_content`, if
the model reasoned first. It has `token_ids` and `prompt_token_ids` if the request sets
`return_token_ids`, as in vLLM.
"""

from typing import Any

from tailrace_gateway.core.body import DefaultOnly, NumberRanges, read_body
from tailrace_gateway.core.call import CallStart, Completion, ModelCall, Piece, ReplyChoice
from tailrace_gateway.core.errors import BadRequestError
from tailrace_gateway.core.openai_answers import (
    OpenAIStream,
    TokenText,
    logprob_entries,
    tool_calls_of,
    whole_answer,
)
from tailrace_gateway.core.openai_request import (
    InMessage,
    InTool,
    OpenAIRequest,
    read_constraints,
    read_messages,
    read_tools,
    template_args,
)
from tailrace_protos.generation import MAX_TOP_LOGPROBS

_DEFAULT_ONLY = DefaultOnly(
    modalities=(["text"],),
    functions=([],),
    function_call=("auto", "none"),
    add_generation_prompt=(True,),
    continue_final_message=(False,),
    documents=([],),
    chat_template=(),
    web_search_options=(),
)
_RANGES = NumberRanges(max_completion_tokens=(1, 1 << 31), top_logprobs=(0, MAX_TOP_LOGPROBS))


class ChatRequest(OpenAIRequest, frozen=True, kw_only=True):
    """Body of a chat completion. Fields of the second group are accepted only without effect."""

    messages: list[InMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[InTool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None

    modalities: list[str] | None = None
    functions: Any = None
    function_call: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[Any] | None = None
    chat_template: str | None = None
    web_search_options: Any = None
    prediction: Any = None  # a guess of the reply, for speed
    # Metadata of the client without effect on a reply.
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None


def read_chat(raw: bytes) -> tuple[ChatRequest, ModelCall]:
    """Parse a request; return its body and its model call. Raise `BadRequestError`."""
    body = read_body(raw, ChatRequest)
    body.require_shared()
    _DEFAULT_ONLY.require(body)
    _RANGES.require(body)
    _require_logprobs(body)
    tools = read_tools(body.tools)
    return body, ModelCall(
        messages=read_messages(body.messages),
        tools=tools,
        finds_calls=body.tool_choice != "none",
        template_args=template_args(
            body.chat_template_kwargs, body.reasoning_effort, verbosity=body.verbosity
        ),
        num_choices=body.num_choices,
        max_new_tokens=_max_tokens(body),
        top_logprobs=body.top_logprobs or 0,
        sampling=body.overrides(),
        constraints=read_constraints(
            body.tool_choice, body.parallel_tool_calls, tools, body.response_format
        ),
    )


def _max_tokens(body: ChatRequest) -> int | None:
    """Return the reply's token limit: the smaller one if both names are set."""
    if body.max_tokens is None or body.max_completion_tokens is None:
        return body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    return min(body.max_tokens, body.max_completion_tokens)


def _require_logprobs(body: ChatRequest) -> None:
    if body.top_logprobs and not body.logprobs:
        raise BadRequestError("top_logprobs needs logprobs: true", param="top_logprobs")


def chat_answer(body: ChatRequest, completion: Completion, token_text: TokenText) -> dict[str, Any]:
    """Return the response to a request without a stream."""

    def render(choice: ReplyChoice) -> dict[str, Any]:
        entries = logprob_entries(token_text, choice) if body.logprobs else None
        return {
            "index": choice.index,
            "message": _message(choice),
            "logprobs": None if entries is None else {"content": entries},
            "finish_reason": choice.stop_reason.value,
        }

    return whole_answer(body, "chat.completion", completion, render)


def _message(choice: ReplyChoice) -> dict[str, Any]:
    reply = choice.message
    message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
    if reply.reasoning:
        message |= _thoughts(reply.reasoning)
    if reply.tool_calls:
        message["tool_calls"] = tool_calls_of(choice)
        message["content"] = reply.content or None
    return message


def _thoughts(text: str) -> dict[str, str]:
    """Return the thoughts under each name that clients read."""
    return {"reasoning": text, "reasoning_content": text}


class ChatStream(OpenAIStream):
    """`StreamDialect` of chat completions."""

    def __init__(self, body: ChatRequest, token_text: TokenText) -> None:
        super().__init__(body, "chat.completion.chunk")
        self._chat = body
        self._token_text = token_text

    def begin(self, opening: CallStart) -> bytes:
        """Encode the role of every choice."""
        more = self.opened(opening)
        first = {"role": "assistant", "content": ""}
        return b"".join(
            self._chunk(index, first, None, {}, more) for index in range(self._chat.num_choices)
        )

    def piece(self, piece: Piece) -> bytes:
        """Encode new text and reasoning; tokens without text only if the client requested tokens."""
        delta: dict[str, Any] = {}
        if piece.delta.content:
            delta["content"] = piece.delta.content
        if piece.delta.reasoning:
            delta |= _thoughts(piece.delta.reasoning)
        fields: dict[str, Any] = {}
        if self._chat.logprobs and len(piece.token_ids):
            fields["logprobs"] = {"content": logprob_entries(self._token_text, piece)}
        if self._chat.return_token_ids and len(piece.token_ids):
            fields["token_ids"] = piece.token_ids.tolist()
        return self._chunk(piece.index, delta, None, fields) if delta or fields else b""

    def choice(self, choice: ReplyChoice) -> bytes:
        """Encode each tool call whole, then the finish reason."""
        calls = [{"index": i, **call} for i, call in enumerate(tool_calls_of(choice))]
        chunks = [self._chunk(choice.index, {"tool_calls": [call]}, None) for call in calls]
        return b"".join([*chunks, self._chunk(choice.index, {}, choice.stop_reason.value)])

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish_reason: str | None,
        fields: dict[str, Any] | None = None,
        more: dict[str, Any] | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        usage = {"usage": None} if self._chat.with_usage else {}
        return self.chunk([{**choice, **(fields or {})}], **(more or {}), **usage)
