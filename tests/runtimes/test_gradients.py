"""Tables in PyTorch's runtime: gradients equal to those of the model without a pipeline."""

import warnings

import pytest
import torch_tables as torch_own

import pipejax as pj
from pipejax.cli.app import run as command
from pipejax.runtimes.exports import check_exportable
from pipejax.runtimes.gloo.runtime import run_tables
from pipejax.runtimes.processes import RuntimeJob

EXACT = 1e-12  # relative, in float64; 1e-6 is asked for


def errors(tables):
    return {
        table.name: result.error
        for table, result in zip(tables, run_tables([RuntimeJob(t) for t in tables]), strict=True)
    }


def sayable(workers, microbatches):
    for name in pj.schedules.REGISTRY:
        built = pj.schedules.build(name, num_workers=workers, num_microbatches=microbatches)
        try:
            check_exportable(built)
        except ValueError:
            continue
        yield name


def test_exported_schedules(tmp_path):
    names = list(sayable(4, 8))
    assert len(names) >= 14
    tables = []
    for name in names:
        path = tmp_path / f"{name}.csv"
        options = ["-s", name, "-P", "4", "-M", "8", "--format", "torch-csv", "--out", str(path)]
        assert command(["export", *options]) == 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tables.append(pj.read_table(path))
    result = errors(tables)
    assert len(result) == len(names)
    assert max(result.values()) < EXACT, result


@pytest.mark.parametrize(("workers", "microbatches"), [(2, 4), (4, 8)])
def test_repaired_tables(workers, microbatches, tmp_path):
    """Six tables whose order of communication was searched, as `order --out` writes them."""
    tables = []
    for name in ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "v-half", "dualpipe-v"):
        built = pj.schedules.build(name, num_workers=workers, num_microbatches=microbatches)
        costs = pj.Costs.uniform(built, forward=1.0, backward=2.0, transfer=0.5)
        for queues in ("worker", "pair", "direction"):
            result = pj.search.messages(
                built, costs, link=pj.Links("rendezvous", queues), iterations=20
            )
            path = tmp_path / f"{name}-{queues}.csv"
            pj.write_table(result.best.table, path)
            tables.append(pj.read_table(path))
    result = errors(tables)
    assert len(result) == 18
    assert max(result.values()) < EXACT, result


def test_pytorchs_own_tables_with_and_without_communication():
    tables = []
    for name, ranks, per_rank, count, actions in torch_own.grid((2,), (1, 2), lambda ranks: (4,)):
        lowered = torch_own.lowered(actions, ranks, per_rank, count)
        for kind, rows in (("compute", actions), ("lowered", lowered)):
            named = f"{name}-{per_rank}-{kind}"
            tables.append(pj.ScheduleTable.from_rows(torch_own.texts(rows), name=named))
    result = errors(tables)
    assert max(result.values()) < EXACT, result


def test_a_wrong_message_would_be_seen():
    """Messages of a pair are matched by their order: what the runtime is refused is wrong."""
    rows = [
        ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"],
        ["1RECV_F1", "1RECV_F0", "1F0", "1F1", "1B0", "1SEND_B0", "1B1", "1SEND_B1"],
    ]
    crossed = pj.ScheduleTable.from_rows(rows, name="crossed")
    with pytest.raises(ValueError, match="match in the order in which they are posted"):
        run_tables([RuntimeJob(crossed)])
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr("pipejax.runtimes.gloo.runtime.check_exportable", lambda table: None)
        assert errors([crossed])["crossed"] > 0.01
