"""The service's side of the sandbox: processes, pipes, and the tools that models call.

Nothing here runs or imports tool code; what comes from a call is bytes until it was checked.
"""
