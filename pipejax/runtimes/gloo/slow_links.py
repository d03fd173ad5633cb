"""Links that are as slow as they are said to be, over gloo.

gloo says when both ends of a message are posted: then a small one has arrived. From then on the
link between two ranks carries it for the seconds that are given, one message of both directions at
a time, and only then is it there for those who wait. Nothing else is made up: what is posted when,
and in which order, is left to the runtime.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules

Seconds = Sequence[Sequence[float]]  # (2, boundaries): activations forth, gradients back


class SlowMessage:
    """A message on a slow link: what the runtime waits for."""

    def __init__(self, work: dist.Work, seconds: float) -> None:
        """Begin as posted at this end."""
        self.work, self.seconds = work, seconds
        self._there = 0.0
        self._begun = threading.Event()

    def begin(self, free: float) -> float:
        """Travel from now on, or from when the link is free; return when it is free again."""
        self._there = max(time.perf_counter(), free) + self.seconds
        self._begun.set()
        return self._there

    def wait(self) -> None:
        """Wait until the message is there."""
        self._begun.wait()
        time.sleep(max(0.0, self._there - time.perf_counter()))


class SlowLink:
    """The link to another rank; each end keeps the time that both agree on but for gloo's own."""

    def __init__(self) -> None:
        """Begin free, with a thread for each direction that waits for messages to be posted."""
        self._free = 0.0
        self._lock = threading.Lock()
        self._posted: dict[bool, queue.SimpleQueue[SlowMessage]] = {}
        for sends in (True, False):
            self._posted[sends] = queue.SimpleQueue()
            threading.Thread(target=self._carry, args=(self._posted[sends],), daemon=True).start()

    def post(self, work: dist.Work, sends: bool, seconds: float) -> SlowMessage:
        """Post a message at this end."""
        message = SlowMessage(work, seconds)
        self._posted[sends].put(message)
        return message

    def _carry(self, posted: "queue.SimpleQueue[SlowMessage]") -> None:
        while True:
            message = posted.get()
            message.work.wait()  # both ends are posted
            with self._lock:
                self._free = message.begin(self._free)


class SlowLinks:
    """All links of a rank; they carry nothing as long as no times are given."""

    def __init__(self) -> None:
        """Begin without links: the first message to a rank makes the one to it."""
        self._links: dict[int, SlowLink] = {}

    def watch(self, stage: PipelineStage, seconds: Seconds) -> None:
        """Note on every message of a stage how long it is to travel."""
        own = stage.stage_index
        for name, direction, boundary in (
            ("get_fwd_recv_ops", 0, own - 1),
            ("get_fwd_send_ops", 0, own),
            ("get_bwd_recv_ops", 1, own),
            ("get_bwd_send_ops", 1, own - 1),
        ):
            if 0 <= boundary < len(seconds[direction]):
                taken = seconds[direction][boundary]
                setattr(stage, name, _noted(getattr(stage, name), taken))

    def take_over(self) -> None:
        """Have the runtime post all messages here."""
        schedules._batch_p2p = self._post

    def _post(self, messages: list[dist.P2POp], desc: str | None = None) -> list[SlowMessage]:
        found = []
        for each in messages:
            sends = each.op is dist.isend
            peer = {"group_dst" if sends else "group_src": each.group_peer}
            work = each.op(each.tensor, group=each.group, tag=each.tag, **peer)
            if each.peer not in self._links:
                self._links[each.peer] = SlowLink()
            found.append(self._links[each.peer].post(work, sends, each.seconds))
        return found


def _noted(
    messages_of: Callable[[int], list[dist.P2POp]], seconds: float
) -> Callable[[int], list[dist.P2POp]]:
    """Have a stage's messages know their time."""

    def noted(microbatch: int) -> list[dist.P2POp]:
        found = messages_of(microbatch)
        for message in found:
            message.seconds = seconds
        return found

    return noted
