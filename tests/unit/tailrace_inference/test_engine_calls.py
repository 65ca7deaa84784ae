"""Ends and refusals of calls, and the sending of chunks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from tailrace_inference.core.requests import InvalidRequestError, check_request
from tailrace_inference.ports import EngineFeatures
from tailrace_protos.base import as_int32, pack_int32
from tailrace_protos.generation import CallErrorCode, FinishReason, GenerateRequest, SamplingParams
from tests.unit.tailrace_inference.harness import VOCAB_SIZE, Client, make_engine, make_model


def letters() -> Tokenizer:
    """Token i is the letter chr(33 + i); some later ones are two letters."""
    vocabulary = {chr(33 + i): i for i in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="!"))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def text(ids: list[int]) -> str:
    return "".join(chr(33 + i) for i in ids)


def test_the_length_ends_a_call_that_nothing_else_ends() -> None:
    asked = Client(make_engine(make_model())).one([1, 2, 3], 7)
    assert asked.generation.num_tokens == 7
    assert asked.generation.finish_reason is FinishReason.LENGTH
    assert asked.generation.stop_matched is None


def test_a_stop_id_ends_a_call_and_is_its_last_token() -> None:
    model = make_model()
    free = Client(make_engine(model)).one([1, 2, 3], 20, seed=4).generation.token_ids.tolist()
    stop = free[9]
    asked = Client(make_engine(model)).one(
        [1, 2, 3], 20, seed=4, stop_token_ids=(stop, *({*range(VOCAB_SIZE)} - set(free)))
    )
    assert asked.generation.token_ids.tolist() == free[: free.index(stop) + 1]
    assert asked.generation.finish_reason is FinishReason.STOP
    assert asked.generation.stop_matched == stop


def test_a_stop_string_across_tokens_ends_a_call_at_the_token_that_completes_it() -> None:
    model = make_model()
    free = Client(make_engine(model)).one([1, 2, 3], 30, seed=5).generation.token_ids.tolist()
    stop = text(free[10:13])
    client = Client(make_engine(model, letters()))
    asked = client.one([1, 2, 3], 30, seed=5, stop=("never said", stop))
    assert asked.generation.token_ids.tolist() == free[:13]
    assert asked.generation.finish_reason is FinishReason.STOP
    assert asked.generation.stop_matched == stop


def test_a_stop_string_that_began_on_another_server_is_found() -> None:
    model = make_model()
    free = Client(make_engine(model)).one([1, 2, 3], 30, seed=5).generation.token_ids.tolist()
    client = Client(make_engine(model, letters()))
    prompt = [1, 2, 3, *free[:11]]
    asked = client.one(prompt, 19, continued=11, seed=5, stop=(text(free[10:13]),))
    assert asked.generation.token_ids.tolist() == free[11:13]
    assert asked.generation.stop_matched == text(free[10:13])


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    asked = Client(make_engine(make_model())).one([1], 5, stop=("x",))
    assert asked.error.code is CallErrorCode.INVALID
    assert "stop_token_ids" in asked.error.reason


@pytest.mark.parametrize(
    ("prompt", "num_new", "sampling", "field"),
    [
        ([], 5, {}, "prompt_ids"),
        ([VOCAB_SIZE], 5, {}, "prompt_ids"),
        ([-1], 5, {}, "prompt_ids"),
        ([1], 0, {}, "max_new_tokens"),
        ([1], 5, {"stop_token_ids": (3,) * 1025}, "stop_token_ids"),
        ([1], 5, {"temperature": -0.1}, "temperature"),
        ([1], 5, {"temperature": float("nan")}, "temperature"),
        ([1], 5, {"top_p": 0.0}, "top_p"),
        ([1], 5, {"top_k": -1}, "top_k"),
        ([1], 5, {"top_k": 2**63}, "top_k"),
        ([1], 5, {"min_p": 1.5}, "min_p"),
        ([1], 5, {"stop_token_ids": (VOCAB_SIZE,)}, "stop_token_ids"),
        ([1], 5, {"stop": ("",)}, "stop"),
        ([1], 5, {"continued": 2}, "num_continued"),
    ],
)
def test_a_wrong_request_is_answered_with_the_field(
    prompt: list[int], num_new: int, sampling: dict[str, Any], field: str
) -> None:
    asked = Client(ENGINE).one(prompt, num_new, **sampling)
    assert asked.error.code is CallErrorCode.INVALID
    assert field in asked.error.reason


ENGINE = make_engine(make_model())


def test_a_temperature_that_an_engine_would_replace_is_refused_by_name() -> None:
    features = EngineFeatures(least_temperature=0.01)
    for temperature in (0.0, 0.01, 1.0):
        request = GenerateRequest("c", "e", pack_int32([1]), 5, SamplingParams(temperature=temperature))
        check_request(request, 10, VOCAB_SIZE, features)
    request = GenerateRequest("c", "e", pack_int32([1]), 5, SamplingParams(temperature=0.005))
    with pytest.raises(InvalidRequestError, match=r"sampling.temperature is 0.005: .* at least 0.01"):
        check_request(request, 10, VOCAB_SIZE, features)


def test_a_prompt_that_fills_the_longest_sequence_is_refused_with_its_length() -> None:
    limit = ENGINE.stats().max_sequence_tokens
    asked = Client(ENGINE).one([1] * limit, 5)
    assert (asked.error.code, asked.error.limit_tokens) == (CallErrorCode.TOO_LONG, limit)
    assert Client(ENGINE).one([1] * (limit - 1), 5).generation.num_tokens == 1


def test_a_sequence_ends_at_the_longest_that_the_model_knows() -> None:
    asked = Client(make_engine(make_model(), max_model_len=40)).one([1] * 30, 100)
    assert asked.generation.num_tokens == 10
    assert asked.generation.finish_reason is FinishReason.LENGTH


def test_a_full_queue_refuses_with_the_time_to_come_back() -> None:
    client = Client(make_engine(make_model(), max_waiting=3))
    asked = [client.ask([1], 3) for _ in range(5)]
    assert [one.error.code for one in asked if one.ended] == [CallErrorCode.OVERLOADED] * 2
    assert all(one.error.retry_after_s > 0 for one in asked if one.ended)
    client.finish()
    assert [one.generation.num_tokens for one in asked[:3]] == [3, 3, 3]


def test_an_aborted_call_keeps_what_it_has_and_others_go_on() -> None:
    client = Client(make_engine(make_model(), max_running=2))
    running, other = client.ask([1, 2], 100), client.ask([3], 20)
    waiting = client.ask([4], 10)
    for _ in range(5):
        client.engine.step()
    for asked in (running, waiting):
        client.engine.abort(asked.request.call_id)
    client.engine.abort("never heard of")
    client.engine.step()
    assert running.generation.finish_reason is FinishReason.ABORT
    assert running.generation.num_tokens == 5
    assert waiting.generation.finish_reason is FinishReason.ABORT
    assert waiting.generation.num_tokens == 0
    client.finish()
    assert other.generation.num_tokens == 20


def test_aborting_all_ends_all_and_leaves_nothing_behind() -> None:
    client = Client(make_engine(make_model(), prefix_cache=False))
    for index in range(12):
        client.ask([index], 50)
    client.engine.step()
    client.engine.abort_all()
    client.finish()
    assert {asked.generation.finish_reason for asked in client.asked} == {FinishReason.ABORT}
    stats = client.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.used_tokens) == (0, 0, 0)


def test_a_paused_engine_holds_calls_and_can_still_abort_them() -> None:
    client = Client(make_engine(make_model()))
    asked, held = client.ask([1], 10), client.ask([2], 10)
    client.engine.step()
    client.engine.pause()
    assert not client.engine.has_work()
    client.engine.abort(asked.request.call_id)
    assert client.engine.step()
    assert asked.ended
    assert held.generation.num_tokens == 1
    client.engine.resume()
    client.finish()
    assert held.generation.num_tokens == 10


def test_chunks_hold_as_many_tokens_as_configured() -> None:
    client = Client(make_engine(make_model(), stream_interval_ms=1e6, stream_chunk_tokens=4))
    asked = client.one([1, 2], 10)
    assert [len(as_int32(chunk.token_ids)) for chunk in asked.chunks] == [4, 4, 2]


def test_more_calls_than_rows_take_turns_and_all_finish() -> None:
    client = Client(make_engine(make_model(), max_running=3))
    asked = [client.ask([index], 5 + index) for index in range(20)]
    client.finish()
    assert [one.generation.num_tokens for one in asked] == [5 + index for index in range(20)]
    assert client.engine.stats().num_finished == 20


class _LateBox(deque[Any]):
    """Inbox to which another thread adds `late` calls just after a step has found it empty."""

    def __init__(self) -> None:
        super().__init__()
        self.late: list[Callable[[], None]] = []

    def __bool__(self) -> bool:
        if len(self):
            return True
        for add in self.late:
            add()
        self.late.clear()
        return False


def test_a_call_that_comes_with_its_abort_in_the_middle_of_a_step_is_aborted() -> None:
    client = Client(make_engine(make_model()))
    client.engine._intake._inbox = box = _LateBox()
    client.ask([1], 3)

    def come_and_go() -> None:
        client.engine.abort(client.ask([2], 50).request.call_id)

    box.late.append(come_and_go)
    client.finish()
    first, late = client.asked
    assert first.generation.finish_reason is FinishReason.LENGTH
    assert late.generation.finish_reason is FinishReason.ABORT


def test_a_release_that_comes_with_an_abort_within_a_step_frees_what_the_call_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(make_model())
    client = Client(engine)
    asked = client.ask([1, 2, 3], 20)
    engine.step()
    read = engine._intake.read

    def end_meanwhile(max_len: int) -> None:
        """Ends the episode, as the event loop does while another thread steps."""
        engine.abort(asked.request.call_id)
        engine.release_prefixes((asked.request.episode_id,))
        read(max_len)

    with monkeypatch.context() as patch:
        patch.setattr(engine._intake, "read", end_meanwhile)
        engine.step()
    client.finish()
    assert asked.generation.finish_reason is FinishReason.ABORT
    assert engine.stats().cached_tokens == 0
