from __future__ import annotations

import pytest

from tailrace.channel import ClientChannelConfig, ServerChannelConfig
from tailrace.config import Config, ConfigError, decode_config
from tailrace_cli.experiment import decode

KINDS: tuple[type[Config], ...] = (ClientChannelConfig, ServerChannelConfig)
KEYS = [(kind, key) for kind in KINDS for key in kind.__struct_fields__]


@pytest.mark.parametrize(("kind", "key"), KEYS)
def test_a_bound_that_is_not_positive_is_refused_by_name(kind: type[Config], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        decode_config({key: 0}, kind, "x.yaml")


@pytest.mark.parametrize("kind", KINDS)
def test_a_silence_shorter_than_two_keepalives_is_refused_with_the_reason(kind: type[Config]) -> None:
    with pytest.raises(ConfigError, match="at least twice keepalive_s"):
        decode_config({"keepalive_s": 1.0, "silence_s": 1.5}, kind, "x.yaml")


@pytest.mark.parametrize("section", ["agents", "gateway"])
@pytest.mark.parametrize(
    "key", set(ServerChannelConfig.__struct_fields__) - set(ClientChannelConfig.__struct_fields__)
)
def test_sections_of_clients_refuse_keys_that_only_a_server_reads(section: str, key: str) -> None:
    content = {"exp_name": "a", "scheduler": {"tags": ["a"]}, section: {"channel": {key: 1}}}
    with pytest.raises(ConfigError, match=rf"unknown key '{section}\.channel\.{key}'"):
        decode(content, "x.yaml")
