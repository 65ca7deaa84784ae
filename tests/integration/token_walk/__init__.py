"""Way of one token from the engine to the loss."""
