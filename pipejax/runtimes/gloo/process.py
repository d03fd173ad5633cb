"""Process of one rank: it runs tables in PyTorch with a small model and reports times.

Links between ranks can be slowed down to stated times.
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

INNER = 8  # width within a stage, at most: large messages need little arithmetic
JUDGED = 64  # features of the output that the loss looks at, at most


class TorchModel(NamedTuple):
    """Size and seed of the small model to train, in float64."""

    hidden: int  # width of what stages pass on
    batch_size: int  # examples of a microbatch
    seed: int  # of parameters and data

    def stage(self, number: int) -> "Stage":
        """Build a stage of the model with random parameters, from a seed for this stage."""
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
    """Return half the mean square error of a microbatch's output."""
    return ((output[:, :JUDGED] - target[:, :JUDGED]) ** 2).mean() / 2


def unpipelined(
    stages: list[Stage], inputs: list[torch.Tensor], targets: list[torch.Tensor]
) -> float:
    """Train without a pipeline: add up gradients over all microbatches, and return the loss."""
    total = 0.0
    for activation, target in zip(inputs, targets, strict=True):
        for stage in stages:
            activation = stage(activation)
        loss = square_loss(activation, target) / len(inputs)
        loss.backward()
        total += float(loss.detach())
    return total


# Links of a given speed, over gloo.
#
# When both ends of a message are posted, gloo delivers it almost at once. From then on our link of
# two ranks holds the message for the given seconds, one message of both directions at a time, and
# then releases those who wait for it. The runtime alone decides when and in which order to post.

Seconds = Sequence[Sequence[float]]  # (2, boundaries): activations forth, gradients back
RECEIVED = "gloo:recv"  # what gloo calls its slice of a RECV


class SlowMessage:
    """Message on a slow link; the runtime calls its `wait`."""

    def __init__(self, work: dist.Work, seconds: float) -> None:
        self.work, self.seconds = work, seconds
        self._arrival = 0.0
        self._begun = threading.Event()
        self._slice: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()

    def begin_slice(self) -> None:
        """Begin a trace slice of a RECV, as gloo records it; the slice ends when the wait ends."""
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
    """Link between two ranks; both ends track when it is free, and differ only by gloo's delays."""

    def __init__(self) -> None:
        self._free_at = 0.0
        self._lock = threading.Lock()
        self._posted: dict[bool, queue.SimpleQueue[SlowMessage]] = {}
        for sends in (True, False):
            self._posted[sends] = queue.SimpleQueue()
            threading.Thread(target=self._carry, args=(self._posted[sends],), daemon=True).start()

    def post(self, work: dist.Work, sends: bool, seconds: float) -> SlowMessage:
        """Post a message at this end of the link."""
        message = SlowMessage(work, seconds)
        self._posted[sends].put(message)
        return message

    def _carry(self, posted: "queue.SimpleQueue[SlowMessage]") -> None:
        while True:
            message = posted.get()
            message.work.wait()  # both ends are posted
            with self._lock:
                self._free_at = message.begin(self._free_at)


class SlowLinks:
    """Links from one rank to all others, on which messages take given times."""

    def __init__(self) -> None:
        self._links: dict[int, SlowLink] = {}

    def watch(self, stage: PipelineStage, seconds: Seconds) -> None:
        """Attach to every message of a stage the time that it takes on its link."""
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
        """Post messages (with `seconds`) on slow links, in place of PyTorch's `_batch_p2p`."""
        posted = []
        for message in messages:
            sends = message.op is dist.isend
            peer = {("group_dst" if sends else "group_src"): message.group_peer}
            work = message.op(message.tensor, group=message.group, tag=message.tag, **peer)
            if message.peer not in self._links:
                self._links[message.peer] = SlowLink()
            posted.append(self._links[message.peer].post(work, sends, message.seconds))
            if not sends:  # a receive takes its link from now on
                posted[-1].begin_slice()
        return posted


def _record_travel(
    list_messages: Callable[[int], list[dist.P2POp]], seconds: float
) -> Callable[[int], list[dist.P2POp]]:
    """Wrap a function that lists messages, so that each message carries its travel time."""

    def list_with_seconds(microbatch: int) -> list[dist.P2POp]:
        messages = list_messages(microbatch)
        for message in messages:
            message.seconds = seconds
        return messages

    return list_with_seconds


