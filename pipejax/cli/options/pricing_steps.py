"""Options that change what a table costs: machines of nodes, times of the host, microbatches."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import pipejax as pj
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import MismatchError
from pipejax.base.data_files import load_json
from pipejax.cli.options.catalogue import flag
from pipejax.cli.options.values import FileIfGiven, Text, for_each, is_plain, parse_list


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
            from pipejax.costs.measured.costs_file import read_sizes

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
    """Read places such as 0,4,1,5, or the file that `pipejax tune places` wrote."""
    from pipejax.costs.topology import check_places, parse_places

    if not text.endswith(".json"):
        return parse_places(text, "--worker-places")
    return check_places(load_json(Path(text)).get("places", ()), f"{text}: places")


BY_LINK = "system"  # as --offload: what the host link of the system takes


class HostTimes(NamedTuple):
    """Times of O and L, as options give them."""

    offload: Text = None
    load: Text = None

    @property
    def seconds(self) -> dict[str, list[float]]:
        """Times by name, of those that are given: one for all stages, or one for each.

        Raises:
          ValueError: if one is no time, or what is never offloaded is loaded.
        """
        if self.load is not None and self.offload is None:
            raise ValueError(f"--load {self.load} needs --offload")
        given = self._asdict().items() if self.offload != BY_LINK else ()
        texts = {name: text for name, text in given if text is not None}
        return {name: parse_list(text, flag(name), seconds=True) for name, text in texts.items()}

    def costs_of(self, costs_of: "CostsOf", *, is_plain: bool) -> "CostsOf":
        """Return what gives the costs of a table with these times in them.

        Args:
          costs_of: gives the costs besides.
          is_plain: whether no model gives those.
        """
        host = self.seconds
        if self.offload is None:
            return costs_of

        def with_host(table: pj.ScheduleTable) -> "pj.Costs":
            costs = costs_of(table)
            if self.offload == BY_LINK and (is_plain or costs.offload is None):
                raise ValueError("--offload system needs --model, and a --system with a host_link")
            if host and is_plain and takes_host_time(costs):
                raise ValueError(
                    f"--offload {self.offload} and the times of O or L given besides: choose one"
                )
            per_stage = {
                name: for_each(times, table.num_stages, flag(name), "stages")
                for name, times in host.items()
            }
            return dataclasses.replace(costs, **per_stage)

        return with_host


def takes_host_time(costs: "pj.Costs") -> bool:
    """Whether the costs say what an offload or a load takes."""
    return any(
        np.any(np.asarray(time) > 0) for time in (costs.offload, costs.load) if time is not None
    )


CostsOf = Callable[[pj.ScheduleTable], "pj.Costs"]


class Microbatches(NamedTuple):
    """What options say of microbatches.

    Attributes:
      lengths: of each its tokens or sequences, from the file of `--lengths`.
      scale: factors on the times of each.
      order: which of them is microbatch k of the table.
      workload: whose activations they are, where a model prices them.
    """

    lengths: list[Any] | None = None
    scale: Float[NumpyArray, " microbatches"] | None = None
    order: list[int] | None = None
    workload: "pj.Workload | None" = None

    @classmethod
    def read(cls, lengths: FileIfGiven, scale: Text, order: Text) -> "Microbatches":
        """Read the options, before there is a table."""
        if lengths is not None and scale is not None:
            raise ValueError(
                "--lengths and --microbatch-scale both say how long they are: give one"
            )
        return cls(
            None if lengths is None else pj.files.read_lengths(lengths),
            None if scale is None else np.array(parse_list(scale, "--microbatch-scale")),
            None if order is None else _read_order(order),
        )

    @property
    def differ(self) -> bool:
        """Whether any option is given."""
        return any(option is not None for option in self[:3])

    @property
    def tokens(self) -> float:
        """Tokens of a step, of all replicas of the pipeline."""
        from pipejax.costs.stage.microbatches import Packed

        replicas = 1 if self.workload is None else self.workload.data_parallel
        return replicas * float(Packed.of(self.lengths or []).tokens.sum())

    def bytes_of(self, table: pj.ScheduleTable) -> dict[str, NumpyArray]:
        """Activations that a model sizes (stages, microbatches): sizes and checkpoints in bytes.

        And weight_share, the share of a size that W needs.
        """
        assert self.workload is not None
        from pipejax.costs.stage.microbatches import length_bytes
        from pipejax.costs.stage.stage_work import stage_bytes

        if self.lengths is not None:
            found = length_bytes(self.workload, table, self.lengths)
        else:
            memory = stage_bytes(self.workload, table)
            parts = memory.activations, memory.weight_share, memory.checkpoint
            scale = np.ones(table.num_microbatches) if self.scale is None else self.scale
            whole, share, left = (np.asarray(part)[:, None] for part in parts)
            found = {
                "sizes": whole * scale,
                "weight_share": np.repeat(share, len(scale), axis=1),
                "checkpoints": left * scale,
            }
        return {n: each if self.order is None else each[:, self.order] for n, each in found.items()}

    def costs_of(
        self, costs_of: CostsOf, workload: "pj.Workload | None", system: "pj.System | None"
    ) -> CostsOf:
        """Return what gives the costs of a table whose microbatches differ."""

        def differing(table: pj.ScheduleTable) -> "pj.Costs":
            from pipejax.costs.stage.microbatches import Packed, check_order, in_order

            count = table.num_microbatches
            if self.lengths is not None and workload is not None and system is not None:
                _check_count("--lengths", self.lengths, count)
                costs = pj.stage_costs(workload, system, table, lengths=self.lengths)
            elif self.lengths is not None:
                _check_count("--lengths", self.lengths, count)
                tokens = Packed.of(self.lengths).tokens
                costs = pj.costing.scaled_costs(
                    costs_of(table), table, microbatches=tokens / tokens.mean()
                )
            elif self.scale is not None:
                _check_count("--microbatch-scale", self.scale, count)
                costs = pj.costing.scaled_costs(costs_of(table), table, microbatches=self.scale)
            else:
                costs = costs_of(table)
            if self.order is None:
                return costs
            costs.check_shapes(table.num_stages, table.num_pipes, count)
            return in_order(costs, check_order(self.order, count, "--microbatch-order"))

        return differing


def _check_count(option: str, given: Sequence[Any] | NumpyArray, count: int) -> None:
    if len(given) != count:
        raise MismatchError(
            f"{option} has {len(given)} entries, the table has {count} microbatches"
        )


def _read_order(text: str) -> list[int]:
    """Read an order such as 2,0,1, or the file that `pipejax tune microbatches` wrote."""
    words = [word.strip() for word in text.split(",")]
    if all(word.isdigit() and is_plain(word) for word in words):
        return [int(word) for word in words]
    if len(words) > 1:
        raise ValueError(
            f"--microbatch-order must be numbers of microbatches, as 2,0,1, or a file, got {text!r}"
        )
    from pathlib import Path

    found = load_json(Path(text)).get("order")
    if not isinstance(found, list):
        raise ValueError(f'{text}: "order" must be a list, got {found!r}')
    return found
