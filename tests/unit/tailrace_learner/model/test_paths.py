"""A model's rows take the fastest way that is right, and the check leaves the model as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tailrace.config import ConfigError
from tailrace.model_probe import SHORT, shortened, special_lengths, stirred
from tailrace_learner.adapters.hf_model import prepared
from tailrace_learner.config import LearnerConfig, ModelArgs
from tailrace_learner.core.batch.packing import pack
from tailrace_learner.core.cpu.fast_attention import is_fast_attention
from tailrace_learner.core.model.forward_path import decoder_of, path_of, use_attention
from tailrace_learner.core.model.policy import PolicyModel
from tests.models.judge import CPU, check_learner, learner_verdicts, moved_model, rows
from tests.models.page import PAGE, lines_of
from tests.models.zoo import configuration


def config(**model_args: Any) -> LearnerConfig:
    return LearnerConfig(device="cpu", model_args=ModelArgs(**model_args))


def new_model(name: str, **keys: Any) -> Any:
    """A model as transformers makes it, with small weights; `keys` replace those of the zoo."""
    torch.manual_seed(0)
    made = configuration(name, initializer_range=0.02, **keys)
    return AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()


def test_learner_and_adapters_do_what_the_page_says() -> None:
    """Of one model; tests/models has them all."""
    said = lines_of(PAGE.read_text())["smollm3"].split(" | ")
    assert tuple(said[1:3]) == learner_verdicts("smollm3")


def test_only_layers_that_rotate_get_the_fast_attention() -> None:
    model = prepared(moved_model("smollm3"), config())
    layers = model.model.layers
    assert [is_fast_attention(each.self_attn) for each in layers] == [True, False, True, False]


def test_rows_go_alone_where_it_is_asked_for() -> None:
    model = prepared(moved_model("qwen3"), config(forward="rows"))
    policy = PolicyModel(model, CPU, 1.0, 64)
    assert policy.path.name == "rows"
    assert [len(part) for part in policy.passes(rows(), config())] == [1, 1, 1]
    check_learner(model, moved_model("qwen3"))


def model_that_sees() -> Any:
    """A model whose text part takes another attention, and whose picture part does not."""
    keys = ("vocab_size", "hidden_size", "intermediate_size")
    keys += ("num_attention_heads", "num_key_value_heads")
    text = {key: getattr(configuration("qwen2"), key) for key in keys} | {"num_hidden_layers": 2}
    sight = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_dim": 8}
    sight |= {"output_channels": 8, "image_size": 32, "patch_size": 16, "global_attn_indexes": [0]}
    made = AutoConfig.for_model("got_ocr2", text_config=text, vision_config=sight)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()


@pytest.mark.parametrize(("forward", "path"), [("auto", "shared"), ("rows", "rows")])
def test_a_part_for_pictures_does_not_slow_the_text(forward: str, path: str) -> None:
    model = prepared(model_that_sees(), config(forward=forward))
    assert path_of(model).name == path
    check_learner(model, model_that_sees())


def test_no_part_of_a_model_takes_an_attention_that_its_decoder_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = {key: value for key, value in configuration("gemma3_text").to_dict().items() if value}
    sight = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    made = AutoConfig.for_model("gemma3", text_config=text, vision_config=sight)
    model = AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()
    monkeypatch.setattr(type(decoder_of(model)), "_can_set_attn_implementation", lambda *_: False)
    assert not use_attention(model, "sdpa")
    assert {
        each.config._attn_implementation for each in model.modules() if hasattr(each, "config")
    } == {"eager"}


def test_a_bounded_way_packs_rows_below_the_bound() -> None:
    model = prepared(moved_model("llama:dynamic"), config())
    policy = PolicyModel(model, CPU, 1.0, 64)
    assert policy.path.max_packed_tokens == 63
    assert sorted(len(part) for part in policy.passes(rows(), config())) == [1, 2]


def test_packed_alone_refuses_a_model_whose_state_leaks() -> None:
    with pytest.raises(ConfigError, match=r"'lfm2'.*differ from those of single rows.*forward to auto"):
        prepared(moved_model("lfm2"), config(forward="packed"))


def test_a_model_that_fails_is_refused_with_its_reason() -> None:
    model = moved_model("qwen3")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("the kernel is missing")

    model.model.layers[0].mlp.forward = fail
    with pytest.raises(ConfigError, match=r"'qwen3' cannot be trained.*the kernel is missing"):
        prepared(model, config())


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("bert", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}),
        ("xlm", {"emb_dim": 32, "n_layers": 2, "n_heads": 4}),
    ],
)
def test_a_new_model_that_reads_later_tokens_is_refused(name: str, keys: dict[str, Any]) -> None:
    """Its small weights hardly show it: XLM's states move by two thousandths."""
    torch.manual_seed(0)
    made = AutoConfig.for_model(name, vocab_size=96, **keys)
    model = AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()
    with pytest.raises(ConfigError, match=f"'{name}' cannot be trained: its states depend on later"):
        prepared(model, config())


