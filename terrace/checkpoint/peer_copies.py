"""Copies of a run's newest state in the memory of two machines, and the assembly of checkpoints from them.

    rank r         its file -> memory of its machine      (terrace.checkpoint.memory)
                   the same bytes -> keeper of r -> memory of the keeper's machine

Ranks copy between two steps, while training waits. A step ends with a message of all ranks, so no rank starts a copy
before all have completed the previous one: of two slots, one is complete on every machine. Messages go from memory to
memory, over gloo.
"""

import json
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from terrace.base.errors import CheckpointError, ConfigError
from terrace.checkpoint.layout import Files, decode, manifest_of, stored_as
from terrace.checkpoint.memory import (
    MANIFEST,
    ROOT,
    MemoryFile,
    clear,
    make_private,
    mapped_file,
    memory_folder,
    new_life,
    present,
    write_list,
)
from terrace.checkpoint.parts import CHOICES, choices_of, slices_of
from terrace.checkpoint.reading import Checkpoint, wanted_parts
from terrace.checkpoint.residuals import digest, file_of
from terrace.checkpoint.writing import attempt, snapshot_of
from terrace.launch.world import World
from terrace.plan.partners import MEMORY, SLOTS, TAIL_BYTES, Partners
from terrace.plan.wire import MessageClass
from terrace.runtime.model_state import ModelState

if TYPE_CHECKING:
    from terrace.runtime.engine import Engine

_MOVE_TIMEOUT = timedelta(minutes=30)
_MOVE_BYTES = 4 << 20  # of a message of a file that moves to another machine
_CHUNK_BYTES = 64 << 20  # of a message: gloo's counts are not promised beyond 2 GB


