"""Packs whole documents into sequences with as little padding as possible.

Best fit decreasing: documents in order of decreasing length, each into the fullest sequence that still has room for it,
else into a new one. Documents of equal length are placed as a run, so the work grows with the number of distinct
lengths, at most `sequence`, not with the number of documents.

A document of L tokens takes L - 1 positions, because its last token is only a label. The result depends only on the
documents and `sequence`. It is computed once and kept with the token file.

Source: Johnson 1974 (best fit decreasing needs at most 11/9 of the fewest sequences, and a few); Ding et al. 2404.10830
(its use for training text, and the grouping by length).
"""

import errno
import math
import zlib
from bisect import bisect_left, insort
from dataclasses import astuple, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from terrace.base.errors import DataError
from terrace.base.files import open_atomic
from terrace.data.documents import Documents
from terrace.data.order import SampleOrder
from terrace.data.sources import TooLong

_MAGIC = 0x7061636B_0003  # of the file; the low digits are its version

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Counts of documents by outcome. A segment is a document, or the kept part of one."""

    num_documents: int
    num_too_long: int  # longer than a sequence: cut, split or dropped
    num_untrained: int  # segments left out because no token of them is trained on
    num_segments: int
    num_sequences: int
    num_positions: int  # of all sequences that are filled
    num_held: int = 0  # the last sequences, of documents that are held out

    def waste(self, sequence: int) -> float:
        """Share of all positions that is padding."""
        return 1 - self.num_positions / max(1, self.num_sequences * sequence)


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Segments `offsets[i]` ... `offsets[i + 1] - 1` form sequence i. Each takes `lengths` positions, from token
    `starts` on.
    """

    offsets: Ids  # (num_sequences + 1,)
    starts: Ids  # (num_segments,)
    lengths: Ids  # (num_segments,)
    tally: Tally


def pack(documents: Documents, sequence: int, too_long: TooLong, holdout: float = 0.0) -> Packing:
    """Packs `documents` into sequences of `sequence` positions.

    Documents that are too long are split over several sequences, cut or dropped, as `too_long` says. Held-out documents
    are packed separately into the last sequences; as many are held out as fill `holdout`, a share of all positions if
    below 1, else a number of sequences. Raises `DataError` for a document that is too long under "refuse", and if
    nothing is left to train on.
    """
    starts, places, num_too_long = _segments(documents, sequence, too_long)
    trained = _is_trained(documents, starts, places)
    num_untrained = int(np.count_nonzero(~trained))
    # A segment without a label would only cost attention.
    starts, places = starts[trained], places[trained]
    if not starts.size:
        raise DataError(
            f"{documents.name} has no token to train on: of {documents.num_documents} documents {num_too_long} are "
            f"longer than {sequence + 1} tokens and {num_untrained} have no trained token; give longer sequences or "
            "other data"
        )
    held = _held_out(documents, starts, places, sequence, holdout)
    kept, offsets = best_fit(places[~held], sequence)
    items, num_held = np.flatnonzero(~held)[kept], 0
    if held.any():
        others, other_offsets = best_fit(places[held], sequence)
        items = np.concatenate([items, np.flatnonzero(held)[others]])
        offsets = np.concatenate([offsets, offsets[-1] + other_offsets[1:]])
        num_held = len(other_offsets) - 1
    tally = Tally(
        num_documents=documents.num_documents,
        num_too_long=num_too_long,
        num_untrained=num_untrained,
        num_segments=len(items),
        num_sequences=len(offsets) - 1,
        num_positions=int(places.sum()),
        num_held=num_held,
    )
    return Packing(offsets=offsets, starts=starts[items], lengths=places[items], tally=tally)


def packed(documents: Documents, sequence: int, too_long: TooLong, beside: Path, holdout: float = 0.0) -> Packing:
    """Loads the packing kept beside the file `beside`, or packs and saves it. The name `beside` identifies the contents
    of `documents`.

    Raises `DataError` as `pack` does, for a damaged file, and for a folder that cannot be written.
    """
    path = beside.with_name(f"{beside.name}-{sequence}-{too_long}{f'-{holdout!r}' if holdout else ''}.packing.npy")
    if path.exists():
        return _load(path)
    packing = pack(documents, sequence, too_long, holdout)
    try:
        with open_atomic(path) as file:
            body = np.concatenate([astuple(packing.tally), packing.offsets, packing.starts, packing.lengths])
            body = body.astype("<i8")
            np.save(file, np.concatenate([np.array([_MAGIC, zlib.crc32(body.data)], dtype="<i8"), body]))
    except OSError as error:
        # A full disk and a missing permission need different fixes.
        fix = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "make the folder writable"
        raise DataError(f"cannot write {path}: {error.strerror}; {fix} or choose another data.cache") from error
    return _load(path)


