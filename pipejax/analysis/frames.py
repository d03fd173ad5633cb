"""Results as data frames of pandas."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pipejax.analysis.runs.evaluate import Evaluation
from pipejax.analysis.runs.timeline import bars
from pipejax.base.checks import wrong

if TYPE_CHECKING:
    import pandas as pd


def frame(rows: Evaluation | Sequence[Any]) -> "pd.DataFrame":
    """Convert a run or a list of records to a data frame of pandas.

    Args:
      rows: a run, whose rows are its ops; or records, such as the rows of `pj.compare`, the layouts
        of `pj.plan`, the remedies of `pj.explain` or the suspects of a trace.

    Returns:
      A row for each op, or for each record. Columns of ops are `op`, `kind`, `stage`, `microbatch`,
      `worker`, `lane`, `start` and `finish` [s] and `is_critical`; a fused pair is one row. Columns
      of records are their fields; a field of an inner record is "outer.inner".

    Raises:
      ModuleNotFoundError: without pandas, which `pip install 'pipejax[notebook]'` brings.
      ValueError: if a row is no record.

    Example:
      >>> import pipejax as pj
      >>> table = pj.schedules.build("1f1b", num_workers=2, num_microbatches=2)
      >>> ops = pj.analysis.frame(pj.evaluate(table, pj.Costs(forward=1.0, backward=2.0)))
      >>> ops.groupby("kind").finish.max().to_dict()
      {'B': 9.0, 'F': 5.0}
    """
    import pandas as pd

    records = (
        _op_rows(rows) if isinstance(rows, Evaluation) else (dict(_columns(row)) for row in rows)
    )
    return pd.DataFrame(list(records))


def _op_rows(run: Evaluation) -> Iterator[dict[str, Any]]:
    """Yield a row of the data frame for each op of a run."""
    for bar in bars(run):
        yield {
            "op": bar.label,
            "kind": "+".join(op.phase.name for op in bar.ops),
            "stage": bar.ops[0].stage,
            "microbatch": bar.ops[0].microbatch,
            "worker": bar.worker,
            "lane": bar.lane,
            "start": bar.start,
            "finish": bar.finish,
            "is_critical": bar.is_critical,
        }


def _columns(record: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of each field of a record; inner fields are named "outer.inner"."""
    for name in _field_names(record):
        value = getattr(record, name)
        if _field_names(value):
            yield from _columns(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
    if not prefix and not _field_names(record):
        raise wrong("rows", f"must be a run or records, got {type(record).__name__}")


def _field_names(value: Any) -> tuple[str, ...]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return tuple(field.name for field in dataclasses.fields(value))
    return getattr(value, "_fields", ())
