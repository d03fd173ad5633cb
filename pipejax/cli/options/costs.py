"""Options of costs: times of ops and messages, a file of costs, or a model on a system."""

import dataclasses
from functools import cached_property
from typing import Any

from pipejax.cli.options.option import options
from pipejax.cli.options.scenario import CostFields, parse_costs
from pipejax.cli.options.values import CountIfGiven, Text
from pipejax.costs.model.workload_fields import WORKLOAD_FIELDS


def _workload_options(name: str, *, in_plan: bool) -> type:
    """Make a record of the fields of a workload, or of those that all layouts of a plan share."""
    kinds = {"whole": CountIfGiven, "flag": bool}
    fields = {n: f for n, f in WORKLOAD_FIELDS.items() if f.head and (f.in_plan or not in_plan)}
    entries = "".join(f"  {n}: {f.detail}\n" for n, f in fields.items() if f.detail)
    defaults: dict[str, Any] = {n: False if f.kind == "flag" else None for n, f in fields.items()}
    annotations = {n: kinds.get(f.kind, Text) for n, f in fields.items()}
    return options(
        type(
            name,
            (),
            {
                "__doc__": f"Fields of a workload.\n\nAttributes:\n{entries}",
                "__annotations__": annotations,
                **defaults,
            },
        )
    )


SharedOptions: Any = _workload_options("SharedOptions", in_plan=True)
WorkloadOptions: Any = _workload_options("WorkloadOptions", in_plan=False)
SHARED = tuple(field.name for field in dataclasses.fields(SharedOptions))


@options
class CostOptions(WorkloadOptions):  # type: ignore[misc]  # made of the fields of a workload
    """Options of the costs of ops and messages.

    Attributes:
      stage_times: or F=1ms,I=1ms,W=1ms where the backward is split; pair=2ms is what a fused pair
        takes as a whole.
      worker_times: its stages share it evenly.
      offload: a number or one for each stage; with --model also system, as long as its host link
        takes. Where a schedule is searched, it lets activations go there. --planned-offload is what
        an order is made for, and changes no time.
      load: a number or one for each stage; as O if not given.
      minibatch: with --model; plan counts that of the whole job.
      stack: which kernels it has, and what its exchanges run beside where options do not say it.
      launcher: its defaults hold where options do not say otherwise, and what it lacks is named;
        where several schedules are given, those it lacks are left out.
      lengths: a line for each, several numbers where sequences are packed, or JSON; times are
        those of the mean length, or follow from the model.
      microbatch_order: that tune microbatches wrote.
      stragglers: factors on all that these workers execute.
      scale: what would be if; places are stages, boundaries and workers.
      measured_stages: of --stage-times or --costs, where the table has others: they are merged, or
        divided evenly.
      pair_factor: 0 is perfect overlap, 1 none; it has nothing to do with pairs of workers.
      recompute_again: where split backwards free what R brought back.
      workers_per_node: or several, as 4,8, of a node and a rack of nodes; --comm, --latency and
        --transmit then take a time for each level, as 1ms,5ms.
      worker_places: numbered node by node, as 0,4,1,5, or a file that tune places wrote.
    """

    stage_times: Text = None
    worker_times: Text = None
    model: Text = None
    system: Text = None
    minibatch: CountIfGiven = None
    stack: Text = None
    launcher: Text = None
    sequence: CountIfGiven = None
    weight_share: float | None = None
    comm: Text = None
    latency: Text = None
    transmit: Text = None
    costs: Text = None
    offload: Text = None
    load: Text = None
    lengths: Text = None
    microbatch_scale: Text = None
    microbatch_order: Text = None
    stragglers: Text = None
    scale: Text = None
    measured_stages: CountIfGiven = None
    pair_factor: Text = None
    recompute_again: bool = False
    workers_per_node: Text = None
    worker_places: Text = None

    @cached_property
    def cost_fields(self) -> CostFields:
        """Read costs and edits of the costs."""
        return parse_costs(self)
