"""The sandbox service: runs tool code that nobody vouches for, where it can do no harm."""
