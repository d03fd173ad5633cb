"""`pipejax plan`: the layout of a training job that takes the shortest step."""

import dataclasses
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

import pipejax as pj
from pipejax.base.progress import if_interrupted
from pipejax.cli.options.catalogue import flag
from pipejax.cli.options.line import command_line, config_text
from pipejax.cli.options.memory import MemoryLimit
from pipejax.cli.options.option import options, parse_counts, parse_share
from pipejax.cli.options.scenario import load_with, scenario_options, workload_fields
from pipejax.cli.options.tables import SHARED, LinkOptions, SharedOptions
from pipejax.cli.output import plans
from pipejax.cli.output.files import (
    DRAWING,
    NO_OUTPUT,
    PLAN,
    SWEEPS,
    Output,
    check_modules,
    drawing,
)
from pipejax.cli.output.report import Answer, pick, plain, progress

if TYPE_CHECKING:
    from pipejax.sweep.plan.result import PlannedLayout, PlanResult

CONFIG = ".toml"
MAX_STEP_RATIO = 4.0  # largest drawn step time, relative to the best


@options
class LayoutChoices:
    """Values of the axes that are searched, each a number or several."""

    tensor: str | None = None
    context: str | None = None
    expert: str | None = None
    expert_tensor: str | None = None
    data: str | None = None
    pipeline: str | None = None
    stages_per_worker: str | None = None
    microbatch_size: str | None = None
    recompute: str | None = None
    zero: str | None = None
    edge_units: str | None = None

    def values(self) -> dict[str, tuple[Any, ...]]:
        """Read the values of each axis that is given."""
        values: dict[str, tuple[Any, ...]] = {}
        for name, text in vars(self).items():
            if name == "recompute" and text is not None:
                values[name] = tuple(word.strip() for word in text.split(","))
            elif text is not None:
                values[name] = tuple(parse_counts(text, flag(name), 0))
        return values


@options
def plan(
    *,
    choices: LayoutChoices = LayoutChoices(),
    shared: SharedOptions = SharedOptions(),
    links: LinkOptions = LinkOptions(),
    model: str,
    system: str,
    gpus: int,
    minibatch: int,
    stack: str | None = None,
    launcher: str | None = None,
    schedules: str | None = None,
    sequence: int | None = None,
    memory_limit: str | None = None,
    headroom: str | None = None,
    runners_up: int = 9,
    exhaustive: bool = False,
    out: Annotated[Output, PLAN] = NO_OUTPUT,
    resume: bool = False,
    figure: Annotated[Output, DRAWING] = NO_OUTPUT,
) -> Answer:
    """Find the layout of a training job that takes the shortest step, among all that fit."""
    is_config = out.path is not None and out.path.suffix == CONFIG
    if resume and (out.path is None or out.path.suffix != ".zarr" or out.force):
        raise ValueError("--resume needs --out STORE.zarr, and no --force")
    check_modules("plan needs", SWEEPS, "sweeps")

    def resume_hint() -> str | None:
        if out.path is None or out.path.suffix != ".zarr":
            return None
        return f"{out.path} keeps what was evaluated, go on with --resume"

    with if_interrupted(resume_hint), progress("layouts") as on_progress:
        planned = pj.plan(
            load_with(model, sequence),
            pj.load_system(system),
            gpus=gpus,
            stack=stack,
            launcher=launcher,
            minibatch=minibatch,
            schedules=None if schedules is None else [n.strip() for n in schedules.split(",")],
            choices=choices.values(),
            link=links.links(),
            **workload_fields(shared, SHARED),
            memory_limit=None if memory_limit is None else _read_limit(memory_limit),
            headroom=None if headroom is None else parse_share(headroom, "--headroom"),
            runners_up=runners_up,
            exhaustive=exhaustive,
            front=figure.path is not None,
            out=None if is_config else out.path,
            resume=resume,
            replace=out.force,
            on_progress=on_progress,
        )
    _draw(planned, figure)
    texts = {"model": model, "system": system, "stack": stack}
    texts["launcher"] = planned.request.launcher
    files = {name: text for name, text in texts.items() if text}
    options = scenario_options(planned.best.scenario.replace(files=files))
    if is_config:
        out.save_text(config_text(options))
        options = {"config": out.path}
    out.is_saved = True
    from pipejax.costs.model.launchers import machine_launches

    best, request = planned.best, planned.request
    launches = machine_launches(best.workload, best.table, request.system, request.stack, launcher)
    stages = plans.layout_json(planned.best.workload, planned.best.table, launcher)
    result = _result(planned, stages) | {"launch": plans.launch_json(launches)}
    show_command = command_line("show", options | {"out": "plan.html"})
    next_commands = command_line("evaluate", options), show_command
    details = {"launcher options": [*plans.launch_lines(launches)]} | plans.plan_details(planned)
    launcher_lines = plans.launch_lines(launches if launcher is not None else (), short=True)
    view = chain(plans.plan_view(planned), map(plain, stages.get("notes", ())), launcher_lines)
    return Answer(result, view, next=next_commands, details=details)


