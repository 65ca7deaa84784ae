"""What the gateway benchmark runs around: servers, an engine without a model, clients."""
