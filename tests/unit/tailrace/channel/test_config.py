from __future__ import annotations

import pytest

from tailrace.channel import ChannelConfig
from tailrace.config import ConfigError, decode_config


@pytest.mark.parametrize("key", ChannelConfig.__struct_fields__)
def test_a_bound_that_is_not_positive_is_refused_by_name(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        decode_config({key: 0}, ChannelConfig, "x.yaml")


def test_a_silence_shorter_than_two_keepalives_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="at least twice keepalive_s"):
        decode_config({"keepalive_s": 1.0, "silence_s": 1.5}, ChannelConfig, "x.yaml")