def _read_limit(text: str) -> float:
    """Read the memory that tensors may take [B]."""
    limit = MemoryLimit.read(text)
    if not limit.in_bytes or len(limit.values) > 1:
        raise ValueError(f"--memory-limit of a plan is one number of bytes, as 80GB, got {text!r}")
    return limit.values[0]


def _result(planned: "PlanResult", stages: dict[str, Any]) -> dict[str, Any]:
    """Return the object of `--json`; `stages` are the layers of the best layout, with notes."""
    return {
        "model": planned.request.model.name,
        "system": planned.request.system.name,
        **pick(planned.request, "gpus minibatch launcher memory_limit headroom"),
        "room": planned.request.usable_memory,
        "best": _as_json(planned.best) | stages,
        "runners_up": [_as_json(entry) for entry in planned.runners_up],
        "outside": [_as_json(entry) for entry in planned.outside],
        "under_launchers": [entry._asdict() for entry in planned.under_launchers],
        "reversals": [entry._asdict() for entry in planned.break_even_factors],
        **pick(planned.request, "memory_factors"),
        **pick(planned, "tied enumerated fitting evaluated programs seconds"),
    }


def _as_json(entry: "PlannedLayout") -> dict[str, Any]:
    """Return a layout with the evidence of its regime, for `--json`."""
    names = [field.name for field in dataclasses.fields(entry) if field.name != "scenario"]
    evidence = plans.evidence_json(entry.evidence, entry.step_time)
    return pick(entry, " ".join(names)) | {"evidence": evidence}


def _draw(planned: "PlanResult", figure: Output) -> None:
    """Draw step time against memory of layouts that were evaluated, if a picture is asked for."""
    if planned.front is None:
        return
    from pipejax.plots.fronts import Shown, draw_results  # matplotlib is an extra

    columns, request = planned.columns(), planned.request
    memory = Shown("memory of the fullest accelerator [GB]", columns["memory_bytes"] / 1e9)
    sides = [memory, Shown("step time [s]", columns["step_time"])]
    # NaN, a layout that was not evaluated, is not near the best
    is_near = columns["step_time"] <= MAX_STEP_RATIO * planned.best.step_time
    groups = {
        name: is_near & ~planned.apart & (columns["schedule"] == name) for name in request.schedules
    } | {"ranked apart": is_near & planned.apart}
    groups = {name: members for name, members in groups.items() if members.any()}
    front = np.flatnonzero(planned.front & is_near)
    front = front[np.argsort(columns["memory_bytes"][front])]
    names = [plans.layout_text(planned.layouts.described(request, row)) for row in front.tolist()]
    with drawing(figure, columns=2, height=3.2) as (_, axes):
        draw_results(axes, sides, groups, front, np.array([planned.place]), ("front", names))
