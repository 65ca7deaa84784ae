"""Google's Agent Development Kit on its litellm model."""

from typing import Any

from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types
from task import SYSTEM, double, reward


class Player:
    """Plays one row."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str) -> float:
        model = LiteLlm("openai/policy", api_base=base_url, api_key=api_key)
        agent = LlmAgent(name="clerk", model=model, instruction=SYSTEM, tools=[double])
        runner = InMemoryRunner(agent, app_name="clerk")
        session = await runner.session_service.create_session(app_name="clerk", user_id="user")
        mode = StreamingMode.SSE if data["stream"] else StreamingMode.NONE
        answer = ""
        async for event in runner.run_async(
            user_id="user",
            session_id=session.id,
            new_message=types.Content(role="user", parts=[types.Part(text=data["prompt"])]),
            run_config=RunConfig(streaming_mode=mode),
        ):
            if event.is_final_response() and event.content:
                answer = "".join(part.text or "" for part in event.content.parts or [])
        return reward(answer)
