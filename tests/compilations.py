"""Listen to what JAX does."""

from jax import monitoring


def jax_events(run):
    """Record what JAX traces, lowers and compiles during a call."""
    events = []

    def listen(event, *_, **__):
        events.append(event)

    monitoring.register_event_duration_secs_listener(listen)
    try:
        run()
    finally:
        monitoring.unregister_event_duration_listener(listen)
    return events


def compilations(run):
    return sum("backend_compile" in event for event in jax_events(run))
