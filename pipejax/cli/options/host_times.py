"""Options of what an activation takes to the host and back: times of O and L."""

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

import pipejax as pj
from pipejax.cli.options.activations import for_each
from pipejax.cli.options.catalogue import flag
from pipejax.cli.options.declared import Text
from pipejax.cli.options.numbers import parse_list

if TYPE_CHECKING:
    from pipejax.cli.options.microbatches import CostsOf

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
