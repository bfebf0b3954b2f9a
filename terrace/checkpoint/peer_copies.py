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
from terrace.checkpoint.layout import Files, decode, form_of, manifest_of
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


class KeeperLink:
    """Messages of a rank to its keeper, and from the rank that it keeps."""

    def __init__(self, partners: Partners, rank: int, timeout: timedelta) -> None:
        self.rank, self.keeper, self.kept = rank, partners.keeper(rank), partners.kept(rank)
        self._group = _group(partners.members(rank), timeout)

    def swap(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Send a small JSON-serialisable value; returns the other rank's."""
        raw = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
        sizes = torch.tensor([raw.numel()]), torch.zeros(1, dtype=torch.int64)
        self._send_and_receive(*sizes)
        received = torch.empty(int(sizes[1]), dtype=torch.uint8)
        self._send_and_receive(raw, received)
        return dict(json.loads(bytes(received.numpy())))

    def copy(self, slot: Mapping[int, MemoryFile], num_updates: int) -> dict[int, tuple[int, int]]:
        """Send the own file of a slot and receive the kept one. Returns the updates and the checksum of each."""
        own, kept = slot.get(self.rank), slot.get(self.kept)
        tails = {rank: torch.zeros(TAIL_BYTES // 8, dtype=torch.int64) for rank in slot}
        under_way: list[Any] = []
        if own is not None:
            under_way += [dist.isend(chunk, self.keeper, group=self._group) for chunk in _chunks(own.data)]
        if kept is not None:
            under_way += [dist.irecv(chunk, self.kept, group=self._group) for chunk in _chunks(kept.data)]
        # The checksum is computed while the part travels.
        if own is not None:
            raw: Any = own.data.numpy()
            crc = zlib.crc32(raw, zlib.crc32(own.header))
            tails[self.rank][:] = torch.tensor([num_updates, crc])
            under_way.append(dist.isend(tails[self.rank], self.keeper, group=self._group))
        if kept is not None:
            under_way.append(dist.irecv(tails[self.kept], self.kept, group=self._group))
        for message in under_way:
            message.wait()
        return {rank: (int(tail[0]), int(tail[1])) for rank, tail in tails.items()}

    def _send_and_receive(self, own: Tensor, other: Tensor) -> None:
        messages: list[Any] = [dist.isend(own, self.keeper, group=self._group)]
        messages.append(dist.irecv(other, self.kept, group=self._group))
        for message in messages:
            message.wait()


class Slots:
    """The memory of a rank's copies: in each slot a file of its own and one of the rank that it keeps.

    `parts` has the size, header and pieces of each file, by rank.
    """

    def __init__(self, folder: Path, life: str, parts: Mapping[int, Mapping[str, Any]]) -> None:
        self.folder, self.life, self.parts = folder, life, parts
        self._files: list[dict[int, MemoryFile]] = []

    def __getitem__(self, number: int) -> dict[int, MemoryFile]:
        return self._files[number]

    @property
    def num_bytes(self) -> int:
        """Main memory of the files, without headers."""
        return sum(file.data.nbytes for slot in self._files for file in slot.values())

    def clear(self) -> None:
        """Remove the files of earlier lives, but not the copy that a restart has resumed."""
        # Those of earlier lives: their files have been brought together in a folder of a step, or are of no use.
        clear(self.folder, keep=lambda name: ".step-" in name)
        make_private(self.folder)

    def take(self) -> list[Path]:
        """Take the memory of all slots. Returns the files of one more, for which there must be room.

        A restart keeps the copy that it resumed until one of its own is complete. After a restart that copy exists.
        """
        self._files += [self._make(number) for number in range(SLOTS)]
        if any(".step-" in path.name for path in self.folder.iterdir()):
            return []
        return [file.path for file in self._make(SLOTS).values()]

    def replace(self, number: int) -> None:
        """Give a slot files of the sizes that `parts` have now."""
        for file in self._files[number].values():
            for path in (file.path.with_suffix(".json"), file.path):
                path.unlink(missing_ok=True)
        # Its memory goes back before more is taken.
        self._files[number] = {}
        self._files[number] = self._make(number)

    def forget(self) -> None:
        self._files = []

    def _make(self, number: int) -> dict[int, MemoryFile]:
        place, slot = self.folder / f"{self.life}.{number}", dict[int, MemoryFile]()
        make_private(place)
        for rank, part in self.parts.items():
            if part["num_bytes"]:
                slot[rank] = MemoryFile(place / file_of(rank), part["header"].encode("latin-1"), part["num_bytes"])
        return slot


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
        self._engine, self._hosts, self._facts, self.partners = engine, world.hosts, facts, partners
        self._form = {"feedback": digest(engine.program), **form_of(engine.program.plan, engine.state.specs)}
        self._tier = engine.program.cluster.tiers[partners.tier].name
        self._link = KeeperLink(partners, world.rank, timeout)
        self._snapshot = snapshot_of(engine.state)
        # A resumed run brings its residuals.
        self._snapshot.lay_out()
        self.num_copies = 0
        self._is_first = world.hosts.index(world.hosts[world.rank]) == world.rank
        run, life = _agree_on_life(engine, run_folder)
        self._slots = Slots(memory_folder(run, run_folder, world.hosts[world.rank]), life, self._swapped_parts())
        self._say(attempt(self._slots.clear) if self._is_first else "")
        spare = list[Path]()
        self._say(attempt(lambda: spare.extend(self._slots.take())))
        engine.comm.meter.add(MEMORY, self.memory_bytes)
        # All ranks have had room for it at once.
        for path in spare:
            path.unlink()

    @property
    def folder(self) -> Path:
        return self._slots.folder

    @property
    def own_bytes(self) -> int:
        """Current bytes of this rank's part, without its header."""
        return int(self._slots.parts[self._link.rank]["num_bytes"])

    @property
    def memory_bytes(self) -> int:
        """Main memory of this rank's copies, without headers."""
        return self._slots.num_bytes

    def copy(self, step: int) -> float:
        """Copy the state after `step` steps. Returns the seconds taken. Raises `OSError`."""
        begin_s = time.perf_counter()
        # Work may still be queued on lanes and streams.
        self._engine.drain()
        number = self.num_copies % SLOTS
        if self._form["feedback"] and 0 < self.num_copies <= SLOTS:
            self._take_residuals(number)
        slot, comm = self._slots[number], self._engine.comm
        for file in slot.values():
            file.path.with_suffix(".json").unlink(missing_ok=True)
        own, sent_bytes = slot.get(self._link.rank), 0
        if own is not None:
            self._snapshot.take_into(own.data)
            sent_bytes = own.data.nbytes + TAIL_BYTES
        with comm.pacer(self._tier, sent_bytes) if own is not None else nullcontext():
            tails = self._link.copy(slot, self._snapshot.num_updates)
        if own is not None:
            comm.ledger.add(MessageClass.PEER_COPY, self._tier, sent_bytes)
            declared = self._engine.runner.declared_bytes
            declared[MessageClass.PEER_COPY, self._tier] += self._snapshot.num_bytes + TAIL_BYTES
        for rank, file in slot.items():
            write_list(file.path, self._manifest(rank, step, file, *tails[rank]))
        self.num_copies += 1
        if self.num_copies == 1:
            # Earlier lives are of no more use once all ranks have a copy of this one.
            comm.exchange(None)
            if self._is_first:
                clear(self.folder, keep=lambda name: name.startswith(self._slots.life))
        return time.perf_counter() - begin_s

    def close(self) -> None:
        # No rank of this host may still be writing.
        self._engine.comm.exchange(None)
        self._slots.forget()
        if self._is_first:
            clear(self.folder)

    def _take_residuals(self, number: int) -> None:
        # Messages of the first step have made residuals since, so both slots get larger files, one after the other.
        if self.num_copies == 1:
            self._snapshot.lay_out()
            self._slots.parts = self._swapped_parts()
        before_bytes = self.memory_bytes
        self._slots.replace(number)
        self._engine.comm.meter.add(MEMORY, self.memory_bytes - before_bytes)

    def _manifest(self, rank: int, step: int, file: MemoryFile, num_updates: int, crc: int) -> dict[str, Any]:
        num_bytes = len(file.header) + file.data.nbytes
        entry = {"num_bytes": num_bytes, "crc32": f"{crc:08x}", "pieces": self._slots.parts[rank]["pieces"]}
        files: Files = {file.path.name: entry}
        state = self._engine.state
        manifest = manifest_of(state.specs, state.settings, step, num_updates, self._facts, files)
        return manifest | self._form | {"life": self._slots.life} | self._snapshot.loss_scale

    def _swapped_parts(self) -> dict[int, dict[str, Any]]:
        # Headers and pieces are the same for most copies, so they do not travel with each.
        taken = self._snapshot
        own = {"num_bytes": taken.num_bytes, "header": taken.header.decode("latin-1"), "pieces": taken.pieces}
        return {self._link.rank: own, self._link.kept: self._link.swap(own)}

    def _say(self, problem: str) -> None:
        need_mb = (SLOTS + 1) * sum(part["num_bytes"] for part in self._slots.parts.values()) / 1e6
        reports = self._engine.comm.exchange([problem, need_mb])
        for rank, (why, rank_mb) in enumerate(reports):
            if why:
                if self._is_first:
                    clear(self.folder, keep=lambda name: not name.startswith(self._slots.life))
                raise ConfigError(
                    f"rank {rank} on {self._hosts[rank]} cannot keep copies in memory ({why}): they take "
                    f"{rank_mb:.3g} MB of {ROOT}, a third for a restart included; make room there, or set "
                    "train.peer_copies = 0"
                )


def _agree_on_life(engine: "Engine", run_folder: Path) -> tuple[str, str]:
    """The names of the run and of this start of it, made by rank 0. Raises `CheckpointError` on every rank."""
    made, problem = ("", ""), ""
    if engine.rank == 0:
        try:
            made = new_life(run_folder)
        except OSError as error:
            problem = error.strerror or str(error)
    run, life, problem = engine.comm.exchange([*made, problem])[0]
    if problem:
        raise CheckpointError(f"cannot write the id of the copies in memory into {run_folder}: {problem}")
    return str(run), str(life)


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
    received, problem = 0, ""
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
        if why:
            raise CheckpointError(
                f"rank {rank} cannot go on from the copies in memory: {why}; delete {checkpoint.folder.parent} on "
                f"{world.hosts[rank]} to go on from disk"
            )
    return sum(size for _, size in ends)


def _move(checkpoint: Checkpoint, name: str, source: int, to: int, rank: int, group: Any) -> tuple[int, str]:
    path, entry = checkpoint.folder / name, checkpoint.files[name]
    if rank == source:
        pieces = torch.split(mapped_file(path), _MOVE_BYTES)
        sent: list[Any] = [dist.isend(piece, to, group=group) for piece in pieces]
        for message in sent:
            message.wait()
        return 0, ""
    problem, crc = "", 0
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
    if not problem and f"{crc:08x}" != entry["crc32"]:
        problem = f"{path} arrived damaged (its checksum differs)"
    if not problem:
        try:
            manifest = decode((checkpoint.folder / MANIFEST).read_text(encoding="utf-8"))
            write_list(path, {**manifest, "files": {name: entry}})
        except OSError as error:
            problem = error.strerror or str(error)
    return data.nbytes, problem


def _chunks(data: Tensor) -> Sequence[Tensor]:
    return torch.split(data, _CHUNK_BYTES)


def _group(ranks: Sequence[int], timeout: timedelta) -> Any:
    # Gloo also where the steps use NCCL, which cannot send main memory.
    return dist.new_group(list(ranks), timeout=timeout, backend="gloo", use_local_synchronization=True)
