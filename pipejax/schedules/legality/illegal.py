"""What is wrong with a schedule, and where."""


class IllegalSchedule(ValueError):
    """A schedule that cannot run: a reason, and its place, `worker` and `slot`, or None."""

    def __init__(self, reason: str, worker: int | None = None, slot: int | None = None) -> None:
        """Keep the place."""
        super().__init__(reason)
        self.worker = worker
        self.slot = slot
