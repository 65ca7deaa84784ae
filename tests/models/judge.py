"""Verdicts on entries of the zoo: what learner, LoRA and engine do, seen against the plain model.

Nothing here reads how a choice was made: results are compared with those of a model that transformers
built, in evaluation mode, row by row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tailrace.config import ConfigError
from tailrace_inference.config import InferenceConfig
from tailrace_inference.engine.attention import UnsupportedModelError
from tailrace_inference.engine.engine import TorchEngine
from tailrace_learner.adapters import hf_model, lora
from tailrace_learner.config import LearnerConfig, LoraArgs
from tailrace_learner.core.batch.packing import pack
from tailrace_learner.core.batch.rows import TrainingRow, demonstration_row
from tailrace_learner.core.model.policy import PolicyModel
from tests.models.zoo import VOCABULARY, make_model
from tests.unit.tailrace_inference.harness import Client

CPU = torch.device("cpu")
CONFIG = LearnerConfig(device="cpu")
TOLERANCE = 2e-3  # of a log-probability; relative, of a gradient
_PATHS = {"shared": "yes, shared prefixes", "packed": "yes, packed", "rows": "one row at a time"}
_FORWARDS = {"llama": "yes", "generic": "yes"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """A line of `docs/models.md`."""

    learner: str
    lora: str
    engine: str


def moved_model(name: str) -> Any:
    """The model with all weights moved, so that none is zero or one."""
    model = make_model(name)
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        parameter.data.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def rows() -> list[TrainingRow]:
    """A short row, and two long ones that begin alike."""
    random = np.random.default_rng(3)
    long = random.integers(3, VOCABULARY, 90)
    twin = np.concatenate((long[:40], random.integers(3, VOCABULARY, 9)))
    found = []
    for ids in (random.integers(3, VOCABULARY, 7), twin, long):
        row = demonstration_row("", ids, np.ones(len(ids), np.uint8))
        assert row is not None
        found.append(row)
    return found


def plain_logprobs(model: Any, row: TrainingRow) -> Tensor:
    """Log-probabilities [m] of the row's targets by the model as it is."""
    ids = torch.from_numpy(row.token_ids).unsqueeze(0)
    logits = model(input_ids=ids, use_cache=False).logits[0].float()
    return logits.log_softmax(-1).gather(1, torch.from_numpy(row.target_ids)[:, None])[:, 0]


def gradients(model: Any, logprobs: Tensor) -> dict[str, Tensor]:
    """Gradients of a weighted sum of log-probabilities, by parameter."""
    model.zero_grad()
    (logprobs * torch.linspace(-1.0, 1.0, len(logprobs))).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def check_learner(model: Any, plain: Any) -> None:
    """Asserts that the learner computes what the plain model does, in both modes."""
    policy = PolicyModel(model, CPU, 1.0, logprob_chunk_tokens=64)
    expected = torch.cat([plain_logprobs(plain, row) for row in rows()])
    for shares in (True, False):
        batch = pack(rows(), CPU, share_prefixes=shares)
        for mode in (True, False):
            model.train(mode)
            found = policy.forward(batch)[0]
            error = float((found - expected).detach().abs().max())
            assert error < TOLERANCE, f"log-probabilities differ by {error}"
    of_plain = gradients(plain, expected)
    wanted = adapter_gradients(model, of_plain) if lora.adapted_layers(model) else of_plain
    check_gradients(gradients(model, found), wanted)


