"""One island: its supervisor, which starts, kills and restarts it as the seed says, and the island itself.

    terrace rehearse run --cluster FILE -- python -m bench.elastic.member JOB          a supervisor for each rank
    python -m bench.elastic.member JOB --island RANK                                   what a supervisor starts

A supervisor starts a process ahead of its time, which is then told on its standard input when to begin, so that a
restart takes `Job.restart_s` however long imports take. The supervisor of rank 0 also runs the meeting place, or
torchft's lighthouse; it is never killed.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.elastic.job import OUTER_LR, OUTER_MOMENTUM, Job, Model, anchor_file
from bench.lab.launch import own_address, place
from terrace.base.files import write_atomic
from terrace.launch.seal import Seal
from terrace.plan.outer import Outer
from terrace.roster.entries import Attempted, Terms
from terrace.roster.island import Island
from terrace.roster.links import Links
from terrace.roster.outer import RosterState
from terrace.roster.place import Place

OWN, TORCHFT, LOG = "terrace", "torchft", "roster.jsonl"
_SEAL = Seal(b"a benchmark on one machine, not a secret", "the benchmark")
_STARTING_S = 25.0  # of all processes
_WITHIN_S = 0.2  # after the begin of an exchange, which takes four times as long
_SPARE_S = 4.0  # after the start of a process, the next one is started


def faults(job: Job) -> list[tuple[float, int]]:
    """(second of the run, rank) of every kill; the same for all contestants of a seed."""
    draw, found, number = random.Random(job.seed), [], 1
    while job.fault_s and number * job.fault_s + job.restart_s < job.seconds:
        found.append((number * job.fault_s + draw.random() * 4.0, draw.randrange(job.islands)))
        number += 1
    return found


class Events:
    """Lines of what a process did, each on the disk at once, since it may be killed."""

    def __init__(self, job: Job, rank: int) -> None:
        self._path = Path(job.folder) / f"events-{rank}.jsonl"

    def add(self, **what: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"time": time.time(), **what}) + "\n")


def supervise(job: Job, rank: int) -> None:
    """Run the island of this rank until the run's last second, through its kills."""
    folder, held = Path(job.folder), list[Any]()
    known = folder / "meet.json"
    if rank == 0:
        meeting = _lighthouse(job, held) if job.contestant == TORCHFT else _place(job, folder, held)
        begin = {"meet": meeting, "begin_s": time.time() + _STARTING_S}
        write_atomic(known, json.dumps(begin))
    while not known.exists():
        time.sleep(0.05)
    begin_s = float(json.loads(known.read_text())["begin_s"])
    events, own = Events(job, rank), [second for second, victim in faults(job) if victim == rank]
    child = _started(job, rank)
    at_s = begin_s
    for second in [*own, job.seconds]:
        assert child.stdin is not None
        child.stdin.write(f"{at_s}\n".encode())
        child.stdin.close()
        _sleep_until(at_s + _SPARE_S)
        spare = _started(job, rank) if second < job.seconds else None
        _sleep_until(begin_s + second)
        if job.in_exchange and second < job.seconds:
            second = _exchanging(job, rank) - begin_s
        code = child.poll()
        events.add(kind="kill", code=code)
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert code is None, f"island {rank} ended by itself: {code}"
        if spare is not None:
            child, at_s = spare, begin_s + second + job.restart_s
    _sleep_until(begin_s + job.seconds + 2.0)  # the place ends after all islands
    os._exit(0)  # threads of the place


def _started(job: Job, rank: int) -> "subprocess.Popen[bytes]":
    # Its imports disturb the others as little as they can; it ends its niceness when it begins.
    own = ["-m", "bench.elastic.member", json.dumps(asdict(job)), "--island", str(rank)]
    return subprocess.Popen(["nice", "-n", "10", sys.executable, *own], stdin=subprocess.PIPE)


def _exchanging(job: Job, rank: int) -> float:
    """Waits until the island of this rank is within an exchange, at most until a window and an exchange have passed."""
    path, end_s = _mark(job, rank), time.time() + 3 * job.every
    path.unlink(missing_ok=True)
    while not path.exists() and time.time() < end_s:
        time.sleep(0.01)
    time.sleep(_WITHIN_S)
    return time.time()


def _mark(job: Job, rank: int) -> Path:
    """The file that an island touches when it begins to send."""
    return Path(job.folder) / f"exchanging-{rank}"


def _sleep_until(second: float) -> None:
    time.sleep(max(0.0, second - time.time()))


def _place(job: Job, folder: Path, held: list[Any]) -> list[Any]:
    found = Place("", 0, _SEAL, folder / LOG, job.islands, lambda line: None)
    held.append(found)
    threading.Thread(target=found.serve, daemon=True).start()
    return [own_address(), found.port]


