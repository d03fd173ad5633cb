"""Options of the machine that workers sit on: places of a node, and who sits where."""

from pathlib import Path
from typing import NamedTuple

from pipejax.base.data_files import load_json
from pipejax.cli.options.catalogue import flag
from pipejax.cli.options.declared import FileIfGiven, Text
from pipejax.cli.options.numbers import is_plain, parse_list


class Machine(NamedTuple):
    """What options say of a machine.

    Attributes:
      sizes: places of a node, of a rack of nodes, and so on; none where all links are alike, or a
        system has them.
      places: of each worker; in order if none.
    """

    sizes: tuple[int, ...] = ()
    places: tuple[int, ...] = ()

    @classmethod
    def read(
        cls, per_node: Text, worker_places: Text, costs: FileIfGiven, model: Text
    ) -> "Machine":
        """Read the options.

        Raises:
          ValueError: if one is wrong, or does not go with what says times.
        """
        if per_node is not None and (costs is not None or model is not None):
            other = "--costs: its file" if costs is not None else "--model: the system"
            raise ValueError(f"--workers-per-node does not go with {other} says what a node is")
        if costs is not None:
            from pipejax.costs.measured import read_sizes

            sizes = read_sizes(costs)
        else:
            sizes = () if per_node is None else _read_sizes(per_node)
        if worker_places is None:
            return cls(sizes)
        if model is None and not sizes:
            raise ValueError(
                "--worker-places needs a machine of nodes: give --workers-per-node, --costs with a "
                "file that says so, or --model"
            )
        return cls(sizes, _read_places(worker_places))

    def times(self, given: dict[str, Text]) -> list[dict[str, float]]:
        """Read times of messages by level [s]: one of each, or one for every level.

        Raises:
          ValueError: if there are as many as for no level, or nothing that differs.
        """
        levels = len(self.sizes) + 1
        texts = {name: text for name, text in given.items() if text is not None}
        found = {name: parse_list(text, flag(name), seconds=True) for name, text in texts.items()}
        for name, each in found.items():
            if len(each) not in (1, levels):
                wanted = (
                    f"one time, or {levels}: inside a node, between nodes, and so on"
                    if self.sizes
                    else "one time, or with --workers-per-node one for each level of the machine"
                )
                raise ValueError(f"{flag(name)} must be {wanted}, got {texts[name]!r}")
        return [
            {name: each[level % len(each)] for name, each in found.items()}
            for level in range(levels)
        ]


def _read_sizes(text: str) -> tuple[int, ...]:
    from pipejax.costs.topology import check_sizes

    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() and is_plain(word) for word in words):
        raise ValueError(f"--workers-per-node must be a number, or several as 4,8, got {text!r}")
    return check_sizes([int(word) for word in words], "--workers-per-node")


def _read_places(text: str) -> tuple[int, ...]:
    """Read places such as 0,4,1,5, or the file that `pipejax place` wrote."""
    from pipejax.costs.topology import check_places, parse_places

    if not text.endswith(".json"):
        return parse_places(text, "--worker-places")
    return check_places(load_json(Path(text)).get("places", ()), f"{text}: places")
