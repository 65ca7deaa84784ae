"""Checks of an engine with a model folder, for `tailrace doctor --engine`.

Runs in the environment of the engine: `python -m tailrace_inference.adapters.engine_checks FOLDER
ENGINE ARGUMENTS`. The last line that it writes is a JSON list of `Check`. The judge is the model's own
forward in transformers, on the CPU.
"""

import asyncio
import itertools
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import AutoModelForCausalLM

from tailrace.channel.generation import Generation, TokenBuffer
from tailrace.chat.model_files import read_model_card
from tailrace.config import ConfigError
from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.model_probe import context_tokens
from tailrace.weights import TensorBytes
from tailrace_inference.adapters.engines import start_engine
from tailrace_inference.config import InferenceConfig
from tailrace_inference.ports import Engine, WeightMismatchError
from tailrace_protos.base import pack_int32
from tailrace_protos.generation import FinishReason, GenerateRequest, SamplingParams, TokenChunk

_PROMPT_TOKENS, _NEW_TOKENS = 32, 48
_JUDGED_CALLS = 16
_CALL_S = 300.0  # deadline of a call
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}  # mean absolute difference, nats
_IN_FLIGHT = (1, 16)


class Check(msgspec.Struct, frozen=True):
    """One line of the report; `reason` says what is wrong, and is empty where nothing is."""

    what: str
    state: str
    reason: str = ""


