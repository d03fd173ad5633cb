"""Paths through a run's ops: the longest paths, and the waits of messages in queues."""
