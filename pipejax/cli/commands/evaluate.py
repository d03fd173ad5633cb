"""`pipejax evaluate`: one schedule, one set of costs."""

from collections.abc import Iterable
from typing import Annotated, Any

import numpy as np
from rich.table import Table

import pipejax as pj
from pipejax.cli.options.activations import ActivationOptions, HeldMemory
from pipejax.cli.options.declared import JsonFlag
from pipejax.cli.options.pricing import Pricing, required
from pipejax.cli.options.timing import TimingSettings
from pipejax.cli.output.certificates import certify
from pipejax.cli.output.files import CERTIFICATE, NO_OUTPUT, Output
from pipejax.cli.output.numbers import gigabytes, percent, print_json, seconds
from pipejax.cli.output.report import heading, pick, print_all, print_written
from pipejax.cli.output.step import memory_json, step_facts, step_json, step_parts
from pipejax.cli.output.tables import facts, grid
from pipejax.schedules.table.links import format_pairs
from pipejax.schedules.table.pair_models import format_pair_links

UNITS = {"activations": "activations", "bytes": "activation memory"}


def evaluate(
    table: pj.ScheduleTable,
    pricing: Pricing | None,
    links: pj.Links,
    activations: ActivationOptions,
    timing: TimingSettings,
    certificate: Annotated[Output, CERTIFICATE] = NO_OUTPUT,
    json: JsonFlag = False,
) -> None:
    """Evaluate one schedule: step time, bubbles, memory, critical path.

    Options:
      certificate: for `pipejax verify`.

    Example:
      pipejax evaluate -s 1f1b -P 4 -M 8 --worker-times F=10ms,B=20ms --comm 1ms
    """
    priced = required(pricing)
    costs = priced.of(table)
    evaluation = pj.evaluate(table, costs, link=links)
    _check_pairs(evaluation)
    held = activations.of(table, priced.workload, priced.microbatches).held(evaluation)
    result = summary(evaluation, priced, held)
    beside = timing.of(evaluation)
    if certificate.path is not None:
        certify(pj.certificate(evaluation, memory=held.memory), certificate)
        result |= certificate.as_json()
    if json:
        print_json(result | beside.json)
        return certificate.end(json=True)
    path = sorted(result["critical_path"].items(), key=lambda item: -item[1])
    idle = percent(result["span_bubble_ratio"])
    totals = [
        ("makespan", f"[bold]{seconds(result['makespan'])}[/]"),
        ("bubble ratio", percent(result["bubble_ratio"]) + "  idle / all"),
        ("bubble overhead", percent(result["bubble_overhead"]) + "  lost / ideal"),
        ("largest span", f"{seconds(result['max_span'])}, of which idle {idle}"),
        ("critical path", ", ".join(f"{name} {100 * share:.3g} %" for name, share in path)),
    ]
    if priced.workload is not None:
        totals += step_facts(result)
    elif "tokens_per_second" in result:
        totals.append(("tokens", f"{result['tokens_per_second']:.4g} per second"))
    print_all(
        heading(evaluation, f"{_link(evaluation)} links"),
        facts(totals),
        _workers(evaluation, result, priced, held),
    )
    if priced.workload is not None:
        print_all(step_parts(result))
    print_all(*beside.tables)
    print_written("wrote the certificate to", certificate.written)
    certificate.end(json=False)


def _check_pairs(evaluation: "pj.Evaluation") -> None:
    """Refuse the link model of two workers that send each other nothing."""
    sent = evaluation.program.messages
    known = set(zip(sent.sender.tolist(), sent.receiver.tolist(), strict=True))
    for (one, other), model in evaluation.links.named_pairs:
        if not {(one, other), (other, one)} & known:
            raise ValueError(
                f"--pair-links {one}-{other}={model} has no effect: no message goes between "
                f"workers {one} and {other} in {evaluation.schedule}"
            )


def summary(evaluation: "pj.Evaluation", pricing: Pricing, held: HeldMemory) -> dict[str, Any]:
    """Collect what `--json` prints.

    Args:
      evaluation: the run.
      pricing: what it was priced with.
      held: its memory.

    Returns:
      Results by name; times in seconds.
    """
    links = evaluation.links
    result = pick(evaluation, "schedule workers stages microbatches") | {"link": links.model}
    if links.meets:
        result["queues"] = links.queues
    if links.posting != "early":
        result["posting"] = links.posting
    if links.shared_links:
        result["shared_links"] = format_pairs(links.shared_links)
    if links.pair_links:
        result["pair_links"] = format_pair_links(links.named_pairs)
    if links.eager_below:
        eager = evaluation.program.messages.eager
        result |= {"eager_below": links.eager_below, "eager_messages": int(eager.sum())}
    result |= pick(
        evaluation,
        "makespan bubble_ratio bubble_overhead max_span span_bubble_ratio busy peak_in_flight "
        "bound_by",
    )
    result["critical_path"] = dict(evaluation.path_share)
    if pricing.microbatches.lengths is not None:
        result["tokens_per_second"] = pricing.microbatches.tokens / (evaluation.makespan or np.inf)
    if pricing.workload is not None and pricing.system is not None:
        result |= step_json(evaluation, pricing.workload, pricing.system)
        result |= memory_json(evaluation.table, pricing.workload, pricing.system, held)
    return result | {"activation_memory": held.as_json()}


def _link(evaluation: "pj.Evaluation") -> str:
    links = evaluation.links
    notes = [format_pair_links(links.named_pairs)] * bool(links.pair_links)
    notes += [f"one queue per {links.queues}"] * links.meets
    if links.posting == "program":
        put_in = ": SEND and RECV stand producer by producer"
        notes.append(f"posted by program{put_in * (not evaluation.table.has_communication)}")
    if links.eager_below:
        eager = evaluation.program.messages.eager
        of_all = f"{eager.sum()} of {len(eager)} messages"
        notes.append(f"{of_all} below {seconds(links.eager_below)} are buffered")
    if links.shared_links:
        notes.append(f"shared: {format_pairs(links.shared_links)}")
    return links.model + f" ({'; '.join(notes)})" * bool(notes)


def _workers(
    evaluation: "pj.Evaluation", result: dict[str, Any], pricing: Pricing, held: HeldMemory
) -> Table:
    memory, sizes = held.memory, held.stages
    peaks = zip(memory.peak, memory.peak_at, strict=True)
    columns: list[tuple[str, Iterable[object]]] = [
        ("worker", range(evaluation.workers)),
        ("stages", [_stages_of(evaluation, worker) for worker in range(evaluation.workers)]),
        ("busy", map(seconds, result["busy"])),
        ("idle", (percent(1 - busy / (evaluation.makespan or 1)) for busy in result["busy"])),
        ("peak in flight", result["peak_in_flight"]),
        (
            f"peak {UNITS[sizes.unit]}",
            (f"{sizes.text(peak)} at {seconds(at)}" for peak, at in peaks),
        ),
    ]
    if "memory_bytes" in result and pricing.system is not None:
        room = float(pricing.system.memory_available)
        needs = (
            gigabytes(need) + "  [red]too much[/]" * (need > room)
            for need in result["memory_bytes"].tolist()
        )
        columns.append((f"memory (of {gigabytes(room)})", needs))
    return grid(columns)


def _stages_of(evaluation: "pj.Evaluation", worker: int) -> str:
    return " ".join(map(str, np.argwhere(evaluation.table.placement == worker)[:, 1]))
