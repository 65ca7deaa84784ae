"""Ports of the local cluster: kept for those who share them, and for nobody else."""

from __future__ import annotations

import socket

import pytest

from tailrace.config import ConfigError
from tailrace_cli.cluster.servers import choose_port, reserve_port


def listener(port: int, *, is_sharing: bool) -> socket.socket:
    made = socket.socket()
    if is_sharing:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind(("127.0.0.1", port))
    made.listen()
    return made


def test_a_reserved_port_is_shared_by_replicas_and_takes_no_connection_itself() -> None:
    with reserve_port("127.0.0.1", 0, "gateway.port") as reservation:
        port = reservation.getsockname()[1]
        with listener(port, is_sharing=True) as first, listener(port, is_sharing=True) as second:
            for _ in range(20):
                with socket.create_connection(("127.0.0.1", port), 5):
                    pass
            first.setblocking(False)
            second.setblocking(False)
            assert accepted(first) + accepted(second) == 20
        with pytest.raises(OSError, match="in use"):
            listener(port, is_sharing=False)


def accepted(server: socket.socket) -> int:
    count = 0
    while True:
        try:
            server.accept()[0].close()
        except BlockingIOError:
            return count
        count += 1


def test_a_port_that_another_cluster_shares_is_busy() -> None:
    with reserve_port("127.0.0.1", 0, "gateway.port") as theirs:
        port = theirs.getsockname()[1]
        with listener(port, is_sharing=True), pytest.raises(ConfigError, match=r"gateway\.port"):
            reserve_port("127.0.0.1", port, "gateway.port")


def test_a_host_that_is_not_ours_is_named() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1.*gateway\.port"):
        reserve_port("192.0.2.1", 0, "gateway.port")


def test_a_free_port_is_chosen_where_none_is_wanted() -> None:
    assert choose_port(0, "cluster.nats_port") > 0


def test_an_address_of_another_machine_is_named_with_its_key() -> None:
    told = r"203\.0\.113\.7:0 \(gateway\.host, gateway\.port\): .*: give an address of this machine"
    with pytest.raises(ConfigError, match=told):
        reserve_port("203.0.113.7", 0, "gateway.port")


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_a_port_of_an_address_of_ipv6_can_be_reserved() -> None:
    """The gateway listens on such an address, too."""
    with reserve_port("::1", 0, "gateway.port") as reservation:
        port = reservation.getsockname()[1]
        assert reservation.family == socket.AF_INET6
        with pytest.raises(ConfigError, match=rf"port {port} \(gateway\.port\) is busy"):
            choose_port(port, "gateway.port", "::1")


def test_a_port_that_cannot_be_had_is_told_with_what_is_wrong() -> None:
    """It is not busy: this machine has no such address."""
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:4222 .*: give an address of this machine"):
        reserve_port("192.0.2.1", 4222, "gateway.port")
