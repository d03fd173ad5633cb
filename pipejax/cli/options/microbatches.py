"""Options of microbatches that differ: their lengths, factors on their times, and their order."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import pipejax as pj
from pipejax.base.array_types import Float, NumpyArray
from pipejax.base.checks import MismatchError
from pipejax.base.data_files import load_json
from pipejax.cli.options.declared import FileIfGiven, Text
from pipejax.cli.options.numbers import is_plain, parse_list

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
            None if lengths is None else pj.read_lengths(lengths),
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
        from pipejax.costs.microbatches import Packed

        replicas = 1 if self.workload is None else self.workload.data_parallel
        return replicas * float(Packed.of(self.lengths or []).tokens.sum())

    def bytes_of(self, table: pj.ScheduleTable) -> dict[str, NumpyArray]:
        """Activations that a model sizes (stages, microbatches): sizes and checkpoints in bytes.

        And weight_share, the share of a size that W needs.
        """
        assert self.workload is not None
        from pipejax.costs.microbatches import length_bytes
        from pipejax.costs.stage_bytes import stage_bytes

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
            from pipejax.costs.microbatches import Packed, check_order, in_order

            count = table.num_microbatches
            if self.lengths is not None and workload is not None and system is not None:
                _check_count("--lengths", self.lengths, count)
                costs = pj.length_costs(workload, system, table, self.lengths)
            elif self.lengths is not None:
                _check_count("--lengths", self.lengths, count)
                tokens = Packed.of(self.lengths).tokens
                costs = pj.scale_microbatches(costs_of(table), tokens / tokens.mean())
            elif self.scale is not None:
                _check_count("--microbatch-scale", self.scale, count)
                costs = pj.scale_microbatches(costs_of(table), self.scale)
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
    """Read an order such as 2,0,1, or the file that `pipejax arrange` wrote."""
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