def best_fit(lengths: Ids, capacity: int) -> tuple[Ids, Ids]:
    """Indices of `lengths`, shape (n,), ordered by sequence, and the offset of each sequence among them.

    Lengths lie in 1 ... capacity. Sequences are shuffled in a way that depends only on their number, so the last ones
    resemble the first; so are items of equal length.
    """
    # Shuffled before the stable sort, so that equal lengths are in no particular order.
    shuffled = SampleOrder(len(lengths), 0).sample(np.arange(len(lengths)))
    items = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    falling = lengths[items]
    bounds = [0, *(np.flatnonzero(np.diff(falling)) + 1).tolist(), len(items)]
    of_item = np.empty(len(items), dtype=np.int64)
    free: list[int] = []  # ascending free lengths; the sequences that have each are in `with_room`
    with_room: dict[int, Ids] = {}
    num_sequences = 0

    def put_back(room: int, sequences: Ids) -> None:
        if room and sequences.size:
            if room not in with_room:
                insort(free, room)
                with_room[room] = sequences
            else:
                with_room[room] = np.concatenate([with_room[room], sequences])

    # One pass for each run of equal lengths, longest first.
    for begin, end in pairwise(bounds):
        length, here = int(falling[begin]), begin
        while here < end:
            # The fullest sequences with enough room each take as many documents of the run as fit; if there are none,
            # new ones are opened.
            at = bisect_left(free, length)
            if at < len(free):
                room = free.pop(at)
                sequences = with_room.pop(room)
            else:
                room, num_new = capacity, math.ceil((end - here) / (capacity // length))
                sequences = np.arange(num_sequences, num_sequences + num_new)
                num_sequences += num_new
            each = room // length
            count = min(len(sequences) * each, end - here)
            num_used = math.ceil(count / each)
            of_item[here : here + count] = np.repeat(sequences[:num_used], each)[:count]
            # Three kinds of sequences remain: filled up, the last one partly, and untouched.
            put_back(room - each * length, sequences[: num_used - 1])
            put_back(room - (count - (num_used - 1) * each) * length, sequences[num_used - 1 : num_used])
            put_back(room, sequences[num_used:])
            here += count
    # Sequences were opened by falling length; shuffling makes a holdout at the end representative.
    of_item = SampleOrder(num_sequences, 1).sample(np.arange(num_sequences))[of_item]
    # Stable: items of a sequence stay in the order in which they were placed.
    by_sequence = np.argsort(of_item, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(of_item, minlength=num_sequences))])
    return items[by_sequence], offsets.astype(np.int64)


def _segments(documents: Documents, sequence: int, too_long: TooLong) -> tuple[Ids, Ids, int]:
    starts = np.asarray(documents.starts, dtype=np.int64)
    # A document's last token is only a label.
    places = np.diff(starts, append=len(documents.ids)) - 1
    longer = places > sequence
    num_longer = int(np.count_nonzero(longer))
    if num_longer and too_long == "refuse":
        first = int(np.flatnonzero(longer)[0])
        raise DataError(
            f"longer than a sequence: {num_longer} of the {len(starts)} documents of {documents.name}; the first is "
            f"document {first + 1} with {places[first] + 1} tokens, the longest has {places.max() + 1}, and "
            f"train.sequence = {sequence} takes {sequence + 1}; raise train.sequence, or set data.too_long to "
            '"cut", "split" or "drop"'
        )
    if too_long == "drop":
        starts, places = starts[~longer], places[~longer]
    elif too_long == "cut":
        places = np.minimum(places, sequence)
    elif num_longer:
        # Parts share a token: the last label of one is the first input of the next.
        parts = np.maximum(1, -(-places // sequence))
        inside = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
        starts = np.repeat(starts, parts) + inside * sequence
        places = np.minimum(np.repeat(places, parts) - inside * sequence, sequence)
    return starts, places, num_longer


def _held_out(documents: Documents, starts: Ids, places: Ids, sequence: int, holdout: float) -> npt.NDArray[np.bool_]:
    """Mask of the segments of held-out documents, drawn until they fill the requested share or number."""
    if not holdout:
        return np.zeros(len(starts), dtype=bool)
    owners = np.searchsorted(documents.starts, starts, side="right") - 1
    of_document = np.bincount(owners, weights=places, minlength=documents.num_documents)
    drawn = SampleOrder(documents.num_documents, 2).sample(np.arange(documents.num_documents))
    wanted = holdout * sequence if holdout >= 1 else holdout * int(places.sum())
    num_documents = int(np.searchsorted(np.cumsum(of_document[drawn]), wanted)) + 1
    held = np.zeros(documents.num_documents, dtype=bool)
    held[drawn[:num_documents]] = True
    chosen: npt.NDArray[np.bool_] = held[owners]
    if chosen.all():
        raise DataError(
            f"holdout = {holdout:g} leaves nothing to train on: {documents.name} has {documents.num_documents} "
            "documents, which are held out whole; hold out less or give more data"
        )
    return chosen


def _is_trained(documents: Documents, starts: Ids, places: Ids) -> npt.NDArray[np.bool_]:
    trained = places > 0
    if documents.mask is not None and trained.any():
        documents.check(0, len(documents.mask))
        # Sums over the runs between the bounds, of which every other one is a segment; the last may run to the end.
        bounds = np.stack([starts[trained] + 1, starts[trained] + places[trained] + 1], axis=1).ravel()
        bounds = bounds[: len(bounds) - (bounds[-1] == len(documents.mask))]
        trained[trained] = np.add.reduceat(documents.mask, bounds, dtype=np.int64)[::2] > 0
    return trained


def _load(path: Path) -> Packing:
    try:
        whole = np.load(path, mmap_mode="r", allow_pickle=False)
        num_head = 2 + len(Tally.__dataclass_fields__)
        # One int64 array: magic number, checksum of the rest, tally, offsets, starts, lengths.
        magic, crc, *counts = whole[:num_head].tolist()
        tally = Tally(**dict(zip(Tally.__dataclass_fields__, counts, strict=True)))
        body = np.asarray(whole[num_head:])
        if magic != _MAGIC or len(body) != tally.num_sequences + 1 + 2 * tally.num_segments:
            raise ValueError("not a packing of this version")
        if zlib.crc32(np.asarray(whole[2:]).data) != crc:
            raise ValueError("its checksum differs")
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error}); delete it, and it will be made again") from error
    offsets, starts, lengths = np.split(body, [tally.num_sequences + 1, tally.num_sequences + 1 + tally.num_segments])
    return Packing(offsets=offsets, starts=starts, lengths=lengths, tally=tally)
