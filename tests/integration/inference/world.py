"""Real inference and weight_sync processes, and the learner's part played by the test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tailrace.bus import Bus
from tailrace.channel import Address, Generation, ZmqGenerateClient
from tailrace.config import Endpoints, RunConfig
from tailrace.runtime import Args, Service
from tailrace.store import Blobs, StoreConnection
from tailrace.weights import TensorBytes, WeightPublisher
from tailrace_protos.base import pack_int32
from tailrace_protos.control import ServerState, ServerStatus
from tailrace_protos.generation import GenerateRequest, SamplingParams
from tailrace_protos.weights import ModelCard
from tests.world.processes import ServiceProcess, environment

MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": 61,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
}
SERVER_ID = "inference-0"


def make_model(seed: int) -> Any:
    torch.manual_seed(seed)
    content = dict(MODEL)
    config = AutoConfig.for_model(content.pop("model_type"), **content)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def weights_of(model: Any) -> list[TensorBytes]:
    return [
        TensorBytes(name, "float32", tuple(p.shape), memoryview(p.detach().numpy()).cast("B"))
        for name, p in model.named_parameters()
    ]


def own_logprobs(model: Any, ids: list[int], num_new: int) -> list[float]:
    """The model's log-probabilities of the last `num_new` of `ids`."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].float()
    logprobs = torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])
    return [float(value) for value in logprobs[-num_new:, 0]]


@dataclass
class Services:
    """weight_sync and an inference server of one run, in this event loop or in a process."""

    endpoints: Endpoints
    run: str
    folder: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    serving: dict[str, asyncio.Task[int]] = field(default_factory=dict)
    process: ServiceProcess | None = None
    made: dict[str, Service] = field(default_factory=dict)

    @property
    def experiment(self) -> dict[str, Any]:
        sections = {"weight_sync": {"announce_interval_s": 0.2}, "inference": dict(self.settings)}
        return {"exp_name": self.run, "output_dir": str(self.folder)} | sections

    def serve(self, name: str, build: Callable[[Args], Service], instance_id: str) -> None:
        run = RunConfig(exp_name=self.run, output_dir=str(self.folder))
        service = build(Args("experiment.yaml", instance_id, self.experiment, run, self.endpoints))
        self.serving[name] = asyncio.create_task(service.serve())
        self.made[name] = service

    def spawn(self) -> ServiceProcess:
        """Start the inference server as its own process."""
        config = self.folder / "experiment.yaml"
        config.write_text(json.dumps(self.experiment))
        variables = environment(self.endpoints, self.folder)
        arguments = ("--server-id", SERVER_ID)
        log = self.folder / "log"
        self.process = ServiceProcess("inference", config, variables, log, arguments)
        self.process.start()
        return self.process

    async def stop(self) -> None:
        for name, task in self.serving.items():
            self.made[name].stop("end of test")
            await asyncio.wait({task})
        if self.process is not None:
            self.process.kill()


@dataclass
class World:
    """World of a test: the bus, the learner's side, and a client of the server."""

    bus: Bus
    redis: StoreConnection
    services: Services
    publisher: WeightPublisher
    client: ZmqGenerateClient
    num_published: int = 0

    @property
    def run(self) -> str:
        return self.services.run

    async def put_card(self, content: Mapping[str, Any] = MODEL) -> None:
        card = ModelCard(json.dumps(content).encode(), {})
        await Blobs(self.redis, self.run).put_model_card(card)

    async def publish(self, model: Any) -> int:
        self.num_published += 1
        step = self.num_published
        return await self.publisher.publish(weights_of(model), lineage="test", optimizer_step=step)

    async def status(self) -> ServerStatus | None:
        return next(iter(await self.bus.registry.all()), None)

    async def serving(self, policy_version: int, timeout_s: float = 60.0) -> ServerStatus:
        """The server's status as soon as it serves a version."""
        async with asyncio.timeout(timeout_s):
            while True:
                status = await self.status()
                if (
                    status is not None
                    and status.state is ServerState.READY
                    and status.policy_version == policy_version
                ):
                    return status
                await asyncio.sleep(0.02)

    def request(
        self, call_id: str, prompt: list[int], num_new: int, **sampling: Any
    ) -> GenerateRequest:
        return GenerateRequest(
            call_id, f"{call_id}.episode", pack_int32(prompt), num_new, SamplingParams(**sampling)
        )

    async def generate(self, address: Address, request: GenerateRequest) -> Generation:
        return await self.client.generate(address, request).collect()


def address_of(status: ServerStatus) -> Address:
    return Address(status.server_id, status.nats_subject, status.zmq_endpoint, status.zmq_public_key)
