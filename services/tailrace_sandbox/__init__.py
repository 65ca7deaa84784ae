"""The sandbox service: runs untrusted tool code in confined processes."""
