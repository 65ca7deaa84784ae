"""Transfer of weights beside raw memory and raw TCP, and the size of deltas of real optimizer steps.

Run it with `make bench-weights`. Each way of transfer alternates with its rival: a version mapped from
shared memory and verified beside a copy in memory; a version pulled over ZMQ from another process
beside a plain TCP socket. The deltas are those between consecutive AdamW steps, after the first 40, at
a learning rate of 1e-6 (no weight decay) of a Qwen3 of 13 million parameters in float32, published as
bfloat16; its weights are random with the usual deviation of 0.02, the text is the pages of `docs/`. The
very first steps of AdamW move every element by the whole rate: such a delta stands beside. Simulated
and real servers fetch along the relay tree. `benchmarks/weights/pauses.py` measures pauses of engines,
and `benchmarks/weights/updates.py` the log-probabilities of tokens around 20 updates in a row.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.results import RESULTS_DIR, Results, Target, median
from benchmarks.weights.servers import transfer
from benchmarks.weights.simulation import Links, transfer_s
from tailrace.weights import TensorBytes
from tailrace.weights.chunks import ChunkFetch, ChunkServer, Holding
from tailrace.weights.deltas import apply_deltas, encode_delta
from tailrace.weights.mappings import SegmentMappings
from tailrace.weights.segment import SegmentFolder, open_segment
from tailrace.weights.tensors import fill, layout, verify
from tailrace_protos.weights import WeightManifest, WeightSource

ROOT = Path(__file__).parents[1]
PYTHONS = {
    "torch": Path(sys.executable),
    "vllm": ROOT / ".venv-vllm" / "bin" / "python",
    "sglang": ROOT / ".venv-sglang" / "bin" / "python",
}
DOCS = ROOT / "docs"
NUM_ROUNDS = 5
SIMULATED = (1, 2, 4, 8, 64, 256, 1024, 4096)
FIRST_STEPS, LATER_STEPS = range(2), range(40, 46)
TENSOR_BYTES = 32 << 20
_PROMISED = ("torch", "vllm")  # engines with a target for their pauses
Version = tuple[WeightManifest, memoryview]


def random_version(num_bytes: int, buffer: memoryview | None = None) -> Version:
    """A version of random bytes, in `buffer` if there is one."""
    random = np.random.default_rng(0)
    tensors = [
        TensorBytes(f"w{at}", "uint8", (TENSOR_BYTES,), memoryview(random.bytes(TENSOR_BYTES)))
        for at in range(num_bytes // TENSOR_BYTES)
    ]
    offsets, size = layout(tensors)
    buffer = memoryview(bytearray(size)) if buffer is None else buffer
    return WeightManifest(0, "a", 0, None, fill(buffer, tensors, offsets), size), buffer


def published(model: torch.nn.Module, step: int) -> Version:
    """The model's weights in bfloat16."""
    tensors = []
    for name, weight in model.named_parameters():
        bits = weight.detach().to(torch.bfloat16).view(torch.int16).numpy()
        tensors.append(TensorBytes(name, "bfloat16", tuple(weight.shape), memoryview(bits).cast("B")))
    offsets, size = layout(tensors)
    buffer = memoryview(bytearray(size))
    return WeightManifest(step, "a", step, None, fill(buffer, tensors, offsets), size), buffer


