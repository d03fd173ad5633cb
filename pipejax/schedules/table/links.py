"""Links: how messages between workers, and offloads to the host and back, are carried.

One record serves everything that runs a table: link model, scope of the communication queues, host
links. docs/semantics.md defines the link models.
"""

import dataclasses
from collections.abc import Sequence

from pipejax.base.checks import known_as, whole_number

LINKS = ("delay", "queued", "blocking", "rendezvous")
QUEUES = ("worker", "pair", "direction")

Groups = Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True)
class Links:
    """How messages and offloads travel.

    Wherever a function takes `link`, the name of a link model stands for this record with that
    model and the defaults of all else.

    Args:
      model: link model: "delay", "queued", "blocking" or "rendezvous" (docs/semantics.md).
      queues: scope of the communication queues under rendezvous: "worker", "pair" or "direction".
      host_links: groups of workers that share a host link, as ((0, 1), (2, 3)); a worker in none
        has its own.

    Raises:
      ValueError: if the model or the scope is unknown, or host_links has an empty group or names
        a worker twice.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("gpipe", num_workers=2, num_microbatches=3)
      >>> costs = pj.Costs(forward=1.0, backward=2.0, transmit=1.5)
      >>> pj.evaluate(table, costs, link=pj.Links("rendezvous", queues="pair")).makespan
      16.0
    """

    model: str = "delay"
    queues: str = "worker"
    host_links: Groups = ()

    def __post_init__(self) -> None:
        """Check all that can be checked without a table."""
        for name, known, kind in (
            ("model", LINKS, "link model"),
            ("queues", QUEUES, "queue scope"),
        ):
            object.__setattr__(self, name, known_as(getattr(self, name), known, kind))
        object.__setattr__(self, "host_links", _checked_groups(self.host_links))

    @classmethod
    def of(cls, link: "str | Links") -> "Links":
        """Return the record that a name or a record stands for."""
        return link if isinstance(link, Links) else cls(link)


def _checked_groups(groups: Groups) -> tuple[tuple[int, ...], ...]:
    named: set[int] = set()
    found = []
    for group in groups:
        if len(group) == 0:
            raise ValueError("host_links has an empty group: a group is the workers of one link")
        found.append(tuple(whole_number(w, "host_links: a worker", least=0) for w in group))
        for worker in found[-1]:
            if worker in named:
                raise ValueError(
                    f"host_links names worker {worker} twice: each worker has one host link"
                )
            named.add(worker)
    return tuple(found)


def parse_groups(text: str, where: str) -> tuple[tuple[int, ...], ...]:
    """Read groups of workers, as 0+1,2+3."""
    groups = [[worker.strip() for worker in group.split("+")] for group in text.split(",")]
    if not all(worker.isdecimal() and worker.isascii() for group in groups for worker in group):
        raise ValueError(f"{where}: expected workers in groups, as 0+1,2+3, got {text!r}")
    return tuple(tuple(map(int, group)) for group in groups)
