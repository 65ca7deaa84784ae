"""The engine takes the fastest forward that is right, first for random weights, then for real ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MptConfig

from tailrace import model_probe
from tailrace_inference.config import InferenceConfig
from tailrace_inference.engine.attention import UnsupportedModelError
from tailrace_inference.engine.engine import TorchEngine
from tailrace_inference.engine.forward_check import ForwardChooser
from tailrace_inference.engine.hf_engine import HfEngine
from tailrace_inference.engine.llama_forward import LlamaForward
from tailrace_inference.engine.row_forward import ROW_MODES
from tailrace_protos.weights import ModelCard
from tests.models.judge import engine_verdict
from tests.models.page import PAGE, lines_of
from tests.models.zoo import configuration
from tests.unit.tailrace_inference.harness import (
    Client,
    make_engine,
    make_model,
    own_logprobs,
    weights_of,
)
from tests.unit.tailrace_inference.test_engine_logprobs import largest_error
from tests.unit.tailrace_learner.model.test_paths import recurrent_model


@pytest.mark.parametrize("name", ["gpt_oss", "lfm2", "mamba", "llama:dynamic", "falcon"])
def test_the_engine_does_what_the_page_says(name: str) -> None:
    assert lines_of(PAGE.read_text())[name].split(" | ")[3].removesuffix(" |") == engine_verdict(name)


def test_a_forward_that_is_wrong_for_the_real_weights_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = LlamaForward.logits

    def wrong_for_large_weights(self: LlamaForward, *args: Any) -> Tensor:
        is_large = float(self._head.abs().max()) > 3.0
        return own(self, *args) * (1.5 if is_large else 1.0)

    monkeypatch.setattr(LlamaForward, "logits", wrong_for_large_weights)
    assert make_engine(make_model()).forward_name == "llama"
    model = make_model()
    model.lm_head.weight.data[0, 0] = 4.0
    engine = make_engine(model)
    assert engine.forward_name == "generic"
    asked = Client(engine).one([1, 2, 3], 5)
    assert largest_error(model, [asked]) < 1e-4


def test_a_few_tokens_with_near_ties_leave_no_forward_of_a_model_in_half_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = LlamaForward.logits
    spoilt = 1

    def with_ties(self: LlamaForward, *args: Any) -> Tensor:
        logits = own(self, *args)
        if logits.dtype == torch.float32:
            logits[:spoilt] *= 1.5
        return logits

    monkeypatch.setattr(LlamaForward, "logits", with_ties)
    settings = InferenceConfig(max_running=4, kv_cache_tokens=1024, dtype="bfloat16")
    assert TorchEngine.from_config_json(config_of("qwen3"), settings).forward_name == "llama"
    spoilt = 8
    assert TorchEngine.from_config_json(config_of("qwen3"), settings).forward_name == "generic"


def config_of(name: str, **keys: Any) -> bytes:
    text: str = configuration(name, **keys).to_json_string(use_diff=False)
    return text.encode()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["lfm2", "mamba", "recurrent_gemma", "llama:dynamic"])
def test_the_reference_engine_refuses_models_that_padding_changes(name: str, dtype: str) -> None:
    refusal = r"does not run on the hf engine: .*set inference\.engine to torch"
    with pytest.raises(UnsupportedModelError, match=refusal):
        HfEngine(config_of(name, initializer_range=0.02), InferenceConfig(dtype=dtype))


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "mistral:window", "gpt_oss", "deepseek_v3"])
def test_the_reference_engine_takes_models_that_ignore_padding(name: str) -> None:
    assert HfEngine(config_of(name), InferenceConfig()).max_len > 0


def test_routers_whose_loss_is_asked_for_run_on_all_engines() -> None:
    """The loss of their balance would be computed with the padding of a batch, and fail."""
    asked = config_of("mixtral", output_router_logits=True)
    assert HfEngine(asked, InferenceConfig()).max_len > 0
    assert TorchEngine.from_config_json(asked, InferenceConfig()).forward_name == "generic"


def test_attention_that_selects_keys_gets_a_forward_that_does_where_the_check_selects_all() -> None:
    text = config_of("minimax_m3_vl_text", index_block_size=16, index_topk_blocks=16)
    engine = TorchEngine.from_config_json(text, InferenceConfig(max_running=4, kv_cache_tokens=1024))
    assert engine.forward_name in ROW_MODES


@pytest.mark.parametrize("name", ["llama:dynamic", "phi3:longrope", "qwen3", "gpt_oss"])
def test_half_precision_hides_no_wrong_forward(name: str) -> None:
    """Rounding is as large as the difference that a rotary embedding of another length makes."""
    text = config_of(name, initializer_range=0.02)
    settings = {"max_running": 4, "kv_cache_tokens": 1024}
    exact, half = (
        TorchEngine.from_config_json(text, InferenceConfig(dtype=dtype, **settings))
        for dtype in ("float32", "bfloat16")
    )
    assert (half.forward_name, half.max_len) == (exact.forward_name, exact.max_len)
    bounded = {"llama:dynamic": 63, "phi3:longrope": 63}  # their context has 64 and 512
    assert exact.stats().max_sequence_tokens == bounded.get(name, exact.max_len)
    kept = {each.dtype for each in half._model.model.parameters()}
    assert kept == {torch.bfloat16}


@pytest.mark.parametrize("missing", [0, 1])
def test_weights_are_widened_for_the_check_only_where_there_is_room(
    missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of memory in the middle of it would leave a model of two types."""
    text = config_of("qwen3")
    settings: dict[str, Any] = {"max_running": 4, "kv_cache_tokens": 1024, "dtype": "bfloat16"}
    model = TorchEngine.from_config_json(text, InferenceConfig(**settings))._model.model
    room = model_probe.widening_bytes(model) - missing
    monkeypatch.setattr(model_probe, "free_bytes", lambda device: room)
    with model_probe.widened(model) as is_wide:
        assert is_wide == (not missing)
        wanted = torch.bfloat16 if missing else torch.float32
        assert {each.dtype for each in model.parameters()} == {wanted}
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    TorchEngine.from_config_json(text, InferenceConfig(**settings))  # checked as well as it can be