def test_a_weight_that_is_no_number_is_named() -> None:
    model = new_model("qwen3")
    model.model.norm.weight.data[3] = float("nan")
    with pytest.raises(ConfigError, match=r"cannot be trained: its weight model\.norm\.weight holds"):
        prepared(model, config())


def test_checkpointed_layers_on_the_row_path_give_the_same_gradients() -> None:
    model = prepared(moved_model("gpt_oss"), config(disable_gradient_checkpointing=False))
    assert path_of(model).name == "rows"
    check_learner(model, moved_model("gpt_oss"))


def test_a_pass_leaves_no_single_layer_in_training_mode() -> None:
    """Such as one that was put in later: its dropout would draw, its router would add noise."""
    model = prepared(moved_model("qwen3"), config(disable_gradient_checkpointing=False))
    late = model.model.layers[1].mlp
    late.act_fn = nn.Sequential(late.act_fn, nn.Dropout(0.5))  # as made: in training mode
    policy, batch = PolicyModel(model, CPU, 1.0, 64), pack(rows(), CPU)
    assert torch.equal(policy.forward(batch)[0], policy.forward(batch)[0])
    assert not late.act_fn.training
    assert model.model.layers[1].training  # it is computed again in the backward pass


def test_the_check_leaves_weights_and_lengths_as_they_were() -> None:
    model, before = moved_model("phi3:longrope"), moved_model("phi3:longrope")
    lengths = special_lengths(model)
    prepared(model, config())
    assert special_lengths(model) == lengths
    assert not any(parameter.grad is not None for parameter in model.parameters())
    for (name, found), expected in zip(
        model.state_dict().items(), before.state_dict().values(), strict=True
    ):
        assert torch.equal(found, expected), name
    for found, expected in zip(model.buffers(), before.buffers(), strict=True):
        assert torch.equal(found, expected)


def test_no_pass_changes_the_weights_of_a_model_that_rescales_them() -> None:
    """A checkpoint would hold other weights than those that were trained."""
    model, before = (recurrent_model() for _ in range(2))
    prepared(model, config())
    PolicyModel(model, CPU, 1.0, 64).forward(pack(rows()[:1], CPU))
    for (name, found), expected in zip(
        model.state_dict().items(), before.state_dict().values(), strict=True
    ):
        assert torch.equal(found, expected), name


def recurrent_model() -> Any:
    """RWKV that divides the weights of each layer by another power of two in evaluation."""
    sizes = ("hidden_size", "attention_hidden_size", "intermediate_size")
    given: dict[str, Any] = dict.fromkeys(sizes, 16) | {"num_hidden_layers": 3, "vocab_size": 96}
    made = AutoConfig.for_model("rwkv", context_length=20, rescale_every=1, **given)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_a_number_of_layers_is_no_special_length(name: str) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model = new_model(name, max_position_embeddings=64, rope_parameters=rope, sliding_window=64)
    assert set(special_lengths(model).values()) == {64}
    prepared(model, config())
    assert path_of(model).max_packed_tokens == 63


def test_a_probed_model_is_short_and_stirred_for_a_while() -> None:
    model = moved_model("mistral:window")
    norm = model.model.norm.weight
    before = norm.detach().clone()
    model.config.sliding_window = model.model.layers[0].self_attn.sliding_window = 4096
    with shortened(model), stirred(model):
        assert model.model.layers[0].self_attn.sliding_window == SHORT
        assert model.config.sliding_window == SHORT
        assert not torch.equal(norm, before)
    assert model.model.layers[0].self_attn.sliding_window == model.config.sliding_window == 4096
    assert torch.equal(norm, before)


