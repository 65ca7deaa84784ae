"""Tokens per second of vLLM or SGLang with the demo's model, bare and behind our adapter.

`make bench-engine` runs it in the environment of each, as `python -m benchmarks.engine_rival vllm 3`.
The last line of the output is a JSON list of `RivalRow`. Both sides compute the jobs of the torch
engine, on the CPU in float32, eager, with the log-probability of each sampled token; they run in turn,
each with its own engine. The bare side hands over whole answers.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.bench_engine import DEMO_MODEL, IN_FLIGHT, Job, make_jobs, make_model, weights
from tailrace_inference.adapters.engines import start_engine
from tailrace_inference.config import InferenceConfig
from tailrace_inference.ports import Engine
from tailrace_protos.base import pack_int32
from tailrace_protos.generation import GenerateRequest, TokenChunk
from tailrace_protos.weights import ModelCard

Answer = Callable[[Job], Awaitable[int]]  # tokens sampled

_MAX_RUNNING, _CACHE_TOKENS, _MAX_LEN = 256, 65536, 512


class RivalRow(msgspec.Struct, frozen=True):
    """Best tokens per second of both sides."""

    in_flight: int
    bare: float
    adapter: float


async def rate(answer: Answer, jobs: list[Job], in_flight: int) -> float:
    """Tokens per second of all jobs with at most `in_flight` at once."""
    waiting = iter(jobs)

    async def work() -> int:
        return sum([await answer(job) for job in waiting])

    began_s = time.perf_counter()
    counts = await asyncio.gather(*(work() for _ in range(in_flight)))
    return sum(counts) / (time.perf_counter() - began_s)


def adapter_answer(engine: Engine) -> Answer:
    """A job through the protocol `Engine`."""
    numbers = iter(range(1 << 40))

    async def answer(job: Job) -> int:
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        sampled = 0

        def on_chunk(chunk: TokenChunk) -> None:
            nonlocal sampled
            assert chunk.error is None, chunk.error
            sampled += len(chunk.token_ids) // 4
            if chunk.finish_reason is not None:
                ended.set_result(sampled)

        name = str(next(numbers))
        engine.submit(GenerateRequest(name, name, pack_int32(job.prompt), job.num_new), on_chunk)
        return await ended

    return answer


def bare_vllm(folder: Path) -> Answer:
    """vLLM's own asynchronous engine."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=_MAX_LEN,
            max_num_seqs=_MAX_RUNNING,
            enable_prefix_caching=True,
            disable_log_stats=True,
            kv_cache_memory_bytes=1 << 30,
        )
    )
    numbers = iter(range(1 << 40))

    async def answer(job: Job) -> int:
        sampling = SamplingParams(
            max_tokens=job.num_new,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt: Any = {"prompt_token_ids": job.prompt.tolist()}
        answers = llm.generate(prompt, sampling, f"bare-{next(numbers)}")
        made: list[Any] = [each async for each in answers]
        return len(made[-1].outputs[0].token_ids)

    return answer


def bare_sglang(folder: Path) -> Answer:
    """SGLang's own engine."""
    import sglang

    engine = sglang.Engine(
        model_path=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        device="cpu",
        dtype="float32",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        sleep_on_idle=True,  # else it takes a core while the other side is measured
        context_length=_MAX_LEN,
        max_running_requests=_MAX_RUNNING,
        max_total_tokens=_CACHE_TOKENS,
        log_level="error",
    )

    async def answer(job: Job) -> int:
        sampling = {"max_new_tokens": job.num_new, "ignore_eos": True}
        made: Any = await engine.async_generate(
            input_ids=job.prompt.tolist(), sampling_params=sampling, return_logprob=True
        )
        return len(made["output_ids"])

    return answer


async def measure(name: str, folder: Path, repeats: int) -> list[RivalRow]:
    """Rows of all numbers in flight, after a short run of each side that only warms up."""
    if name == "sglang":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    bare = (bare_vllm if name == "vllm" else bare_sglang)(folder)
    config = InferenceConfig(
        engine=name, max_running=_MAX_RUNNING, kv_cache_tokens=_CACHE_TOKENS, max_model_len=_MAX_LEN
    )
    engine = await start_engine(ModelCard(json.dumps(DEMO_MODEL).encode(), {}), config)
    await engine.stage(iter(weights(make_model())), 0)
    await engine.apply()
    sides, rows = (bare, adapter_answer(engine)), []
    for side in sides:
        await rate(side, make_jobs(_MAX_RUNNING), _MAX_RUNNING)
    for in_flight, count in IN_FLIGHT:
        jobs, best = make_jobs(count), [0.0, 0.0]
        for _ in range(repeats):
            runs = [await rate(side, jobs, in_flight) for side in sides]
            best = [max(pair) for pair in zip(best, runs, strict=True)]
        rows.append(RivalRow(in_flight, *best))
        sys.stderr.write(f"{name}: {rows[-1]}\n")
    await engine.close()
    return rows


def main(argv: list[str]) -> int:
    """Prints the rows. The bare engine's processes are ended with this one."""
    name, repeats = argv
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    with tempfile.TemporaryDirectory() as folder:
        content = DEMO_MODEL | {"architectures": ["Qwen3ForCausalLM"]}
        (Path(folder) / "config.json").write_text(json.dumps(content))
        rows = asyncio.run(measure(name, Path(folder), int(repeats)))
    sys.stdout.write("\n" + msgspec.json.encode(rows).decode() + "\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    main(sys.argv[1:])
    import psutil

    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(0)
