"""The gateway service: OpenAI- and Anthropic-compatible HTTP in front of the token engine."""
