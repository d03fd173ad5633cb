"""`pipejax evaluate`: one schedule, one set of costs."""

from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.markup import escape
from rich.table import Table

from pipejax.cli.options.activations import ActivationOptions, HeldMemory
from pipejax.cli.options.declared import JsonFlag
from pipejax.cli.options.groups import Pricing, required
from pipejax.cli.output.numbers import console, gigabytes, percent, print_json, seconds
from pipejax.cli.output.op_values import OpValue, op_values, values_by_phase
from pipejax.schedules.table.links import Links
from pipejax.schedules.table.table import ScheduleTable

if TYPE_CHECKING:
    from pipejax.analysis.evaluate import Evaluation
    from pipejax.costs.costs import Costs


UNITS = {"activations": "activations", "bytes": "activation memory"}


def evaluate(
    table: ScheduleTable,
    pricing: Pricing | None,
    links: Links,
    activations: ActivationOptions,
    slack: Annotated[
        bool, typer.Option("--slack", help="Show how much longer ops could take at no cost.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Evaluate one schedule: step time, bubbles, memory, critical path."""
    from pipejax.analysis.evaluate import evaluate as run

    priced = required(pricing)
    costs = priced.of(table)
    evaluation = run(table, costs, link=links)
    held = activations.of(table, priced.workload).held(evaluation)
    result = summary(evaluation, priced, held)
    spare = _slack(evaluation, costs) if slack else []
    if json:
        if slack:
            result["slack"] = [{"op": v.op, "worker": v.worker, "slack": v.value} for v in spare]
        print_json(result)
        return
    out = console()
    out.print(
        f"[bold]{escape(result['schedule'])}[/], {result['workers']} workers, "
        f"{result['stages']} stages, {result['microbatches']} microbatches, "
        f"{_link(evaluation)} links"
    )
    totals = Table(show_header=False, box=None, padding=(0, 2))
    totals.add_row("makespan", f"[bold]{seconds(result['makespan'])}[/]")
    totals.add_row("bubble ratio", percent(result["bubble_ratio"]) + "  idle / all")
    totals.add_row("bubble overhead", percent(result["bubble_overhead"]) + "  lost / ideal")
    totals.add_row(
        "largest span",
        f"{seconds(result['max_span'])}, of which idle {percent(result['span_bubble_ratio'])}",
    )
    shares = sorted(result["critical_path"].items(), key=lambda item: -item[1])
    path = ", ".join(f"{name} {100 * share:.3g} %" for name, share in shares)
    totals.add_row("critical path", path)
    if "tokens_per_second" in result:
        totals.add_row("tokens", f"{result['tokens_per_second']:.4g} per second")
    out.print(totals)
    out.print(_workers(evaluation, result, priced, held))
    if slack:
        out.print(values_by_phase(spare, "slack", seconds))


def summary(evaluation: "Evaluation", pricing: Pricing, held: HeldMemory) -> dict[str, Any]:
    """Collect what `--json` prints.

    Args:
      evaluation: the run.
      pricing: what it was priced with.
      held: its memory.

    Returns:
      Results by name; times in seconds.
    """
    links = evaluation.links
    result = {
        name: getattr(evaluation, name)
        for name in ("schedule", "workers", "stages", "microbatches")
    }
    result["link"] = links.model
    if links.model == "rendezvous":
        result["queues"] = links.queues
    result |= {
        name: getattr(evaluation, name)
        for name in (
            "makespan",
            "bubble_ratio",
            "bubble_overhead",
            "max_span",
            "span_bubble_ratio",
            "busy",
            "peak_in_flight",
            "bound_by",
        )
    }
    result["critical_path"] = dict(evaluation.path_share)
    if pricing.workload is not None:
        work = pricing.workload
        tokens = work.minibatch * work.data_parallel * work.model.sequence
        result["step_time"] = evaluation.step_time
        result["memory_bytes"] = held.stages.static + held.memory.peak
        result["tokens_per_second"] = tokens / evaluation.step_time
    return result | {"activation_memory": held.as_json()}


def _slack(evaluation: "Evaluation", costs: "Costs") -> list[OpValue]:
    """Slack of every op in seconds; on the critical path 0, up to rounding."""
    from pipejax.analysis.evaluate import lower_and_price
    from pipejax.base import longest_path
    from pipejax.engine.recurrence_host import run_on_host

    run = run_on_host(*lower_and_price(evaluation.table, costs, evaluation.links))
    return op_values(evaluation, longest_path.slack(run.preds, run.duration, run.lag))


def _link(evaluation: "Evaluation") -> str:
    links = evaluation.links
    return links.model + f" (one queue per {links.queues})" * (links.model == "rendezvous")


def _workers(
    evaluation: "Evaluation", result: dict[str, Any], pricing: Pricing, held: HeldMemory
) -> Table:
    memory, sizes = held
    grid = Table("worker", "stages", "busy", "idle", "peak in flight", f"peak {UNITS[sizes.unit]}")
    system = pricing.system
    if "memory_bytes" in result and system is not None:
        grid.add_column(f"memory (of {gigabytes(float(system.memory_capacity))})")
    for worker in range(evaluation.workers):
        stages = np.argwhere(evaluation.table.placement == worker)[:, 1]
        idle = 1 - result["busy"][worker] / (evaluation.makespan or 1)
        row = [
            str(worker),
            " ".join(map(str, stages)),
            seconds(result["busy"][worker]),
            percent(idle),
            str(result["peak_in_flight"][worker]),
            f"{sizes.text(memory.peak[worker])} at {seconds(memory.peak_at[worker])}",
        ]
        if "memory_bytes" in result and system is not None:
            need = float(result["memory_bytes"][worker])
            over = "  [red]too much[/]" if need > float(system.memory_capacity) else ""
            row.append(gigabytes(need) + over)
        grid.add_row(*row)
    return grid