def trained_versions() -> Iterator[Version]:
    """Versions after consecutive AdamW steps."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256, hidden_size=512, intermediate_size=1536, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    text = b"".join(path.read_bytes() for path in sorted(DOCS.glob("*.md")))
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    for step in range(LATER_STEPS.stop):
        batch = ids[torch.randint(len(ids) - 128, (8, 1)) + torch.arange(128)]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in FIRST_STEPS or step in LATER_STEPS:
            yield published(model, step)


def measure_deltas(results: Results) -> None:
    """Size and speed of deltas between consecutive steps."""
    shares, before = [], None
    for after in trained_versions():
        if before is not None and after[0].policy_version == before[0].policy_version + 1:
            began_s = time.perf_counter()
            delta, payload = encode_delta(before[0], after[0], before[1], after[1])
            encoded_s = time.perf_counter()
            built = apply_deltas(after[0], [(delta, memoryview(payload))], before[1])
            applied_s = time.perf_counter()
            assert built == after[1]
            size = after[0].num_bytes
            step = after[0].policy_version
            if step in LATER_STEPS:
                shares.append(len(payload) / size)
            results.add(
                what=f"delta to step {step}",
                mib=size / 2**20,
                share_of_full=len(payload) / size,
                changed=sum(entry.num_changed for entry in delta.entries) / (size / 2),
                encode_mib_per_s=size / 2**20 / (encoded_s - began_s),
                apply_mib_per_s=size / 2**20 / (applied_s - encoded_s),
            )
        before = after
    results.at_most("delta of a step as a share of the full version, median", median(shares), 0.015)


def serve(num_bytes: int, pipe: Connection) -> None:
    """The other process: a version over ZMQ, and its bytes over plain TCP to whoever connects."""
    _, buffer = random_version(num_bytes)

    def send_plain(listener: socket.socket) -> None:
        while True:
            peer, _ = listener.accept()
            with peer:
                peer.sendall(buffer)

    async def run() -> None:
        server = ChunkServer(lambda version, is_delta: Holding(buffer, complete=True))
        await server.start()
        listener = socket.create_server(("127.0.0.1", 0))
        pipe.send((server.endpoint, server.public_key, listener.getsockname()[1]))
        await asyncio.to_thread(send_plain, listener)

    asyncio.run(run())


def timed(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def compare(
    results: Results,
    what: str,
    num_bytes: int,
    ours: Callable[[], object],
    rival: Callable[[], object],
    prepare: Callable[[], object] = lambda: None,
) -> None:
    """Both in turns, their medians, and the share of the rival's throughput; `prepare` is not timed."""
    ours_s, rival_s = [], []
    ours()  # both write to memory that is in use already
    for _ in range(NUM_ROUNDS):
        rival_s.append(timed(rival))
        prepare()
        ours_s.append(timed(ours))
    gib = num_bytes / 2**30
    share = median(rival_s) / median(ours_s)
    results.add(
        what=what,
        mib=num_bytes / 2**20,
        gib_per_s=gib / median(ours_s),
        rival_gib_per_s=gib / median(rival_s),
        share_of_rival=share,
    )
    results.at_least(f"{what}: share of the rival's throughput", share, 0.7)


def measure_shared_memory(results: Results, num_bytes: int) -> None:
    """A version of the same host beside a copy in memory.

    weight_sync holds two versions and writes the next one over the one before them. So does this, with
    segments of its own, before each reading; the copies are timed too, beside those to fresh memory.
    """
    folder, mappings = SegmentFolder("bench", "weights"), SegmentMappings()
    offered = SegmentFolder("bench", "learner").create(num_bytes)
    manifest, _ = random_version(num_bytes, offered.data)
    fd = open_segment(offered.name, num_bytes)
    held = [folder.copy_of(fd, num_bytes) for _ in range(2)]
    into, source = memoryview(bytearray(num_bytes)), offered.data  # a bytearray would copy twice
    over_retired_s: list[float] = []

    def renew() -> None:
        folder.retire(held.pop(0))
        over_retired_s.append(timed(lambda: held.append(folder.copy_of(fd, num_bytes))))

    def mapped() -> None:
        verify(manifest, mappings.read(held[-1].name, num_bytes))

    def copied() -> None:
        into[:] = source

    for _ in range(3):  # each segment is mapped once
        renew()
        mapped()
    compare(results, "shared memory, verified, beside a copy", num_bytes, mapped, copied, renew)
    fresh = [timed(lambda: held.append(folder.copy_of(fd, num_bytes))) for _ in range(2)]
    results.add(
        what="weight_sync's copy, over a retired segment and to fresh memory",
        mib=num_bytes / 2**20,
        gib_per_s=num_bytes / 2**30 / median(over_retired_s),
        fresh_gib_per_s=num_bytes / 2**30 / median(fresh),
    )
    folder.forget_retired()
    for segment in (offered, *held):
        segment.close(delete=True)


def measure_network(results: Results, num_bytes: int) -> None:
    """A version of another host beside a plain socket, both over loopback."""
    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(
        target=serve, args=(num_bytes, there), daemon=True
    )
    server.start()
    endpoint, key, port = here.recv()
    manifest, _ = random_version(num_bytes)
    into = memoryview(bytearray(num_bytes))
    far = WeightSource("far", "", endpoint, key)

    def pulled() -> None:
        asyncio.run(ChunkFetch(far, 0, Holding(into, complete=False)).run())

    def plain() -> None:
        with socket.create_connection(("127.0.0.1", port)) as peer:
            received = 0
            while received < num_bytes:
                received += peer.recv_into(into[received:])

    compare(results, "ZMQ beside a plain socket over loopback", num_bytes, pulled, plain)
    verify(manifest, into)
    server.kill()