class Calls:
    """Client of one engine."""

    def __init__(self, engine: Engine, vocab_size: int, max_len: int) -> None:
        self.engine = engine
        self._numbers = itertools.count()
        self._random = np.random.default_rng(0)
        self._vocab_size = vocab_size
        self.num_prompt = min(_PROMPT_TOKENS, max_len // 4)
        self.num_new = min(_NEW_TOKENS, max_len // 4)
        self.begun = asyncio.Event()  # some call has a token

    def prompt(self) -> NDArray[np.int32]:
        """Random ids [P]."""
        return self._random.integers(0, self._vocab_size, self.num_prompt).astype(np.int32)

    async def ask(
        self, prompt: NDArray[np.int32], num_new: int = 0, episode: str = "", call_id: str = ""
    ) -> Generation:
        """Samples `num_new` tokens at temperature 1; raises `ConfigError` if the engine refuses."""
        call_id = call_id or f"doctor-{next(self._numbers)}"
        buffer, ended = TokenBuffer(), asyncio.Event()

        def on_chunk(chunk: TokenChunk) -> None:
            buffer.add(chunk)
            self.begun.set()
            if buffer.last is not None:
                ended.set()

        request = GenerateRequest(
            call_id, episode or call_id, pack_int32(prompt), num_new or self.num_new, SamplingParams()
        )
        self.engine.submit(request, on_chunk)
        async with asyncio.timeout(_CALL_S):
            await ended.wait()
        assert buffer.last is not None
        if buffer.last.error is not None:
            raise ConfigError(f"the engine refuses a call: {buffer.last.error.reason}")
        return buffer.generation()


async def check_engine(folder: Path, config: InferenceConfig) -> list[Check]:
    """All checks, in order; raises `ConfigError` if the engine cannot start."""
    model, card = _load(folder), read_model_card(folder)
    text = model.config.get_text_config()
    max_len = context_tokens(text) or config.max_model_len or 1024
    began_s = time.monotonic()
    engine = await start_engine(card, config)
    try:
        await engine.stage(_weights(model), 0)
        await engine.apply()
        found = [Check("start", f"{time.monotonic() - began_s:.1f} s")]
        calls = Calls(engine, int(text.vocab_size), min(max_len, config.max_model_len or max_len))
        tolerance = _TOLERANCE["float32" if _is_float32(config) else "bfloat16"]
        return [*found, *await _while_alive(engine, _checks(calls, model, tolerance, config))]
    finally:
        await engine.close()


async def _while_alive(engine: Engine, checks: AsyncIterator[Check]) -> list[Check]:
    """All checks; raises the error of an engine that dies meanwhile, for which they would wait."""

    async def collect() -> list[Check]:
        return [check async for check in checks]

    watching: asyncio.Task[Any] = asyncio.create_task(engine.watch())
    checking = asyncio.create_task(collect())
    try:
        await asyncio.wait({watching, checking}, return_when=asyncio.FIRST_COMPLETED)
        if not checking.done():
            raise ConfigError(f"the engine died in the checks: {watching.exception()}")
        return checking.result()
    finally:
        for task in (watching, checking):
            task.cancel()
        await asyncio.wait({watching, checking})


def _is_float32(config: InferenceConfig) -> bool:
    on_cuda = config.device != "cpu" and torch.cuda.is_available()
    return config.dtype == "float32" or (config.dtype == "auto" and not on_cuda)


async def _checks(
    calls: Calls, model: Any, tolerance: float, config: InferenceConfig
) -> AsyncIterator[Check]:
    yield await _logprobs(calls, model, tolerance)
    yield await _swap(calls, model, tolerance)
    yield await _refused_update(calls, model)
    yield await _abort(calls)
    if config.prefix_cache and calls.engine.features.prefix_reuse:
        yield await _prefix(calls)
    for count in _IN_FLIGHT:
        yield await _throughput(calls, count)


async def _logprobs(calls: Calls, model: Any, tolerance: float) -> Check:
    prompts = [calls.prompt() for _ in range(_JUDGED_CALLS)]
    made = await asyncio.gather(*map(calls.ask, prompts))
    pairs = zip(prompts, made, strict=True)
    own = np.concatenate([_own(model, prompt, one.token_ids) for prompt, one in pairs])
    told = np.concatenate([one.inference_logprobs for one in made])
    difference = (own - told).astype(np.float64)
    error = float(np.abs(difference).mean())
    divergence = float((np.expm1(difference) - difference).mean())  # of the model from the engine
    correlation = float(np.corrcoef(own, told)[0, 1])
    state = (
        f"mean difference {error:.2g}, KL {divergence:.2g}, correlation {correlation:.8f} "
        f"({len(own)} tokens)"
    )
    wrong = "" if error <= tolerance else f"above {tolerance:g}: other weights, or other arithmetic"
    return Check("log-probabilities", state, wrong)


async def _swap(calls: Calls, model: Any, tolerance: float) -> Check:
    """Other weights while calls run: each token must fit the version that it names."""
    prompts = [calls.prompt() for _ in range(4)]
    calls.begun.clear()
    running = [asyncio.create_task(calls.ask(prompt)) for prompt in prompts]
    await calls.begun.wait()
    before = [_reversed(prompt) for prompt in prompts]
    changed = _changed(model)
    await calls.engine.stage(_weights(changed), 1)
    swap_s = await calls.engine.apply()
    made = await asyncio.gather(*running, *(calls.ask(prompt) for prompt in before))
    errors: dict[int, list[float]] = {0: [], 1: []}
    for prompt, one in zip([*prompts, *before], made, strict=True):
        versions = np.concatenate([np.full(span.num_tokens, span.policy_version) for span in one.spans])
        for version, judge in enumerate((model, changed)):
            own = _own(judge, prompt, one.token_ids)
            difference = np.abs(own - one.inference_logprobs)[versions == version]
            errors[version].extend(difference.tolist())
    await calls.engine.stage(_weights(model), 2)
    await calls.engine.apply()
    worst = max(float(np.mean(each)) for each in errors.values() if each)
    state = f"{swap_s * 1000:.0f} ms, mean difference {worst:.2g}"
    return Check("weight swap", state, "" if worst <= tolerance else "tokens of wrong weights")


def _reversed(prompt: NDArray[np.int32]) -> NDArray[np.int32]:
    return prompt[::-1].copy()


async def _refused_update(calls: Calls, model: Any) -> Check:
    lacking = _own_parameter(model)
    tensors = [each for each in _weights(model) if each.name != lacking]
    try:
        await calls.engine.stage(iter(tensors), 3)
    except WeightMismatchError:
        made = await calls.ask(calls.prompt(), 4)
        kept = {span.policy_version for span in made.spans} == {2}
        return Check("incomplete update", "refused", "" if kept else "the version changed")
    return Check("incomplete update", "taken", "an update without a tensor must be refused")


def _own_parameter(model: nn.Module) -> str:
    """Name of a parameter that is tied to no other one."""
    causal: Any = model
    tied = {
        id(layer.weight) for layer in (causal.get_input_embeddings(), causal.get_output_embeddings())
    }
    return next(name for name, each in model.named_parameters() if id(each) not in tied)


async def _abort(calls: Calls) -> Check:
    calls.begun.clear()
    running = asyncio.create_task(calls.ask(calls.prompt(), 4 * calls.num_new, call_id="abort"))
    await calls.begun.wait()
    began_s = time.monotonic()
    calls.engine.abort("abort")
    made = await running
    state = f"{(time.monotonic() - began_s) * 1000:.0f} ms, {made.num_tokens} tokens kept"
    stats = calls.engine.stats()
    wrong = ""
    if made.finish_reason is not FinishReason.ABORT:
        wrong = f"the call ended with {made.finish_reason}"
    elif stats.num_running + stats.num_waiting:
        wrong = "the engine still counts calls"
    return Check("abort", state, wrong)


async def _prefix(calls: Calls) -> Check:
    prompt = np.concatenate([calls.prompt(), calls.prompt()])
    first = await calls.ask(prompt, episode="prefix")
    again = np.concatenate([prompt, first.token_ids])
    second = await calls.ask(again, 4, episode="prefix")
    state = f"{second.num_cached_tokens} of {len(again)} tokens"
    wrong = "" if second.num_cached_tokens else "a second turn computes its first one again"
    return Check("prefix reuse", state, wrong)


async def _throughput(calls: Calls, count: int) -> Check:
    began_s = time.monotonic()
    made = await asyncio.gather(*(calls.ask(calls.prompt()) for _ in range(count)))
    rate = sum(one.num_tokens for one in made) / (time.monotonic() - began_s)
    return Check(f"tokens/s, {count} in flight", f"{rate:,.0f}")


def _load(folder: Path) -> Any:
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        with foreign_code("transformers"):
            return load(folder, dtype=torch.float32, local_files_only=True).eval()
    except ForeignCodeError as error:
        raise ConfigError(f"the model in {folder} cannot be loaded: {error}") from error


def _weights(model: Any) -> Iterator[TensorBytes]:
    for name, tensor in model.state_dict().items():
        data = memoryview(tensor.float().contiguous().numpy()).cast("B")
        yield TensorBytes(name, "float32", tuple(tensor.shape), data)


def _changed(model: Any) -> Any:
    """A copy of the model with noise on its weights."""
    make: Any = AutoModelForCausalLM.from_config
    copy = make(model.config, dtype=torch.float32).eval()
    copy.load_state_dict(model.state_dict())
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.add_(0.1 * parameter.std(correction=0) * torch.randn_like(parameter))
    return copy


def _own(model: Any, prompt: NDArray[np.int32], new: NDArray[np.int32]) -> NDArray[np.float32]:
    """The model's own log-probabilities [T] of the tokens `new` [T]."""
    ids = torch.from_numpy(np.concatenate([prompt, new]).astype(np.int64))
    with torch.no_grad():
        logprobs = model(ids[None]).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    taken = logprobs.gather(1, ids[len(prompt) :, None])
    found: NDArray[np.float32] = taken[:, 0].numpy()
    return found


def main(argv: list[str]) -> int:
    """Prints the checks; exit code 2 with a line `error: ...` for a mistake of the user."""
    folder, engine, arguments = argv
    try:
        config = msgspec.convert(
            {"engine": engine, "engine_args": msgspec.json.decode(arguments), "max_running": 64},
            InferenceConfig,
        )
        checks = asyncio.run(check_engine(Path(folder), config))
    except (ConfigError, msgspec.ValidationError) as error:
        sys.stdout.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"\n{msgspec.json.encode(checks).decode()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