class PeerCopies:
    """Makes the copies of one rank. Every rank of the world constructs one and calls its methods at the same points."""

    def __init__(
        self,
        engine: "Engine",
        world: World,
        run_folder: Path,
        partners: Partners,
        facts: Mapping[str, Any],
        timeout: timedelta,
    ) -> None:
        """Allocate the memory. Raises `ConfigError` on every rank if a machine has too little."""
        self._engine, self._world, self.partners, self._facts = engine, world, partners, facts
        self._group = _group(partners.members(world.rank), timeout)
        self._snapshot = snapshot_of(engine.state)
        self._keeper, self._kept = partners.keeper(world.rank), partners.kept(world.rank)
        self._feedback, self._stored = digest(engine.program), stored_as(engine.program.plan)
        # A resumed run brings its residuals.
        self._snapshot.lay_out()
        self._parts = dict[int, dict[str, Any]]()
        self._swap_parts()
        self.num_copies, self._is_alone = 0, False
        self._is_first = world.hosts.index(world.hosts[world.rank]) == world.rank
        self._slots: list[dict[int, MemoryFile]] = []
        run, self._life = self._agree_on_life(run_folder)
        self.folder = memory_folder(run, run_folder, world.hosts[world.rank])
        self._say(attempt(self._clear_slots) if self._is_first else None)
        self._spare = list[Path]()
        self._say(attempt(self._take_memory))
        # All ranks have had room for it at once.
        for path in self._spare:
            path.unlink()

    @property
    def own_bytes(self) -> int:
        """Current bytes of this rank's part, without its header."""
        return int(self._parts[self._world.rank]["num_bytes"])

    @property
    def memory_bytes(self) -> int:
        """Main memory of this rank's copies, without headers."""
        return sum(file.data.nbytes for slot in self._slots for file in slot.values())

    def copy(self, step: int) -> float:
        """Copy the state after `step` steps. Returns the seconds taken. Raises `OSError`."""
        begin_s = time.perf_counter()
        # Work may still be queued on lanes and streams.
        self._engine.drain()
        if self._feedback and 0 < self.num_copies <= SLOTS:
            self._take_residuals(self.num_copies % SLOTS)
        slot = self._slots[self.num_copies % SLOTS]
        for file in slot.values():
            file.path.with_suffix(".json").unlink(missing_ok=True)
        tails = {rank: torch.zeros(TAIL_BYTES // 8, dtype=torch.int64) for rank in slot}
        own, kept = slot.get(self._world.rank), slot.get(self._kept)
        if own is not None:
            self._snapshot.take_into(own.data)
        pacer, tier = self._engine.comm.pacer, self._engine.program.cluster.tiers[self.partners.tier].name
        sent_bytes = own.data.nbytes + TAIL_BYTES if own is not None else 0
        with pacer(tier, sent_bytes) if own is not None else nullcontext():
            under_way = _sends(own, self._keeper, self._group) + _receives(kept, self._kept, self._group)
            # The checksum is computed while the part travels.
            if own is not None:
                raw: Any = own.data.numpy()
                crc = zlib.crc32(raw, zlib.crc32(own.header))
                tails[self._world.rank][:] = torch.tensor([self._snapshot.num_updates, crc])
                under_way.append(dist.isend(tails[self._world.rank], self._keeper, group=self._group))
            if kept is not None:
                under_way.append(dist.irecv(tails[self._kept], self._kept, group=self._group))
            for message in under_way:
                message.wait()
        if own is not None:
            self._engine.comm.ledger.add(MessageClass.PEER_COPY, tier, sent_bytes)
            self._engine.runner.declared_bytes[MessageClass.PEER_COPY, tier] += self._snapshot.num_bytes + TAIL_BYTES
        for rank, file in slot.items():
            write_list(file.path, self._manifest(rank, step, file, *tails[rank].tolist()))
        self.num_copies += 1
        if not self._is_alone:
            # Earlier lives are of no more use once all ranks have a copy of this one.
            self._engine.comm.exchange(None)
            self._is_alone = True
            if self._is_first:
                clear(self.folder, keep=lambda name: name.startswith(self._life))
        return time.perf_counter() - begin_s

    def close(self) -> None:
        """Free the memory on all machines."""
        # No rank of this host may still be writing.
        self._engine.comm.exchange(None)
        self._slots = []
        if self._is_first:
            clear(self.folder)

    def _agree_on_life(self, run_folder: Path) -> tuple[str, str]:
        made, problem = ("", ""), ""
        if self._world.rank == 0:
            try:
                made = new_life(run_folder)
            except OSError as error:
                problem = error.strerror or str(error)
        run, life, problem = self._engine.comm.exchange([*made, problem])[0]
        if problem:
            raise CheckpointError(f"cannot write the id of the copies in memory into {run_folder}: {problem}")
        return str(run), str(life)

    def _clear_slots(self) -> None:
        # Those of earlier lives: their files have been brought together in a folder of a step, or are of no use.
        clear(self.folder, keep=lambda name: ".step-" in name)
        make_private(self.folder)

    def _take_memory(self) -> None:
        self._slots += [self._slot(number) for number in range(SLOTS)]
        # A restart keeps the copy that it resumed until one of its own is complete, so there must be room for a third.
        # After a restart that copy exists.
        if not any(".step-" in path.name for path in self.folder.iterdir()):
            for file in self._slot(SLOTS).values():
                self._spare.append(file.path)
        self._engine.comm.meter.add(MEMORY, self.memory_bytes)

    def _take_residuals(self, number: int) -> None:
        # Messages of the first step have made residuals since, so both slots get larger files, one after the other.
        if self.num_copies == 1:
            self._snapshot.lay_out()
            self._swap_parts()
        before_bytes = self.memory_bytes
        for file in self._slots[number].values():
            for path in (file.path.with_suffix(".json"), file.path):
                path.unlink(missing_ok=True)
        # Its memory goes back before more is taken.
        self._slots[number] = {}
        self._slots[number] = self._slot(number)
        self._engine.comm.meter.add(MEMORY, self.memory_bytes - before_bytes)

    def _slot(self, number: int) -> dict[int, MemoryFile]:
        place, slot = self.folder / f"{self._life}.{number}", dict[int, MemoryFile]()
        make_private(place)
        for rank, part in self._parts.items():
            if part["num_bytes"]:
                slot[rank] = MemoryFile(place / file_of(rank), part["header"].encode("latin-1"), part["num_bytes"])
        return slot

    def _manifest(self, rank: int, step: int, file: MemoryFile, num_updates: int, crc: int) -> dict[str, Any]:
        num_bytes = len(file.header) + file.data.nbytes
        entry = {"num_bytes": num_bytes, "crc32": f"{crc:08x}", "pieces": self._parts[rank]["pieces"]}
        files: Files = {file.path.name: entry}
        state = self._engine.state
        manifest = manifest_of(state.specs, state.settings, step, num_updates, self._facts, files)
        manifest |= {"feedback": self._feedback, "stored": self._stored, "life": self._life}
        return manifest | self._snapshot.loss_scale

    def _swap_parts(self) -> None:
        # Headers and pieces are the same for most copies, so they do not travel with each.
        taken = self._snapshot
        own = {"num_bytes": taken.num_bytes, "header": taken.header.decode("latin-1"), "pieces": taken.pieces}
        self._parts = {self._world.rank: own, self._kept: self._swap(own)}

    def _swap(self, own: Mapping[str, Any]) -> dict[str, Any]:
        raw = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
        sizes = torch.tensor([raw.numel()]), torch.zeros(1, dtype=torch.int64)
        self._send_and_receive(*sizes)
        received = torch.empty(int(sizes[1]), dtype=torch.uint8)
        self._send_and_receive(raw, received)
        return dict(json.loads(bytes(received.numpy())))

    def _send_and_receive(self, own: Tensor, other: Tensor) -> None:
        messages: list[Any] = [dist.isend(own, self._keeper, group=self._group)]
        messages.append(dist.irecv(other, self._kept, group=self._group))
        for message in messages:
            message.wait()

    def _say(self, problem: str | None) -> None:
        need_mb = (SLOTS + 1) * sum(part["num_bytes"] for part in self._parts.values()) / 1e6
        told = self._engine.comm.exchange([problem, need_mb])
        for rank, (why, rank_mb) in enumerate(told):
            if why is not None:
                if self._is_first:
                    clear(self.folder, keep=lambda name: not name.startswith(self._life))
                raise ConfigError(
                    f"rank {rank} on {self._world.hosts[rank]} cannot keep copies in memory ({why}): they take "
                    f"{rank_mb:.3g} MB of {ROOT}, a third for a restart included; make room there, or set "
                    "train.peer_copies = 0"
                )


def gather_files(state: ModelState, checkpoint: Checkpoint, world: World, exchange: Callable[[Any], list[Any]]) -> int:
    """Move the files that this host's ranks need into a checkpoint's memory folder.

    Returns the bytes that all ranks received. Every rank calls this, after the first rank of every host has placed
    its files. Raises `CheckpointError` on every rank if a file is on no host or arrives damaged.
    """
    slices = slices_of(state.program.mesh, state.rank)
    needed = set[str]()
    for flat in state:
        # Copies in memory hold no islands, so these begin at the anchor.
        needed |= checkpoint.files_of(flat.name, wanted_parts(flat, checkpoint, slices))
    for block, part in choices_of(state.program, state.choices):
        if checkpoint.has(block, CHOICES):
            needed |= checkpoint.files_of(block, [part])
    # The residuals of error feedback are of use to the rank that made them alone.
    if checkpoint.feedback and checkpoint.feedback == digest(state.program):
        needed |= {file_of(state.rank)} & checkpoint.files.keys()
    firsts = {host: world.hosts.index(host) for host in dict.fromkeys(world.hosts)}
    first = firsts[world.hosts[world.rank]]
    here = present(checkpoint.folder) if world.rank == first else []
    told = exchange([sorted(needed), here])
    # By first rank: what its host has, and what its ranks need.
    has = {rank: set(told[rank][1]) for rank in firsts.values()}
    wants = {rank: set[str]() for rank in firsts.values()}
    for rank, (names, _) in enumerate(told):
        wants[firsts[world.hosts[rank]]] |= set(names)
    received, problem = 0, None
    # Every rank makes a group, since torch names groups by how many a rank has.
    group = _group(tuple(firsts.values()) if world.rank == first else (world.rank,), _MOVE_TIMEOUT)
    # All in one order, so that senders and receivers meet.
    for name in checkpoint.files:
        holders = [rank for rank, names in has.items() if name in names]
        for number, to in enumerate(rank for rank in wants if name in wants[rank] - has[rank]):
            if not holders:
                problem = f"no machine holds {name}"
            elif world.rank in (to, holders[number % len(holders)]):
                num_bytes, why = _move(checkpoint, name, holders[number % len(holders)], to, world.rank, group)
                received, problem = received + num_bytes, problem or why
    ends = exchange([problem, received])
    for rank, (why, _) in enumerate(ends):
        if why is not None:
            raise CheckpointError(
                f"rank {rank} cannot go on from the copies in memory: {why}; delete {checkpoint.folder.parent} on "
                f"{world.hosts[rank]} to go on from disk"
            )
    return sum(size for _, size in ends)


def _move(checkpoint: Checkpoint, name: str, source: int, to: int, rank: int, group: Any) -> tuple[int, str | None]:
    path, entry = checkpoint.folder / name, checkpoint.files[name]
    if rank == source:
        pieces = torch.split(mapped_file(path), _MOVE_BYTES)
        sent: list[Any] = [dist.isend(piece, to, group=group) for piece in pieces]
        for message in sent:
            message.wait()
        return 0, None
    problem, crc = None, 0
    try:
        path.unlink(missing_ok=True)
        data = MemoryFile(path, b"", entry["num_bytes"]).data
    except OSError as error:
        # The sender must not wait for a machine without room.
        data, problem = torch.empty(entry["num_bytes"], dtype=torch.uint8), error.strerror or str(error)
    chunks = torch.split(data, _MOVE_BYTES)
    # Checked while it is in the processor's cache and the next ones travel.
    under_way: list[Any] = [dist.irecv(chunk, source, group=group) for chunk in chunks]
    for message, chunk in zip(under_way, chunks, strict=True):
        message.wait()
        raw: Any = chunk.numpy()
        crc = zlib.crc32(raw, crc)
    if problem is None and f"{crc:08x}" != entry["crc32"]:
        problem = f"{path} arrived damaged (its checksum differs)"
    if problem is None:
        try:
            manifest = decode((checkpoint.folder / MANIFEST).read_text(encoding="utf-8"))
            write_list(path, {**manifest, "files": {name: entry}})
        except OSError as error:
            problem = error.strerror or str(error)
    return data.nbytes, problem


def _sends(file: MemoryFile | None, to: int, group: Any) -> list[Any]:
    return [] if file is None else [dist.isend(chunk, to, group=group) for chunk in _chunks(file.data)]


def _receives(file: MemoryFile | None, source: int, group: Any) -> list[Any]:
    return [] if file is None else [dist.irecv(chunk, source, group=group) for chunk in _chunks(file.data)]


def _chunks(data: Tensor) -> Sequence[Tensor]:
    return torch.split(data, _CHUNK_BYTES)


def _group(ranks: Sequence[int], timeout: timedelta) -> Any:
    # Gloo also where the steps use NCCL, which cannot send main memory.
    return dist.new_group(list(ranks), timeout=timeout, backend="gloo", use_local_synchronization=True)
