"""The local cluster: embedded NATS and Redis, and every service as a supervised process."""
