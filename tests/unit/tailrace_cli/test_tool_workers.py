"""The processes that serve an experiment's own tools in a local cluster."""

from __future__ import annotations

from pathlib import Path

from tailrace_cli.cluster.plan import Site, tool_worker_specs
from tailrace_cli.cluster.servers import ServerAddresses
from tailrace_cli.config import ClusterConfig


def test_every_entry_is_a_process_of_the_user_tools_that_serves_this_run() -> None:
    passwords = {"tools": "secret", "agents": "other"}
    site = Site(
        config_path=Path("/run/config.yaml"),
        state_dir=Path("/run/state"),
        connection=ServerAddresses("nats://there", "redis://there", passwords),
        num_threads=1,
        user_modules=Path("/experiments/mine"),
    )
    config = ClusterConfig(tool_workers=("my_tools:add my_tools:sub", "other:search"))
    first, second = tool_worker_specs(config, "my_run", site)
    assert (first.name, second.name) == ("tools-0", "tools-1")
    assert first.argv[1:] == [
        "-P", "-m", "tailrace_cli", "tools", "serve", "--run", "my_run", "my_tools:add", "my_tools:sub",
    ]  # fmt: skip
    assert second.argv[-1] == "other:search"
    assert (first.env["TAILRACE_NATS_USER"], first.env["TAILRACE_NATS_PASSWORD"]) == ("tools", "secret")
    assert first.env["PYTHONPATH"].startswith("/experiments/mine")


def test_without_entries_there_are_none() -> None:
    site = Site(Path("c"), Path("s"), ServerAddresses("n", "r", {}), 1)
    assert tool_worker_specs(ClusterConfig(), "r", site) == []