def test_a_cap_of_logits_counts_though_it_changes_none_yet() -> None:
    model, plain = (new_model("gemma2", final_logit_softcapping=30.0) for _ in range(2))
    prepared(model, config())
    assert path_of(model).head == "own"
    for each in (model, plain):  # as training might
        each.model.norm.weight.data.fill_(60.0)
    check_learner(model, plain)


def test_a_clip_of_projections_counts_though_it_clips_nothing_yet() -> None:
    model, plain = (new_model("olmo", clip_qkv=8.0) for _ in range(2))
    prepared(model, config())
    assert path_of(model).name == "shared"
    for each in (model, plain):
        for layer in each.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.v_proj):
                projection.weight.data.mul_(200.0)
    check_learner(model, plain)


def test_temperature_by_place_counts_the_places_of_a_row() -> None:
    keys = {"floor_scale": 140, "attention_chunk_size": 512}
    model, plain = (new_model("llama4_text", **keys) for _ in range(2))
    for each in (model, plain):
        for layer in each.model.layers:
            layer.self_attn.q_proj.weight.data.mul_(100.0)
    prepared(model, config())
    check_learner(model, plain)


def test_attention_that_selects_keys_is_refused_where_the_check_selects_all() -> None:
    model = new_model("minimax_m3_vl_text", index_block_size=16, index_topk_blocks=16)
    prepared(model, config())
    assert path_of(model).name == "rows"


def test_a_context_shorter_than_the_checks_rows_is_enough() -> None:
    model = prepared(new_model("gpt2", max_position_embeddings=64), config())
    assert path_of(model).name == "shared"


def test_a_context_of_few_tokens_is_enough() -> None:
    model = prepared(new_model("llama", max_position_embeddings=8), config())
    assert path_of(model).name == "shared"


@pytest.mark.parametrize("vocab_size", [96, 8])
def test_a_text_may_end_with_one_of_several_tokens(vocab_size: int) -> None:
    """As those of Llama 3 that follow instructions; of a small vocabulary no other tokens are left."""
    made = new_model("llama", eos_token_id=[2, 3, 4, 5, 6, 7], vocab_size=vocab_size)
    assert path_of(prepared(made, config())).name == "shared"


def test_layers_that_cannot_be_computed_again_are_named() -> None:
    model = new_model("gpt_bigcode")
    model.supports_gradient_checkpointing = False
    with pytest.raises(ConfigError, match=r"disable_gradient_checkpointing: .*GPTBigCode"):
        prepared(model, config(disable_gradient_checkpointing=False))


def test_a_model_that_fails_in_bfloat16_alone_is_refused_at_load() -> None:
    with pytest.raises(ConfigError, match=r"'dbrx'.*bfloat16.*dtype float32 is possible"):
        prepared(moved_model("dbrx"), config(dtype="bfloat16"))
    prepared(moved_model("dbrx"), config())


@pytest.mark.parametrize(
    ("name", "of_product"),
    [
        ("gemma2", lambda product: 30.0 * torch.tanh(product / 30.0)),
        ("granite", lambda product: product / 2.0),
    ],
)
def test_bfloat16_rounds_no_logits_of_a_head_that_is_more_than_a_matrix(
    name: str, of_product: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """As of a matrix alone: factors are rounded, their sums are not."""
    model = moved_model(name)
    model.get_output_embeddings().weight.data.mul_(20.0)
    prepared(model, config(dtype="bfloat16"))
    policy = PolicyModel(model, CPU, 1.0, logprob_chunk_tokens=64, autocast=True)
    assert policy.path.head == "own"
    batch = policy.pack(rows(), config())
    hidden = policy.hidden(batch).detach().requires_grad_()
    found = policy.predict(hidden, batch)[0]
    weight = model.get_output_embeddings().weight
    factors = hidden.bfloat16().float(), weight.bfloat16().float()
    logits = of_product(factors[0] @ factors[1].t())
    expected = logits.log_softmax(-1).gather(1, batch.target_ids[:, None])[:, 0]
    assert float((found - expected).detach().abs().max()) < 1e-4
    for given in (hidden, weight):
        (wanted,) = torch.autograd.grad(expected.sum(), given, retain_graph=True)
        (grad,) = torch.autograd.grad(found.sum(), given, retain_graph=True)
        assert float((grad - wanted).norm()) < 0.01 * float(wanted.norm())