def test_out_of_memory_in_float32_leaves_no_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing of the forward, which is checked in half precision then."""
    errors = ForwardChooser._errors

    def in_half_only(self: ForwardChooser, *args: Any) -> torch.Tensor:
        if self._dtype == torch.float32:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return errors(self, *args)

    monkeypatch.setattr(ForwardChooser, "_errors", in_half_only)
    config = InferenceConfig(max_running=4, kv_cache_tokens=1024, dtype="bfloat16")
    engine = TorchEngine.from_config_json(config_of("qwen3"), config)
    assert engine.forward_name == "llama"
    assert {each.dtype for each in engine._model.model.parameters()} == {torch.bfloat16}


def test_a_context_of_another_name_bounds_sequences() -> None:
    sizes: dict[str, Any] = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 96}
    text = MptConfig(max_seq_len=64, **sizes).to_json_string(use_diff=False).encode()
    engine = TorchEngine.from_config_json(text, InferenceConfig(max_running=4, kv_cache_tokens=1024))
    assert engine.max_len == ModelCard(text, {}).context_tokens == 64


def test_a_context_shorter_than_the_checks_sequences_is_enough() -> None:
    text = config_of("gpt2", max_position_embeddings=64)
    engine = TorchEngine.from_config_json(text, InferenceConfig(max_running=4, kv_cache_tokens=1024))
    assert (engine.forward_name, engine.max_len) == ("generic", 64)


def test_a_text_may_end_with_one_of_several_tokens() -> None:
    text = config_of("llama", eos_token_id=[2, 5, 7])
    assert TorchEngine.from_config_json(text, InferenceConfig()).forward_name == "llama"
    assert HfEngine(text, InferenceConfig()).max_len > 0


def test_new_weights_of_a_model_that_rescales_its_own_are_taken_as_they_are() -> None:
    """RWKV divides them in its first pass in evaluation, and no later ones."""
    model = recurrent_model()
    text = model.config.to_json_string(use_diff=False).encode()
    engine = TorchEngine.from_config_json(text, InferenceConfig(max_running=4, kv_cache_tokens=64))
    engine.stage(weights_of(model), 0)
    engine.apply()
    engine.attach()
    assert largest_error(model, [Client(engine).one([1, 2, 3], 5)]) < 1e-3


def test_an_unknown_model_type_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="no_such_model"):
        TorchEngine.from_config_json(b'{"model_type": "no_such_model"}', InferenceConfig())


def test_new_weights_are_used_for_the_next_token_of_a_sequence() -> None:
    old, new = make_model(), make_model(seed=1)
    engine = make_engine(old, forward="rows", stream_chunk_tokens=1)
    client = Client(engine)
    asked = client.ask([3, 4, 5, 6], 6)
    for _ in range(3):
        engine.step()
    engine.stage(weights_of(new), 1)
    engine.apply()
    client.finish()
    spans = asked.generation.spans
    assert [span.policy_version for span in spans] == [0, 1]
    ids, first = asked.ids, spans[0].num_tokens
    assert largest_of_new(new, ids, asked.generation.inference_logprobs, 4 + first) < 1e-4


def largest_of_new(model: Any, ids: list[int], found: Any, start: int) -> float:
    """Largest error of the log-probabilities of `ids[start:]`."""
    from_start = own_logprobs(model, ids)[start - 1 :]
    return float(abs(from_start - found[start - 4 :]).max())