def _lighthouse(job: Job, held: list[Any]) -> list[Any]:
    from torchft.coordination import LighthouseServer

    found = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=round(1000 * job.notice_s)
    )
    held.append(found)
    return [own_address(), int(found.address().rpartition(":")[2])]


class _Marking(RosterState):
    """Touches a file when an exchange begins."""

    mark = Path()

    def exchange(self, attempt: Attempted, own: str, links: Links) -> None:
        if len(attempt.islands) > 1:
            self.mark.touch()
        super().exchange(attempt, own, links)


def terrace_island(job: Job, rank: int, meeting: tuple[str, int], events: Events, model: Model) -> None:
    """Train the windows that the roster deals to this island."""
    outer = Outer(tier="roster", every=job.every, lr=OUTER_LR, momentum=OUTER_MOMENTUM)
    state = _Marking(outer, [model.flat], torch.float32)
    state.mark = _mark(job, rank)
    terms = Terms(every=job.every, steps=1_000_000, rounds=job.rounds, patience_s=4 * job.notice_s)

    def applied(attempt: Attempted) -> None:
        if island.name == min(attempt.islands):
            torch.save(state.anchor, anchor_file(Path(job.folder), attempt.result))

    island = Island(
        f"island-{rank}",
        meeting,
        _SEAL,
        terms,
        {},
        state,
        applied=applied,
        say=lambda words: events.add(kind="dropped", words=words),
    )
    deal = island.join()
    while deal is not None:
        names = sorted(deal.shares)
        for step in range(deal.first, deal.last + 1):
            model.step(step, names.index(island.name), len(names), [deal.shares[name] for name in names])
        steps = deal.last - deal.first + 1
        events.add(kind="window", rounds=steps * deal.shares[island.name])
        deal = island.meet(steps * deal.shares[island.name] * job.tokens_a_round)


def torchft_island(job: Job, rank: int, meeting: tuple[str, int], events: Events, model: Model) -> None:
    """Train under torchft's DiLoCo, each window on an island's part of the batch."""
    import socket
    from datetime import timedelta

    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its list of exports
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    host, committed, healed = own_address(), list[bool](), list[bool]()
    socket.gethostname = lambda: host  # its server of checkpoints names itself so, and peers must reach it

    def load(state: dict[str, Any]) -> None:
        model.flat.copy_(state["model"])
        healed.append(True)

    store, limit = TCPStore(host, 0, is_master=True, wait_for_workers=False), timedelta(seconds=60)
    manager: Any = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=load,
        state_dict=lambda: {"model": model.flat.clone()},
        min_replica_size=1,
        use_async_quorum=False,
        timeout=limit,
        quorum_timeout=limit,
        connect_timeout=limit,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=f"http://{meeting[0]}:{meeting[1]}",
        replica_id=f"island_{rank}",
        hostname=host,
        init_sync=False,
    )
    asked: Callable[..., bool] = manager.should_commit
    sent: Callable[..., Any] = manager.allreduce

    def should_commit(*words: Any, **names: Any) -> bool:
        committed.append(asked(*words, **names))
        return committed[-1]

    def allreduce(*words: Any, **names: Any) -> Any:
        if manager.num_participants() > 1:
            _mark(job, rank).touch()
        return sent(*words, **names)

    manager.should_commit, manager.allreduce = should_commit, allreduce
    outer = torch.optim.SGD(model.module.parameters(), lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
    step, share = 0, job.rounds // job.islands
    # One message of all parameters, as fast as it can be.
    with DiLoCo(manager, [model.module], model.optimizer, outer, sync_every=job.every, use_bucketization=True):
        while True:
            for number in range(step, step + job.every):
                model.step(number, rank, job.islands)
            events.add(
                kind="window",
                rounds=job.every * share,
                committed=committed[-1],
                healed=bool(healed),
                version=manager.current_step(),
                participants=manager.num_participants(),
            )
            if committed[-1] and manager.participating_rank() == 0:
                torch.save(model.flat, anchor_file(Path(job.folder), manager.current_step()))
            step = max(step + job.every, manager.current_step() * job.every)
            healed.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", help="the job as JSON")
    parser.add_argument("--island", type=int)
    options = parser.parse_args()
    job = Job(**json.loads(options.job))
    torch.set_num_threads(1)
    if options.island is None:
        supervise(job, place().rank)
        return
    events, model = Events(job, options.island), Model(job)
    host, port = json.loads((Path(job.folder) / "meet.json").read_text())["meet"]
    if job.contestant == TORCHFT:
        import torchft  # noqa: F401  # seconds that are no part of the restart
    at_s = float(sys.stdin.readline())
    os.setpriority(os.PRIO_PROCESS, 0, 0)
    _sleep_until(at_s)
    events.add(kind="begin", late_s=time.time() - at_s)
    run = torchft_island if job.contestant == TORCHFT else terrace_island
    run(job, options.island, (host, port), events, model)


if __name__ == "__main__":
    main()
