"""Published schedules: every builder with its source and its checks."""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from pipejax.base.cached_method import cached_method
from pipejax.base.checks import MAX_COUNT, check_fits, check_types, whole_number, wrong
from pipejax.base.display import ResultDict
from pipejax.schedules.builders.asynchronous import local_sgd, naive, pipedream, pipedream_2bw
from pipejax.schedules.builders.chimera import bitpipe, chimera, chimera_asymmetric, hanayo
from pipejax.schedules.builders.dualpipe import (
    braided_dualpipe,
    braided_dualpipe_v,
    combined_1f1b,
    dualpipe,
    dualpipe_v,
)
from pipejax.schedules.builders.encoders import encoders_1f1b, filled_encoders
from pipejax.schedules.builders.offload import (
    ada_offload,
    interleaved_zb,
    pipe_offload,
    zb_1p,
    zb_2p,
    zb_h1,
    zb_h2,
    zero_bubble,
)
from pipejax.schedules.builders.one_f_one_b import (
    chunked_prefill,
    circular,
    eager_1f1b,
    gpipe,
    interleaved_1f1b,
    looped_bfs,
    one_f_one_b,
    seq_1f1b,
    slimpipe,
    terapipe,
)
from pipejax.schedules.builders.v_shape import (
    v_half,
    v_min,
    vocabulary_1f1b,
    vocabulary_v_half,
    zb_v,
)
from pipejax.schedules.cells.cells import BYTES_PER_CELL
from pipejax.schedules.cells.ops import Cell, Phase
from pipejax.schedules.legality import check_shares, check_slots
from pipejax.schedules.table.table import ScheduleTable

# The registered schedule that a table runs, whatever its name says

OWN_ORDER = "own"  # name of a schedule whose table bears the name of another


def registered(table: ScheduleTable) -> tuple[str, Mapping[str, int]] | None:
    """Find the registered schedule with the rows of a table, and its options; None without one.

    Args:
      table: any schedule, without communication.

    Returns:
      Name and options of its builder. Planned schedules are not tried, because their rows depend
      on times.

    Example:
      >>> import pipejax as pj
      >>> rows = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
      >>> pj.traces.registered(pj.ScheduleTable.from_rows(rows))
      ('1f1b', {})
    """
    check_types(table=(table, ScheduleTable))
    return _find(table, ())


