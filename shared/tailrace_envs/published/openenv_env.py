"""Adapter for environments of an OpenEnv server, unchanged: `env_type: openenv`.

The first `reset` opens one session per instance at the server (a WebSocket). Calls wait for the server.
The server decides the number of sessions, and if a seed determines an episode.
"""

import json
from collections.abc import Callable
from typing import Any

from openenv.core import GenericEnvClient
from openenv.core.sync_client import SyncEnvClient
from websockets.exceptions import ConnectionClosed

from tailrace.config import decode_config
from tailrace.import_path import load_object
from tailrace_envs.game import Answer, TextGame
from tailrace_envs.published.config import OpenEnvConfig


class OpenEnvText(TextGame):
    """Plays an environment of an OpenEnv server. Options are the keys of `OpenEnvConfig`."""

    waits = True

    def __init__(self, **options: Any) -> None:
        self.config = config = decode_config(options, OpenEnvConfig, "env_config")
        super().__init__(config.max_turns)
        own = load_object(config.to_text, "to_text") if config.to_text else None
        self._describe: Callable[[dict[str, Any]], str] = own or self._field_text
        act = load_object(config.to_action, "to_action") if config.to_action else None
        self._act: Callable[[str], dict[str, Any]] = act or self._field_action
        self._client: SyncEnvClient[Any, Any, Any] | None = None
        self._return = 0.0

    def begin(self, seed: int) -> str:
        """See `TextGame`."""
        self._return = 0.0
        try:
            result = self._session().reset(seed=seed, **self.config.reset)
        except ConnectionClosed as error:
            self.close()
            raise ConnectionError(
                f"{self.config.base_url} ended the session before an episode began ({error}): it may "
                "hold no more sessions; start it with a larger max_concurrent_envs, or play fewer "
                "episodes at once (agents.max_concurrent_episodes)"
            ) from error
        return self.config.instructions + self._describe(result.observation)

    def answer(self, reply: str) -> Answer:
        """See `TextGame`."""
        action = self._act(reply)
        try:
            result = self._session().step(action)
        except RuntimeError as error:
            if "VALIDATION_ERROR" not in str(error):
                raise
            raise RuntimeError(
                f"{self.config.base_url} knows no action with the fields {', '.join(sorted(action))} "
                f"({error}): correct action_field, action or to_action"
            ) from error
        reward = float(result.reward or 0.0)
        self._return += reward
        return Answer(self._describe(result.observation), reward, bool(result.done))

    def success(self) -> float:
        """See `TextGame`."""
        return float(self._return >= self.config.success_return)

    def close(self) -> None:
        """Ends the session."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _session(self) -> SyncEnvClient[Any, Any, Any]:
        if self._client is None:
            config = self.config
            client = GenericEnvClient(
                config.base_url,
                connect_timeout_s=config.connect_timeout_s,
                message_timeout_s=config.message_timeout_s,
            )
            self._client = client.sync()
        return self._client

    def _field_text(self, observation: dict[str, Any]) -> str:
        field = self.config.observation_field
        if not field:
            return json.dumps(observation, ensure_ascii=False, sort_keys=True) + "\n"
        if field not in observation:
            found = ", ".join(sorted(observation))
            raise KeyError(f"observation_field: the observation has no {field!r} (found {found})")
        return str(observation[field])

    def _field_action(self, reply: str) -> dict[str, Any]:
        return {**self.config.action, self.config.action_field: reply}
