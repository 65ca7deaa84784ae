"""The reward service: scores finished episodes, each a pure function of its request."""
