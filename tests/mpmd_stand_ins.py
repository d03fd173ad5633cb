"""Stand-ins for the names that exported modules import from JaxPP and Shardy.

Fields, checks and the way in which a runtime asks are those of NVIDIA/jaxpp cf9e386
(src/jaxpp/schedules.py) and openxla/shardy a0277a8 (integrations/python/jax/mpmd/pipeline.py).
"""

import dataclasses
import enum
import sys
import types

from pipejax.schedules.cells.ops import Phase


class TaskType(enum.Enum):
    FWD, BWD, BWD_I, BWD_W = range(1, 5)


@dataclasses.dataclass(frozen=True)
class Task:
    stage_id: int
    mubatch_idx: int
    fwd_or_bwd: TaskType
    latency: int

    @classmethod
    def make(cls, stage_id, mubatch_idx, fwd_or_bwd, latency=None):
        return cls(stage_id, mubatch_idx, fwd_or_bwd, latency or 1 + (fwd_or_bwd is TaskType.BWD))


class FusedTask(tuple):
    pass


@dataclasses.dataclass(eq=True, frozen=True)
class BaseSchedule:
    num_stages: int
    is_partial_bwd: bool = dataclasses.field(default=False, init=False)

    def __post_init__(self):
        assert self.num_stages > 0


@dataclasses.dataclass(frozen=True)
class FragmentOrigin:
    computation_name: str
    transpose_count: int = 0


class SplitFragmentType(enum.Enum):
    KEEP_TRANSFERRED, DROP_TRANSFERRED = 1, 2


@dataclasses.dataclass(frozen=True)
class FragmentInfo:
    origins: tuple
    stage_id: int | None = None
    call_counter: int | None = None
    split_type: SplitFragmentType | None = None
    mesh_name: str = ""


@dataclasses.dataclass(frozen=True)
class FragmentMergeRule:
    sources: set
    target: FragmentInfo

    def __post_init__(self):
        assert len(self.sources) >= 2
        assert len({source.mesh_name for source in self.sources}) == 1
        assert self.target.origins


@dataclasses.dataclass(frozen=True)
class FragmentScheduleRule:
    ordered_fragments: list

    def __post_init__(self):
        assert len(self.ordered_fragments) >= 2
        assert len({fragment.mesh_name for fragment in self.ordered_fragments}) == 1


@dataclasses.dataclass(frozen=True)
class PipelineSchedule:
    schedule_merge_rule_builders: list
    required_mpmd_options: dict


def get_scheduling_unit_info(fragment):
    counts = {origin.transpose_count for origin in fragment.origins}
    if fragment.call_counter is None or counts not in ({0}, {1}):
        return None
    return fragment.call_counter, counts.pop()


def executed(text, monkeypatch):
    """Execute an exported module, with these names where it imports them from."""
    here = sys.modules[__name__]
    mpmd = "shardy.integrations.python.jax.mpmd"
    parents = [mpmd[:at] for at, letter in enumerate(mpmd) if letter == "."]
    for name in ("jaxpp", *parents):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    package = types.ModuleType(mpmd)
    package.pipeline = here
    monkeypatch.setitem(sys.modules, mpmd, package)
    for name in ("jaxpp.schedules", "jaxpp.types"):
        monkeypatch.setitem(sys.modules, name, here)
    module = types.ModuleType("exported")
    monkeypatch.setitem(sys.modules, "exported", module)  # dataclasses look there
    exec(compile(text, "exported", "exec"), vars(module))
    return module


LETTERS = dict(zip(TaskType, "FBIW", strict=True))


def make_text(task):
    """A slot as the record of JaxPP's own schedules has it."""
    if task is None:
        return "-"
    if isinstance(task, FusedTask):
        return "+".join(map(make_text, task))
    return f"{task.stage_id}{LETTERS[task.fwd_or_bwd]}{task.mubatch_idx}"


def preprocessed(row):
    """Return the ops that JaxPP runs: no empty slots, and I of stage 0 alone where W comes next."""
    tasks = [list(task) if isinstance(task, FusedTask) else [task] for task in row if task]
    flat = [[make_text(task) for task in slot] for slot in tasks]
    row = [slot for slot in flat if slot]
    result = []
    for slot in row:
        texts = [text for text in slot if not text.startswith("0W")]
        expected = [text.replace("W", "I") for text in slot if text.startswith("0W")]
        before = [*(result[-1] if result else []), *texts]
        assert all(text in before for text in expected), slot  # else JaxPP refuses it
        result += [texts] if texts else []
    return ["+".join(slot) for slot in result]


def fragments(table, *, split):
    """Fragments of a program with the stages of a table, as Shardy would name them."""
    kinds = [SplitFragmentType.KEEP_TRANSFERRED, SplitFragmentType.DROP_TRANSFERRED]
    for stage, worker in enumerate(table.placement[0].tolist()):
        for microbatch in range(table.num_microbatches):
            where = {"stage_id": stage, "call_counter": microbatch, "mesh_name": f"mesh{worker}"}
            origins = [(FragmentOrigin(f"layer{stage}", count),) for count in (0, 1)]
            yield FragmentInfo(origins[0], **where)
            for kind in kinds if split and stage else [None]:
                yield FragmentInfo(origins[1], split_type=kind, **where)


def make_op(fragment):
    phases = {None: Phase.B, SplitFragmentType.KEEP_TRANSFERRED: Phase.I}
    backward = phases.get(fragment.split_type, Phase.W)
    phase = backward if fragment.origins[0].transpose_count else Phase.F
    return phase, fragment.stage_id, fragment.call_counter