def measure_simulation(results: Results) -> None:
    """Servers on equal links of 10 GB/s, a version of 15 GB in 256 parts, 0.5 ms between hosts."""
    links = Links(num_chunks=256, chunk_s=15 / 256 / 10, latency_s=0.0005)
    alone_s = transfer_s(1, links)
    shares = {}
    for num_servers in SIMULATED:
        seconds = transfer_s(num_servers, links)
        shares[num_servers] = seconds / alone_s
        results.add(
            what=f"simulated: {num_servers} servers", seconds=seconds, times_one=seconds / alone_s
        )
    results.at_most("simulated: time of 1,024 servers against one", shares[1024], 2.0)


def measure_servers(results: Results, num_bytes: int) -> None:
    """Real servers, each a process that fetches over ZMQ from those that the real planner names."""
    for num_servers in (1, 2, 4, 8):
        seconds, relayed = transfer(num_servers, num_bytes)
        results.add(
            what=f"{num_servers} real servers, {num_bytes >> 20} MiB",
            seconds=seconds,
            gib_per_s_together=num_servers * num_bytes / 2**30 / seconds,
            relayed_share=relayed / num_servers / num_bytes,
        )


def engine_figures(module: str) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Runs a module of `benchmarks.weights` for each engine and each way to keep keys and values."""
    for engine, python in PYTHONS.items():
        for kv in ("keep", "recompute"):
            command = [str(python), "-m", f"benchmarks.weights.{module}", engine, kv]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
            lines = done.stdout.splitlines()
            yield engine, kv, json.loads(next(line for line in lines if line.startswith("{")))


def measure_pauses(results: Results) -> None:
    """Pauses at updates, and tokens per second while staging, without a break and as a learner does."""
    for engine, kv, found in engine_figures("pauses"):
        share = found["tokens_per_s_staging"] / found["tokens_per_s"]
        usual_share = found["tokens_per_s_learner"] / found["tokens_per_s"]
        what = f"{engine}, kv_on_update {kv}"
        shares = {"share_while_staging": share, "share_at_learner_s_pace": usual_share}
        results.add(what=f"{what}: updates", **found, **shares)
        for kind in ("p50", "p99") if engine in _PROMISED else ():
            more_ms = found[f"pause_{kind}_ms"] - found[f"swap_{kind}_ms"]
            results.at_most(f"{what}: pause beyond the swap, {kind}, ms", more_ms, 10.0)
        results.at_least(f"{what}: tokens/s while staging, share of without", share, 0.9)
        usually = f"{what}: tokens/s at a learner's pace, share of without"
        results.at_least(usually, usual_share, 0.9)


def measure_updates(results: Results) -> None:
    """Log-probabilities of 64 calls around 20 updates, beside the forward of the right version."""
    for engine, kv, found in engine_figures("updates"):
        what = f"{engine}, kv_on_update {kv}"
        results.add(what=f"{what}: 64 calls, 20 updates", **found)
        results.at_most(f"{what}: calls interrupted by updates", found["num_interrupted"], 0.0)
        if kv == "recompute":
            beyond = found["share_beyond_noise"]
            results.at_most(f"{what}: share of tokens beyond noise of their version", beyond, 0.0)


PARTS: dict[str, Callable[[Results, int], None]] = {
    "deltas": lambda results, _: measure_deltas(results),
    "shared": measure_shared_memory,
    "network": measure_network,
    "simulation": lambda results, _: measure_simulation(results),
    "servers": lambda results, num_bytes: measure_servers(results, num_bytes // 4),
    "pauses": lambda results, _: measure_pauses(results),
    "updates": lambda results, _: measure_updates(results),
}


def keep_other_parts(results: Results, part: str) -> None:
    """Takes the rows and targets of the other parts, as they were measured last."""
    path = RESULTS_DIR / "weights.json"
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    others = {*PARTS} - {part}
    results.rows += [row for row in content.get("rows", ()) if row.get("part") in others]
    measured = {target.what for target in results.targets}
    targets = msgspec.convert(content.get("targets", []), list[Target])
    results.targets += [target for target in targets if target.what not in measured]


def main() -> int:
    """Measure part by part, print and write it; the exit code says whether all targets hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512, help="size of a transferred version")
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=[*PARTS], help="the others stay")
    chosen = parser.parse_args()
    torch.set_num_threads(2)
    exit_code = 0
    for part in chosen.parts:
        results = Results("weights", ("tailrace", "torch", "zstandard", "pyzmq", "xxhash"))
        PARTS[part](results, chosen.mib << 20)
        results.rows = [{"part": part, **row, "commit": results.commit} for row in results.rows]
        results.show()
        keep_other_parts(results, part)
        results.write()
        exit_code = results.exit_code
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
