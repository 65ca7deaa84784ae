"""Published environments, run unchanged: gymnasium's, verifiers' and those behind an OpenEnv server."""
