"""Count what XLA compiles."""

from jax._src import monitoring


def compilations(run):
    """Count what XLA compiles during a call."""
    events = []

    def listen(event, *_, **__):
        events.append(event)

    monitoring.register_event_duration_secs_listener(listen)
    try:
        run()
    finally:
        monitoring.unregister_event_duration_listener(listen)
    return sum("backend_compile" in event for event in events)
