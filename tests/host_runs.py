"""Runs with hosts that launch kernels one after the other, as Nsight and Kineto files."""

import json

from nsight_files import Kernel, Process, Range, write_export

LAUNCH, LATENCY = 0.02, 0.005  # [ms]: of a call, and until its kernel starts
KERNELS, SIZE = 10, 1.0  # of a forward, and length of each [ms]; a backward has twice as many
STEPS, GAP, MESSAGE = 3, 5.0, 0.3
SYNC = "cudaStreamSynchronize"
RECEIVE = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def host_run(table, launch=(), pause=(), slow=(), links=(), waits=False):
    """Return the processes and step times [ms] of a run.

    `launch` are times of a call by worker, `pause` times of the host before each op, `slow` factors
    on kernels, `links` times of messages by pair of workers. With `waits`, hosts wait for messages.
    """
    launch, pause, slow, links = map(dict, (launch, pause, slow, links))
    rows = [[op for cell in row for op in cell] for row in table.rows()]
    processes = [Process([], [], [], pid=100 + k, device=k) for k in range(len(rows))]
    base, spans = 10.0, []
    for step in range(STEPS):
        host, free = [base] * len(rows), [base] * len(rows)
        ends, position = {}, [0] * len(rows)
        while any(k < len(row) for k, row in zip(position, rows, strict=True)):
            for worker, row in enumerate(rows):
                while position[worker] < len(row):
                    op = row[position[worker]]
                    producer = _producer(op, table.num_stages)
                    if producer is not None and producer not in ends:
                        break
                    process, now = processes[worker], host[worker]
                    arrival = base
                    if producer is not None:
                        sender, end = ends[producer]
                        arrival = end + links.get((sender, worker), MESSAGE) * (sender != worker)
                        if sender != worker:
                            begin = max(now + LAUNCH + LATENCY, free[worker])
                            process.kernels.append(
                                Kernel(now + LAUNCH, begin, max(arrival, begin + 0.01), RECEIVE, 9)
                            )
                            arrival = max(arrival, begin + 0.01)
                            if waits:
                                synced = max(arrival, now + 0.04)
                                process.calls.append((now + 0.03, synced, SYNC, 1))
                                now = max(arrival, now + 0.04)
                    now += pause.get(worker, 0.0)
                    begin, count = now, KERNELS * (1 if op.phase.name == "F" else 2)
                    for _ in range(count):
                        now += launch.get(worker, LAUNCH)
                        start = max(free[worker], arrival, now + LATENCY)
                        free[worker] = start + SIZE * slow.get(worker, 1.0)
                        process.kernels.append(Kernel(now, start, free[worker]))
                    process.ranges.append(Range(begin, now + 0.01, f"PP:{op}"))
                    host[worker] = now + 0.02
                    ends[op.stage, op.phase.name, op.microbatch] = worker, free[worker]
                    position[worker] += 1
        last = max(free)
        for process in processes:
            process.ranges.append(Range(base - 0.5, last + 1.0, f"ProfilerStep#{step}"))
        spans.append(last - base)
        base = last + GAP
    return processes, spans


def _producer(op, stages):
    if op.phase.name == "F":
        return (op.stage - 1, "F", op.microbatch) if op.stage else None
    last = op.stage == stages - 1
    return (op.stage, "F", op.microbatch) if last else (op.stage + 1, "B", op.microbatch)


def write_nsight(folder, processes):
    for rank, process in enumerate(processes):
        write_export(folder / f"rank{rank}.sqlite", [process])
    return folder


def write_kineto(folder, processes, with_device=True):
    """Write a trace of PyTorch's profiler for each rank."""
    for rank, process in enumerate(processes):
        events = []

        def add(category, name, begin, end, thread, events=events, **args):
            event = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread}
            events.append(event | {"ts": 1e3 * begin, "dur": 1e3 * (end - begin), "args": args})

        for entry in process.ranges:
            label = entry.label.partition(", ")[0]  # Nsight alone adds the number of the call
            add("user_annotation", label, entry.start, entry.end, 1)
        for k, kernel in enumerate(process.kernels if with_device else (), 1):
            call = kernel.launch, kernel.launch + 0.004
            add("cuda_runtime", "cudaLaunchKernel", *call, kernel.thread, correlation=k)
            name = {"gemm": "sm90_xmma_gemm"}.get(kernel.name, kernel.name)
            args = {"correlation": k, "stream": kernel.stream}
            calls = [entry for entry in process.ranges if entry.payload]
            before = [entry for entry in calls if entry.start <= kernel.launch]
            if before and kernel.name.startswith("nccl"):
                group, size = max(before, key=lambda entry: entry.start).payload
                args |= {"Process Group Name": str(group), "In msg nelems": size}
            add("kernel", name, kernel.start, kernel.end, 7, **args)
        for begin, end, name, thread in process.calls if with_device else ():
            add("cuda_runtime", name, begin, end, thread)
        if not with_device:
            events = [event | _host_times(event, process, events) for event in events]
        header = {"distributedInfo": {"rank": rank, "world_size": len(processes)}}
        header |= {"baseTimeNanoseconds": 10**18, "traceEvents": events}
        (folder / f"rank{rank}.json").write_text(json.dumps(header))
    return folder


def _host_times(event, process, events):
    """Times of a slice as if the host waited for the device in each op."""
    if not event["name"].startswith("PP:"):
        return {}
    low, high = event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3
    launched = [k for k in process.kernels if low <= k.launch <= high and k.name == "gemm"]
    begin, end = launched[0].start, launched[-1].end
    return {"ts": 1e3 * begin, "dur": 1e3 * (end - begin)}
