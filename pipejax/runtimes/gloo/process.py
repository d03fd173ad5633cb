"""Process of one rank, which runs tables in PyTorch with a small model and reports times.

A request can state how long ops and messages take at least.
"""

import contextlib
import datetime
import itertools
import queue
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules
from torch.profiler import ProfilerActivity, profile, record_function

from pipejax.runtimes.processes import serve

INNER = 8  # largest width inside a stage, so that large messages need little arithmetic
JUDGED = 64  # largest number of output features in the loss


class TorchModel(NamedTuple):
    """Size and seed of the small model to train, in float64."""

    hidden: int  # width of the activations between stages
    batch_size: int  # examples of a microbatch
    seed: int  # random seed of parameters and data

    def stage(self, number: int) -> "Stage":
        """Build a stage with random parameters, which depend on the seed and the stage."""
        return Stage(self.hidden, self._generator(number + 1))

    def data(self, num_microbatches: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Draw a random input and target of shape (batch, hidden) for each microbatch."""
        generator = self._generator(0)
        shape = 2, num_microbatches, self.batch_size, self.hidden
        inputs, targets = torch.randn(shape, generator=generator, dtype=torch.float64)
        return list(inputs), list(targets)

    def example(self) -> torch.Tensor:
        """Return a tensor with the shape and type of the activations between stages."""
        return torch.empty(self.batch_size, self.hidden, dtype=torch.float64, device="meta")

    def _generator(self, stream: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 1_000_003 + stream)


class Stage(torch.nn.Module):  # type: ignore[misc]  # mypy does not see PyTorch
    """A stage of the small model: a residual layer."""

    def __init__(self, hidden: int, generator: torch.Generator) -> None:
        super().__init__()
        inner = min(hidden, INNER)

        def parameter(*shape: int) -> torch.nn.Parameter:
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            return torch.nn.Parameter(values * shape[0] ** -0.5)

        self.into = parameter(hidden, inner)
        self.bias = parameter(inner)
        self.out = parameter(inner, hidden)

    def forward(self, activation: torch.Tensor) -> torch.Tensor:
        """Return the activations (batch, hidden) for the next stage."""
        inner = torch.tanh(torch.addmm(self.bias, activation, self.into))
        return torch.addmm(activation, inner, self.out)


def square_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return half the mean square error of the output for a microbatch."""
    return ((output[:, :JUDGED] - target[:, :JUDGED]) ** 2).mean() / 2


def unpipelined(
    stages: list[Stage], inputs: list[torch.Tensor], targets: list[torch.Tensor]
) -> float:
    """Sum the gradients of all microbatches without a pipeline, and return the mean loss."""
    total = 0.0
    for activation, target in zip(inputs, targets, strict=True):
        for stage in stages:
            activation = stage(activation)
        loss = square_loss(activation, target) / len(inputs)
        loss.backward()
        total += float(loss.detach())
    return total


# Slow links over gloo.
#
# When sender and receiver have posted a message, gloo delivers it almost at once. The link of the
# two ranks then holds the message for the requested seconds, one message of both directions at a
# time. After that, `wait` of the message returns. PyTorch's runtime decides when messages are
# posted.

Seconds = Sequence[Sequence[float]]  # (2, boundaries): times of activations, times of gradients
RECEIVED = "gloo:recv"  # name that gloo gives the trace slice of a RECV


class SlowMessage:
    """Message on a slow link; PyTorch's runtime calls the method `wait`."""

    def __init__(self, work: dist.Work, seconds: float) -> None:
        self.work, self.seconds = work, seconds
        self._arrival = 0.0
        self._begun = threading.Event()
        self._slice: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()

    def begin_slice(self) -> None:
        """Begin a trace slice of a RECV, like gloo; the slice ends when `wait` returns."""
        self._slice = record_function(RECEIVED)
        self._slice.__enter__()

    def begin(self, free_at: float) -> float:
        """Start the message once the link is free, and return when the link is free again."""
        self._arrival = max(time.perf_counter(), free_at) + self.seconds
        self._begun.set()
        return self._arrival

    def wait(self) -> None:
        """Wait until the message has arrived."""
        self._begun.wait()
        time.sleep(max(0.0, self._arrival - time.perf_counter()))
        self._slice.__exit__(None, None, None)
        self._slice = contextlib.nullcontext()


class SlowLink:
    """One end of a link between two ranks; both ends track when the link is free."""

    def __init__(self) -> None:
        self._free_at = 0.0
        self._lock = threading.Lock()
        self._posted: dict[bool, queue.SimpleQueue[SlowMessage]] = {}
        for sends in (True, False):
            self._posted[sends] = queue.SimpleQueue()
            threading.Thread(target=self._carry, args=(self._posted[sends],), daemon=True).start()

    def post(self, work: dist.Work, sends: bool, seconds: float) -> SlowMessage:
        """Post a message at this end of the link; `sends` says whether this end sends it."""
        message = SlowMessage(work, seconds)
        self._posted[sends].put(message)
        return message

    def _carry(self, posted: "queue.SimpleQueue[SlowMessage]") -> None:
        while True:
            message = posted.get()
            message.work.wait()  # sender and receiver have posted the message
            with self._lock:
                self._free_at = message.begin(self._free_at)


class SlowLinks:
    """Slow links from one rank to all others."""

    def __init__(self) -> None:
        self._links: dict[int, SlowLink] = {}

    def watch(self, stage: PipelineStage, seconds: Seconds) -> None:
        """Give every message of a stage an attribute `seconds`, its time on the link."""
        number = stage.stage_index
        for name, direction, boundary in (
            ("get_fwd_recv_ops", 0, number - 1),
            ("get_fwd_send_ops", 0, number),
            ("get_bwd_recv_ops", 1, number),
            ("get_bwd_send_ops", 1, number - 1),
        ):
            if 0 <= boundary < len(seconds[direction]):
                travel = seconds[direction][boundary]
                setattr(stage, name, _record_travel(getattr(stage, name), travel))

    def post(self, messages: list[dist.P2POp], desc: str | None = None) -> list[SlowMessage]:
        """Post messages on slow links; this method replaces PyTorch's `_batch_p2p`."""
        posted = []
        for message in messages:
            sends = message.op is dist.isend
            peer = {("group_dst" if sends else "group_src"): message.group_peer}
            work = message.op(message.tensor, group=message.group, tag=message.tag, **peer)
            if message.peer not in self._links:
                self._links[message.peer] = SlowLink()
            posted.append(self._links[message.peer].post(work, sends, message.seconds))
            if not sends:
                posted[-1].begin_slice()
        return posted


def _record_travel(
    list_messages: Callable[[int], list[dist.P2POp]], seconds: float
) -> Callable[[int], list[dist.P2POp]]:
    """Wrap a function that lists messages, so that each message has the attribute `seconds`."""

    def list_with_seconds(microbatch: int) -> list[dist.P2POp]:
        messages = list_messages(microbatch)
        for message in messages:
            message.seconds = seconds
        return messages

    return list_with_seconds


START_DELAY = 0.02  # time from the agreement of all ranks on a start to the start [s]
ROUND_TRIPS = 4  # round trips of a message before each measured step
WAIT, BATCH = schedules._wait_batch_p2p, schedules._batch_p2p


class OpClock:
    """Clock that measures the ops of a rank, and makes each op take at least a minimum time."""

    # the time of an op includes work of the runtime after it, such as posting a SEND, but no wait

    def __init__(self, seconds: dict[str, list[list[float]]]) -> None:
        """Set minimum times [s] {phase: [stage][microbatch]}; {} means no minimum."""
        # stage 0 of PyTorch computes both gradients in W; I is empty, because the input needs none
        self.min_seconds = {phase: np.array(times) for phase, times in seconds.items()}
        if seconds:
            self.min_seconds["W"][0] += self.min_seconds["I"][0]
            self.min_seconds["I"][0] = 0.0
        self.measured: dict[tuple[int, str], list[float]] = {}
        self._last: list[float] = []  # list in `measured` that has the last op
        # start of the running op, end of the last op, and time of waits since that end [s]
        self._begun = self._ended = self._waited = 0.0

    def forget(self) -> None:
        """Drop all measurements so far."""
        self.measured, self._last = {}, []

    def begin(self) -> None:
        """Record the start of an op, and add work since the last op to the last op."""
        self._begun = time.perf_counter()
        if self._last:
            self._last[-1] += self._begun - self._ended - self._waited

    def end(self, stage: int, phase: str, microbatch: int) -> None:
        """Sleep until the running op has taken its minimum time, and record its duration."""
        seconds = float(self.min_seconds[phase][stage, microbatch]) if self.min_seconds else 0.0
        time.sleep(max(0.0, self._begun + seconds - time.perf_counter()))
        self._ended, self._waited = time.perf_counter(), 0.0
        self._last = self.measured.setdefault((stage, phase), [])
        self._last.append(self._ended - self._begun)

    def means(self) -> dict[int, dict[str, float]]:
        """Return {stage: {phase letter: mean op time [s]}} since `forget`."""
        result: dict[int, dict[str, float]] = {}
        for (stage, phase), times in self.measured.items():
            result.setdefault(stage, {})[phase] = statistics.fmean(times)
        return result

    def watch(self, stage: PipelineStage) -> None:
        """Wrap the methods of a stage to measure its ops, but `watch_schedule` ends forwards."""
        forward, backward = stage.forward_one_chunk, stage.backward_one_chunk
        weight = stage.backward_weight_one_chunk

        def time_forward(*args: Any, **options: Any) -> Any:
            self.begin()
            return forward(*args, **options)

        def time_backward(
            chunk: int, *args: Any, full_backward: bool = True, **options: Any
        ) -> None:
            self.begin()
            backward(chunk, *args, full_backward=full_backward, **options)
            self.end(stage.stage_index, "B" if full_backward else "I", chunk)

        def time_weight(chunk: int, *args: Any, **options: Any) -> None:
            self.begin()
            weight(chunk, *args, **options)
            self.end(stage.stage_index, "W", chunk)

        stage.forward_one_chunk = time_forward
        stage.backward_one_chunk = time_backward
        stage.backward_weight_one_chunk = time_weight

    def watch_schedule(self, schedule: schedules._PipelineScheduleRuntime) -> None:
        """Wrap a schedule so that forwards include the loss, and waits are measured."""
        compute_loss = schedule._maybe_compute_loss

        def time_loss(
            stage: PipelineStage, output: Any, targets: Any, chunk: int, *others: Any
        ) -> None:
            compute_loss(stage, output, targets, chunk, *others)
            self.end(stage.stage_index, "F", chunk)

        def time_wait(work: list[dist.Work]) -> None:
            start = time.perf_counter()
            WAIT(work)
            self._waited += time.perf_counter() - start

        schedule._maybe_compute_loss = time_loss
        schedules._wait_batch_p2p = time_wait


class TableRun:
    """Run of a table on this rank, with the stages of the rank."""

    def __init__(self, rank: int, request: dict[str, Any], task: dict[str, Any]) -> None:
        """Build the stages of this rank and PyTorch's schedule, with measured ops and messages."""
        self.model = TorchModel(**request["model"])
        self.task, self.rank = task, rank
        total, count = len(task["placement"]), task["microbatches"]
        numbers = [stage for stage, worker in enumerate(task["placement"]) if worker == rank]
        self.modules = {stage: self.model.stage(stage) for stage in numbers}
        example = self.model.example()
        activation = example.clone().requires_grad_()
        stages = [
            PipelineStage(
                self.modules[stage],
                stage,
                total,
                torch.device("cpu"),
                input_args=activation if stage else example,
                output_args=activation,
            )
            for stage in numbers
        ]
        self.schedule = schedules._PipelineScheduleRuntime(
            stages, count, lambda out, target: square_loss(out, target) / count, scale_grads=False
        )
        self.schedule._load_csv(task["path"], format=task["format"])
        self.clock = OpClock(task["seconds"])
        self.clock.watch_schedule(self.schedule)
        links = SlowLinks()
        schedules._batch_p2p = BATCH
        for stage in stages:
            self.clock.watch(stage)
            if task["messages"]:
                links.watch(stage, task["messages"])
                schedules._batch_p2p = links.post
        self.inputs, self.targets = self.model.data(count)

    def step(self) -> float | None:
        """Run a training step; return the loss on the rank of the last stage, else None."""
        for module in self.modules.values():
            module.zero_grad()
        is_last = len(self.task["placement"]) - 1 in self.modules
        losses: list[torch.Tensor] | None = [] if is_last else None
        data: dict[str, Any] = {"arg_mbs": None, "target_mbs": None}
        if 0 in self.modules:
            data["arg_mbs"] = [(values,) for values in self.inputs]
        if is_last:
            data["target_mbs"] = self.targets
        self.schedule.step(losses=losses, return_outputs=False, **data)
        return None if losses is None else float(sum(loss.detach() for loss in losses))

    def errors(self, loss: float | None) -> dict[str, Any]:
        """Compare gradients of this rank and the loss with those of a step without a pipeline."""
        stages = [self.model.stage(k) for k in range(len(self.task["placement"]))]
        expected = unpipelined(stages, self.inputs, self.targets)
        differences = []
        for number, module in self.modules.items():
            pairs = zip(module.parameters(), stages[number].parameters(), strict=True)
            differences += [relative_difference(value.grad, exact.grad) for value, exact in pairs]
        loss_error = None if loss is None else abs(loss - expected) / abs(expected)
        gradient_error = float(np.max(differences))
        return {"gradient_error": gradient_error, "loss": loss, "loss_error": loss_error}

    def time_steps(self, count: int) -> list[dict[str, Any]]:
        """Measure steps that begin at the same time on all ranks; write a trace if requested."""
        path = self.task["trace"]
        if path is None or not count:
            return self._timed_steps(count)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            steps = self._timed_steps(count)
        Path(path).mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(f"{path}/rank{self.rank}.json.gz")
        return steps

    def _timed_steps(self, count: int) -> list[dict[str, Any]]:
        """Run steps; return step time, message times and op times of each [s]."""
        # each step has a trace slice, as with `profiler.step()`
        steps = []
        for number in range(count):
            message = self._message_seconds()
            start = agreed_start(self.rank)
            self.clock.forget()
            time.sleep(max(0.0, start - time.perf_counter()))
            with record_function(f"ProfilerStep#{number}"):
                self.step()
            seconds = time.perf_counter() - start
            steps.append({"time": seconds, "message": message, "profile": self.clock.means()})
        return steps

    def _message_seconds(self) -> list[float]:
        """Measure half a round trip over each boundary of this rank [s]; 0 for other boundaries."""
        placement = self.task["placement"]
        seconds = []
        for source, target in itertools.pairwise(placement):
            dist.barrier()
            half_trip = 0.0
            if source != target and self.rank in (source, target):
                half_trip = round_trip(self.model, self.rank, source, target) / 2
            seconds.append(half_trip)
        return seconds


def relative_difference(tensor: torch.Tensor | None, other: torch.Tensor | None) -> float:
    """Return the largest difference divided by the largest entry; NaN if a tensor is None."""
    if tensor is None or other is None:
        return float("nan")
    return float((tensor - other).abs().max()) / (float(other.abs().max()) or 1.0)


def round_trip(model: TorchModel, rank: int, source: int, target: int) -> float:
    """Send an activation from rank `source` to rank `target` and back; return the time [s]."""
    tensor = torch.ones_like(model.example(), device="cpu")
    start = time.perf_counter()
    for _ in range(ROUND_TRIPS):
        if rank == source:
            dist.send(tensor, target)
            dist.recv(tensor, target)
        else:
            dist.recv(tensor, source)
            dist.send(tensor, source)
    return (time.perf_counter() - start) / ROUND_TRIPS


def agreed_start(rank: int) -> float:
    """Return a start time in the near future, on which all ranks have agreed."""
    moment = torch.zeros(1, dtype=torch.float64)
    dist.barrier()
    if rank == 0:
        moment += time.perf_counter() + START_DELAY
    dist.broadcast(moment, 0)
    return float(moment)


def answer_to(request: dict[str, Any]) -> dict[str, Any]:
    """Join the other ranks, run all tables of a request, and return the results."""
    torch.set_num_threads(1)
    rank, ranks = request["rank"], request["ranks"]
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(request["meeting"], ranks),
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=request["timeout"]),
    )
    results = []
    for task in request["tasks"]:  # a step for gradients, then measured steps
        run = TableRun(rank, request, task)
        errors = run.errors(run.step())
        results.append({**errors, "steps": run.time_steps(request["steps"])})
    dist.barrier()
    dist.destroy_process_group()
    return {"version": torch.__version__.split("+")[0], "tasks": results}


if __name__ == "__main__":
    serve(answer_to)