START_DELAY = 0.02  # seconds from the agreement on a start to the start
ROUND_TRIPS = 4  # of a message, before each step that is timed
WAIT, BATCH = schedules._wait_batch_p2p, schedules._batch_p2p


class OpClock:
    """Clock that measures the ops of a rank, and lets each op last at least a minimum time."""

    # Work of the runtime after an op, such as posting a SEND, counts to the op; waiting does not.

    def __init__(self, seconds: dict[str, list[list[float]]]) -> None:
        """Set the least time of each op [s], by phase, stage and microbatch; {} for none."""
        # PyTorch's stage 0 computes both halves in W; its I is empty, as the input has no gradient
        self.min_seconds = {phase: np.array(times) for phase, times in seconds.items()}
        if seconds:
            self.min_seconds["W"][0] += self.min_seconds["I"][0]
            self.min_seconds["I"][0] = 0.0
        self.measured: dict[tuple[int, str], list[float]] = {}
        self._last: list[float] = []  # measured times of the kind of op that ended last
        # start of the present op, end of the last one, and time spent waiting since [s]
        self._begun = self._ended = self._waited = 0.0

    def forget(self) -> None:
        """Drop all measurements so far."""
        self.measured, self._last = {}, []

    def begin(self) -> None:
        """Record the start of an op."""
        self._begun = time.perf_counter()
        if self._last:
            self._last[-1] += self._begun - self._ended - self._waited

    def end(self, stage: int, phase: str, microbatch: int) -> None:
        """Sleep until the running op has lasted its minimum time, and record its duration."""
        seconds = float(self.min_seconds[phase][stage, microbatch]) if self.min_seconds else 0.0
        time.sleep(max(0.0, self._begun + seconds - time.perf_counter()))
        self._ended, self._waited = time.perf_counter(), 0.0
        self._last = self.measured.setdefault((stage, phase), [])
        self._last.append(self._ended - self._begun)

    def means(self) -> dict[int, dict[str, float]]:
        """Return mean op times [s] since the last reset, by stage and phase letter."""
        result: dict[int, dict[str, float]] = {}
        for (stage, phase), times in self.measured.items():
            result.setdefault(stage, {})[phase] = statistics.fmean(times)
        return result

    def watch(self, stage: PipelineStage) -> None:
        """Time the ops of a stage by wrapping its methods; a forward ends after its loss."""
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
        """Wrap a schedule so that forwards end after their loss and message waits are recorded."""
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
    """Run of a table in PyTorch's runtime on this rank, with the rank's stages."""

    def __init__(self, rank: int, request: dict[str, Any], task: dict[str, Any]) -> None:
        self.model = TorchModel(**request["model"])
        self.task, self.rank = task, rank
        total, count = len(task["placement"]), task["microbatches"]
        numbers = [stage for stage, worker in enumerate(task["placement"]) if worker == rank]
        self.modules = {stage: self.model.stage(stage) for stage in numbers}
        example = self.model.example()
        data, passed_on = example, example.clone().requires_grad_()
        stages = [
            PipelineStage(
                self.modules[stage],
                stage,
                total,
                torch.device("cpu"),
                input_args=passed_on if stage else data,
                output_args=passed_on,
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
        """Run one training step; return the loss on the rank of the last stage, otherwise None."""
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
        """Compare this rank's gradients, and the loss, with those of a step without a pipeline."""
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
        """Time steps that begin together on all ranks; write a trace if the task asks for one."""
        path = self.task["trace"]
        if path is None or not count:
            return self._timed_steps(count)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            steps = self._timed_steps(count)
        Path(path).mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(f"{path}/rank{self.rank}.json.gz")
        return steps

    def _timed_steps(self, count: int) -> list[dict[str, Any]]:
        """Run steps; return the time of each, of messages and of ops [s]."""
        # A step has a slice in the trace, as with `profiler.step()`.
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
        """Measure half a round trip over each boundary [s]; 0 for boundaries of other ranks."""
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
    """Return the largest difference divided by the largest entry; NaN if an array is missing."""
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
    """Agree with all ranks on a start time in the near future, on the clock of the machine."""
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
    for task in request["tasks"]:  # a step for its gradients, then steps that are timed
        run = TableRun(rank, request, task)
        errors = run.errors(run.step())
        results.append({**errors, "steps": run.time_steps(request["steps"])})
    dist.barrier()
    dist.destroy_process_group()
    return {"version": torch.__version__.split("+")[0], "tasks": results}


if __name__ == "__main__":
    serve(answer_to)