def adapter_gradients(model: Any, of_merged: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of A [r, in] and B [out, r] by the chain rule from those of the weights W + s B A.

    Layers that only pick what is read have none.
    """
    found = {}
    layers = [one for one in lora.adapted_layers(model) if f"{one.name}.weight" in of_merged]
    for layer in layers:
        of_weight = layer.as_weight(of_merged[f"{layer.name}.weight"])
        found[f"{layer.name}.lora_A.default.weight"] = layer.scale * layer.up.detach().T @ of_weight
        found[f"{layer.name}.lora_B.default.weight"] = layer.scale * of_weight @ layer.down.detach().T
    return found


def check_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Asserts that every parameter that the plain model trains gets its gradient."""
    scale = float(torch.stack([each.norm() for each in expected.values()]).norm())
    for name, wanted in expected.items():
        error = float((found[name] - wanted).norm()) / scale if name in found else 1.0
        assert error < TOLERANCE or not wanted.any(), f"the gradient of {name} differs by {error}"


def _path_words(policy_path: Any) -> str:
    words = _PATHS[policy_path.name]
    bound = policy_path.max_packed_tokens
    return f"{words} below a special length, else one row at a time" if bound else words


def learner_verdicts(name: str) -> tuple[str, str]:
    """The path of rows, without and with adapters, once each is seen to be right; or the refusal."""
    model = moved_model(name)
    try:
        hf_model.prepared(model, CONFIG)
    except ConfigError as error:
        return f"refused: {error}", f"refused: {error}"
    check_learner(model, moved_model(name))
    path = PolicyModel(model, CPU, 1.0, 64).path
    return _path_words(path), lora_verdict(model, moved_model(name))


def lora_verdict(model: Any, plain: Any) -> str:
    """The path of rows with adapters in all linear layers, equal to `plain` with merged weights."""
    try:
        lora.add_adapters(model, LoraArgs(r=2, target_modules=("all-linear",)), seed=0)
        generator = torch.Generator().manual_seed(5)
        for layer in lora.adapted_layers(model):
            layer.up.data.copy_(0.1 * torch.randn(layer.up.shape, generator=generator))
        path = hf_model.pick_path(model, CONFIG)
    except ConfigError as error:
        return f"refused: {error}"
    merged = dict(lora.merged(model, lambda tensor: tensor.detach()))
    plain.load_state_dict(merged, strict=False)
    check_learner(model, plain)
    return _path_words(path)


def engine_verdict(name: str) -> str:
    """The forward of the engine, once its log-probabilities are seen to be right; or the refusal."""
    plain = moved_model(name)
    config_json = plain.config.to_json_string(use_diff=False).encode()
    settings = InferenceConfig(max_running=4, kv_cache_tokens=1024, stream_interval_ms=0)
    try:
        engine = TorchEngine.from_config_json(config_json, settings)
    except UnsupportedModelError as error:
        return f"refused: {error}"
    weights = (hf_model.tensor_bytes(*named, "float32") for named in hf_model.named_weights(plain))
    engine.stage(list(weights), 0)
    engine.apply()
    engine.attach()
    check_engine(engine, plain)
    words = _FORWARDS.get(engine.forward_name, "one sequence at a time")
    return f"{words}, below a special length" if engine.is_bounded else words


def check_engine(engine: TorchEngine, plain: Any) -> None:
    """Asserts the log-probabilities of two episodes of two turns that run together."""
    client = Client(engine)
    random = np.random.default_rng(2)
    room = engine.max_len
    prompts = [random.integers(3, VOCABULARY, min(size, room - 9)).tolist() for size in (4, 45)]
    asked = [client.ask(ids, 3, episode=f"e{at}") for at, ids in enumerate(prompts)]
    client.finish()
    asked += [client.ask([*one.ids, 5], 2, episode=f"e{at}") for at, one in enumerate(list(asked))]
    client.finish()
    for one in asked:
        assert one.error is None, one.error
        row = demonstration_row("", np.array(one.ids), np.ones(len(one.ids), np.uint8))
        assert row is not None
        expected = plain_logprobs(plain, row)[len(one.prompt) - 1 :].detach().numpy()
        error = float(np.abs(expected - one.generation.inference_logprobs).max())
        assert error < TOLERANCE, f"log-probabilities differ by {error}"


def verdict(name: str) -> Verdict:
    """Verdict on an entry of the zoo."""
    return Verdict(*learner_verdicts(name), engine_verdict(name))
