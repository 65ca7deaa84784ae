"""`learner.bind_host`: the address at which a weight_sync of another host fetches new weights."""

from __future__ import annotations

import asyncio

from nats.aio.msg import Msg

from tailrace.bus import Bus
from tailrace_protos import subjects
from tailrace_protos.base import decode
from tailrace_protos.weights import OfferWeights
from tests.integration.learner.conftest import LearnerRun


async def test_weights_are_offered_at_the_bind_host_with_a_key(
    learner_run: LearnerRun, bus: Bus
) -> None:
    offered: asyncio.Future[OfferWeights] = asyncio.get_running_loop().create_future()

    async def on_offer(message: Msg) -> None:
        if not offered.done():
            offered.set_result(decode(message.data, OfferWeights))

    await bus.connection.subscribe(subjects.offer_weights(learner_run.name), on_offer)
    learner_run.env["TAILRACE_ADVERTISE_HOST"] = "the-pod"
    learner_run.configure(bind_host="0.0.0.0")
    learner_run.start("learner")
    source = (await offered).source
    assert source.zmq_endpoint.startswith("tcp://the-pod:")
    assert source.zmq_public_key, "beyond loopback weights travel encrypted"