def _find(table: ScheduleTable, ignored: Collection[Phase]) -> tuple[str, Mapping[str, int]] | None:
    """Find the registered schedule with the rows of a table but for some phases."""
    slices, per_worker = table.grammar.slices, table.num_stages // table.num_workers
    size = {"num_workers": table.num_workers, "num_microbatches": table.num_microbatches // slices}
    values = {"stages_per_worker": per_worker, "waves": per_worker // 2, "slices": slices}
    rows = _rows_without_idle(table, ignored)
    for name in sorted(REGISTRY, key=lambda name: name != table.name):  # most names are true
        builder = REGISTRY[name]
        options = {key: value for key, value in values.items() if key in builder.options}
        if builder.planned:
            continue
        try:
            other = builder.function(**size, **options)
        except ValueError:  # it does not exist for these numbers
            continue
        if other.num_stages == table.num_stages and _rows_without_idle(other, ignored) == rows:
            return name, options
    return None


@cached_method
def schedule_name(table: ScheduleTable) -> str:
    """Return the name of the schedule that a table runs; of an unknown order that of the table."""
    # launchers recompute by an option of their own, in the same order
    match, builder = _find(table, (Phase.R,)), REGISTRY.get(table.name)
    if match is not None:
        return match[0]
    # a file can bear any name, and messages in an order of their own change a schedule
    return table.name if builder is None or builder.planned else OWN_ORDER


def _rows_without_idle(table: ScheduleTable, ignored: Collection[Phase]) -> list[list[Cell]]:
    cells = (
        [tuple(op for op in cell if op.phase not in ignored) for cell in row]
        for row in table.rows()
    )
    return [[cell for cell in row if cell] for row in cells]


class Builder(NamedTuple):
    """A schedule that can be built.

    Attributes:
      function: makes the table.
      source: where the schedule was published.
      planned: whether its order follows from times, so that it should be built from those of
        the run where they are known.
      bytes_per_op: that making a table and its program takes, measured and rounded down.
      stages_per_worker: where no option says how many.
      sizes: workers and microbatches where there is one table alone, read from a file.
      legal: numbers of workers P and microbatches M that can be built, in words; of a user's own
        schedule nothing is known.
      content: of a user's own schedule, what tells it from another one of the same name.

    Example:
      >>> REGISTRY["hanayo"].options, REGISTRY["gpipe"].source
      (('waves',), 'Huang et al., GPipe (arXiv:1811.06965)')
    """

    function: Callable[..., ScheduleTable]
    source: str
    planned: bool = False
    bytes_per_op: int = 600
    stages_per_worker: int = 1
    sizes: tuple[int, int] | None = None
    legal: str = ""
    content: str = ""

    @property
    def summary(self) -> str:
        """Return the first line of the builder's docstring."""
        lines = (inspect.getdoc(inspect.unwrap(self.function)) or "").splitlines()
        return lines[0].rstrip(".") if lines else ""

    @property
    def options(self) -> tuple[str, ...]:
        """Return the parameters beyond workers, microbatches and slots."""
        common = {"num_workers", "num_microbatches", "slots"}
        return tuple(name for name in self._parameters if name not in common)

    @property
    def takes(self) -> tuple[str, ...]:
        """Return the options, and slots if the schedule is drawn in slots."""
        return (*self.options, *(["slots"] if "slots" in self._parameters else []))

    @property
    def _parameters(self) -> list[str]:
        parameters = inspect.signature(self.function).parameters.values()
        return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


ANY, EVEN, PAIRED = "any P and M", "P and M even", "M at least 2P"
CONTROLLABLE = "Qi et al., Controllable Memory (arXiv:2405.15362)"
ZERO_BUBBLE = "Qi et al., Zero Bubble (arXiv:2401.10241)"
PLANNED, DRAWN = 900, 250  # bytes per op of plans, and of tables with known starts
BRAIDED = 1500  # bytes per op with all its parts

_PUBLISHED = {
    "gpipe": Builder(gpipe, "Huang et al., GPipe (arXiv:1811.06965)"),
    "1f1b": Builder(one_f_one_b, "Narayanan et al., PipeDream-Flush (arXiv:2006.09503)"),
    "eager-1f1b": Builder(eager_1f1b, "Zhuang et al. (arXiv:2211.05322)"),
    "interleaved-1f1b": Builder(interleaved_1f1b, "Narayanan et al. (arXiv:2104.04473)"),
    "circular": Builder(
        circular,
        "MaxText's circular pipeline (AI-Hypercomputer/maxtext); GPipe is arXiv:1811.06965",
        legal="any P, M a multiple of P",
    ),
    "looped-bfs": Builder(looped_bfs, "Lamy-Poirier (arXiv:2211.05953)"),
    "chimera": Builder(
        chimera, "Li and Hoefler, Chimera (arXiv:2107.06925)", bytes_per_op=PLANNED, legal=EVEN
    ),
    "chimera-asymmetric": Builder(
        chimera_asymmetric, "Barley et al. (arXiv:2605.24006)", bytes_per_op=PLANNED, legal=EVEN
    ),
    "bitpipe": Builder(
        bitpipe, "Wu et al., BitPipe (arXiv:2410.19367)", stages_per_worker=2, legal="P even, any M"
    ),
    "hanayo": Builder(hanayo, "Liu et al., Hanayo (arXiv:2308.15762)", bytes_per_op=PLANNED),
    "dualpipe": Builder(
        dualpipe, "DeepSeek-AI, DualPipe (arXiv:2412.19437)", legal=f"{EVEN}, {PAIRED}"
    ),
    "dualpipe-v": Builder(
        dualpipe_v,
        "DeepSeek-AI, DualPipeV (deepseek-ai/DualPipe; DualPipe is arXiv:2412.19437)",
        stages_per_worker=2,
        legal=f"any P, {PAIRED}",
    ),
    "zb-h1": Builder(zb_h1, ZERO_BUBBLE),
    "zb-h2": Builder(zb_h2, ZERO_BUBBLE),
    "interleaved-zb": Builder(interleaved_zb, f"PyTorch, after {ZERO_BUBBLE}"),
    "zero-bubble": Builder(zero_bubble, ZERO_BUBBLE, True, PLANNED),
    "zb-1p": Builder(zb_1p, ZERO_BUBBLE, True, PLANNED),
    "zb-2p": Builder(zb_2p, ZERO_BUBBLE, True, PLANNED),
    "v-half": Builder(v_half, CONTROLLABLE, True, PLANNED, stages_per_worker=2),
    "v-min": Builder(v_min, CONTROLLABLE, True, PLANNED, stages_per_worker=2),
    "zb-v": Builder(zb_v, ZERO_BUBBLE, True, PLANNED, stages_per_worker=2),
    "pipe-offload": Builder(
        pipe_offload, "Wan et al., PipeOffload (arXiv:2503.01328)", True, PLANNED
    ),
    "ada-offload": Builder(ada_offload, "Li et al., OptPipe (arXiv:2510.05186)", True, PLANNED),
    "naive": Builder(
        naive, "Ilin and Richtarik (arXiv:2606.03498); GPipe's figure 2b", bytes_per_op=DRAWN
    ),
    "pipedream": Builder(
        pipedream, "Harlap et al., PipeDream (arXiv:1806.03377)", bytes_per_op=DRAWN
    ),
    "pipedream-2bw": Builder(
        pipedream_2bw, "Narayanan et al., PipeDream-2BW (arXiv:2006.09503)", bytes_per_op=DRAWN
    ),
    "local-sgd": Builder(local_sgd, "Ilin and Richtarik (arXiv:2606.03498)"),
    "seq-1f1b": Builder(seq_1f1b, "Sun et al., Seq1F1B (arXiv:2406.03488)"),
    "terapipe": Builder(terapipe, "Li et al., TeraPipe (arXiv:2102.07988)"),
    "chunked-prefill": Builder(
        chunked_prefill, "Qin et al., Mooncake (arXiv:2407.00079); sgl-project/sglang"
    ),
    "slimpipe": Builder(slimpipe, "Li et al., SlimPipe (arXiv:2504.14519)", stages_per_worker=2),
}

_EXTENDED = {
    "combined-1f1b": Builder(
        combined_1f1b,
        "NVIDIA, Megatron-LM's combined_1f1b.py; interleaving is arXiv:2104.04473",
        bytes_per_op=BRAIDED,
    ),
    "braided-dualpipe": Builder(
        braided_dualpipe,
        "DeepSeek-AI, DeepSeek-V3, figure 4 (arXiv:2412.19437)",
        bytes_per_op=BRAIDED,
        legal=f"{EVEN}, {PAIRED}",
    ),
    "braided-dualpipe-v": Builder(
        braided_dualpipe_v,
        "DeepSeek-AI, DualPipeV (deepseek-ai/DualPipe; the pair is arXiv:2412.19437, figure 4)",
        bytes_per_op=BRAIDED,
        stages_per_worker=2,
        legal=f"any P, {PAIRED}",
    ),
    "vocabulary-1f1b": Builder(
        vocabulary_1f1b, "Yeung et al., Vocabulary Parallelism (arXiv:2411.05288)"
    ),
    "vocabulary-v-half": Builder(
        vocabulary_v_half,
        "Yeung et al., Vocabulary Parallelism (arXiv:2411.05288)",
        bytes_per_op=PLANNED,
        stages_per_worker=2,
    ),
    "encoders-1f1b": Builder(
        encoders_1f1b,
        "Jang et al., Cornstarch's modality parallelism (arXiv:2503.11367)",
        legal="P at least 3, any M",
    ),
    "filled-encoders": Builder(
        filled_encoders, "Feng et al., Optimus (arXiv:2408.03505)", bytes_per_op=PLANNED
    ),
}


def _checked(builder: Builder) -> Callable[..., ScheduleTable]:
    """Return a builder's function with checks of its arguments."""
    signature = inspect.signature(builder.function)
    defaults = {name: parameter.default for name, parameter in signature.parameters.items()}

    @functools.wraps(builder.function)
    def build(*arguments: Any, **options: Any) -> ScheduleTable:
        bound = signature.bind(*arguments, **options).arguments
        for option, value in bound.items():
            is_count = signature.parameters[option].annotation in (int, int | None)
            if is_count and value is not defaults[option]:
                bound[option] = whole_number(value, option, maximum=MAX_COUNT)
            if signature.parameters[option].annotation is bool and not isinstance(value, bool):
                raise wrong(option, f"must be true or false, got {value!r}", value)
        if "slots" in bound:
            check_slots(bound["slots"])
            bound["slots"] = {**defaults["slots"], **bound["slots"]}
        if bound.get("stage_shares") is not None:
            check_shares(bound["stage_shares"], bound["num_workers"])
        check_size(builder, **defaults | bound)
        return builder.function(**bound)

    return build


def _registered(builders: Mapping[str, Builder]) -> Mapping[str, Builder]:
    return ResultDict(
        (name, builder._replace(function=_checked(builder), legal=builder.legal or ANY))
        for name, builder in builders.items()
    )


REGISTRY = _registered(_PUBLISHED)  # of the usual ops, which the same costs price
EXTENDED = _registered(_EXTENDED)  # with a grammar of their own
BUILT_IN = {**REGISTRY, **EXTENDED}


def check_size(
    builder: Builder, *, num_workers: int, num_microbatches: int, **options: Any
) -> None:
    """Refuse a table that cannot fit into memory: what fits but takes long is legal."""
    stages_per_worker = options.get("stages_per_worker", builder.stages_per_worker)
    worker_stages = stages_per_worker * 2 * options.get("waves", 0.5)  # stages of a worker
    stages = num_workers * int(worker_stages)
    passes = num_microbatches * (options.get("slices", 1) or num_workers)  # None: as workers
    # a row has a column for each of its ops, and for each step of a microbatch through all stages
    cells = num_workers * 2 * max(int(worker_stages) * passes, stages)
    num_bytes = cells * BYTES_PER_CELL + 2 * stages * passes * builder.bytes_per_op
    what = f"{num_workers} workers with {stages} stages and {num_microbatches} microbatches need"
    check_fits(num_bytes, what)
