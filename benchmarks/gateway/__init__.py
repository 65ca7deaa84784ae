"""World of the gateway benchmark: servers, an engine without a model, clients."""
