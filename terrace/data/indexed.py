"""Megatron's indexed data sets, `NAME.bin` with `NAME.idx`: used in place, without a copy.

`.bin` holds the ids of all documents, concatenated. `.idx` is, little-endian,

    9 bytes "MMIDIDX", 0, 0     u64 version, 1     u8 code of the dtype     u64 sequences S     u64 documents D + 1
    i32 x S tokens of a sequence     i64 x S where it begins in .bin, in bytes     i64 x (D + 1) first sequence of each

The first use scans the ids for their maximum, their digest and their checksums. These, and the document starts, are
kept in the cache under the sizes and times of the two files.
"""

import hashlib
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from terrace.base.errors import DataError
from terrace.base.files import write_atomic
from terrace.data.cache import Description, cache_file, made_once
from terrace.data.originals import Originals
from terrace.data.token_file import Stored, TokenFile

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<QBQQ")  # version, dtype, sequences, documents + 1
_HEADER_BYTES = len(_MAGIC) + _HEADER.size
_DTYPES: dict[int, Stored] = {1: "uint8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_SUFFIXES = (".bin", ".idx")
_CHUNK = 1 << 24  # ids scanned at a time
_FORMAT = "terrace-indexed-2"


def is_indexed(path: str | Path) -> bool:
    """Whether `path` names an indexed data set: either of its files, or their common prefix."""
    prefix = _prefix(path)
    return prefix.with_name(prefix.name + ".idx").is_file() and not Path(path).is_dir()


def indexed_files(path: str | Path) -> tuple[Path, Path]:
    """The ids file and the index file of the data set that `path` names."""
    prefix = _prefix(path)
    ids_file, index_file = (prefix.with_name(prefix.name + suffix) for suffix in _SUFFIXES)
    return ids_file, index_file


def open_indexed(path: str | Path, cache_dir: str | Path) -> TokenFile:
    """The token file of an indexed data set.

    Its ids are assumed to be those of the run's tokenizer. Raises `DataError` for a file that is missing, damaged, of
    another version, with ids that are not integers, or with more than text in it.
    """
    prefix = _prefix(path)
    ids_file, index_file = indexed_files(path)
    try:
        status = [(file.stat().st_size, file.stat().st_mtime_ns) for file in (ids_file, index_file)]
        dtype, starts = _read_index(index_file, ids_file, status[0][0])
    except OSError as error:
        raise DataError(f"cannot read data {error.filename}: {error.strerror}; keep .bin and .idx together") from error
    # The ids are used in place; document starts, checksums and a description are cached.
    num_tokens = status[0][0] // np.dtype(dtype).itemsize
    target = cache_file(cache_dir, prefix.name, [_FORMAT, str(prefix.resolve()), status], ".starts")

    def opened(description: Description) -> TokenFile:
        return TokenFile(
            path=ids_file,
            dtype=dtype,
            num_tokens=num_tokens,
            max_token=description.max_token,
            digest=description.digest,
            num_documents=description.num_documents,
            starts=target,
            sums_digest=description.sums,
            mask=None,
        )

    return made_once(
        target,
        (".starts",),
        Description,
        lambda _: _scan(target, ids_file, dtype, num_tokens, starts),
        opened,
        Originals(prefix, lambda: (ids_file, index_file)),
    )


def _prefix(path: str | Path) -> Path:
    path = Path(path)
    return path.with_suffix("") if path.suffix in _SUFFIXES else path


def _read_index(index_file: Path, ids_file: Path, num_bytes: int) -> tuple[Stored, npt.NDArray[np.int64]]:
    raw = index_file.read_bytes()

    def damaged(reason: str) -> DataError:
        return DataError(f"{index_file} is damaged or of another kind: {reason}; make it again with its .bin")

    if raw[: len(_MAGIC)] != _MAGIC:
        raise damaged("it does not begin with MMIDIDX")
    if len(raw) < _HEADER_BYTES:
        raise damaged(f"it has {len(raw)} bytes")
    version, code, num_sequences, num_bounds = _HEADER.unpack_from(raw, len(_MAGIC))
    if version != 1:
        raise DataError(f"{index_file} has version {version}, and only version 1 is known: convert the data set")
    if code not in _DTYPES:
        raise DataError(
            f"{index_file} has dtype code {code}, which is none of {sorted(_DTYPES)}, for integers of tokens"
        )
    expected = _HEADER_BYTES + 12 * num_sequences + 8 * num_bounds
    # One more byte per sequence: the modes of multimodal data.
    if len(raw) == expected + num_sequences:
        raise DataError(f"{index_file} holds modes of sequences, as of images beside text: only text is implemented")
    if len(raw) != expected:
        raise damaged(f"{num_sequences} sequences and {num_bounds} bounds take {expected} bytes, and it has {len(raw)}")
    # Three arrays follow the header: tokens of a sequence, its byte offset, and the first sequence of each document.
    at = _HEADER_BYTES
    sizes = np.frombuffer(raw, "<i4", num_sequences, at).astype(np.int64)
    pointers = np.frombuffer(raw, "<i8", num_sequences, at + 4 * num_sequences)
    bounds = np.frombuffer(raw, "<i8", num_bounds, at + 12 * num_sequences)
    dtype = _DTYPES[code]
    ends = np.cumsum(sizes)
    begins = ends - sizes
    # Ids are mapped as one array, which needs sequences without gaps.
    if (sizes < 0).any() or not np.array_equal(pointers, begins * np.dtype(dtype).itemsize):
        raise damaged("its sequences do not follow one another")
    if num_sequences == 0 or ends[-1] == 0:
        raise DataError(f"{index_file} holds no tokens; give a data set with text")
    if ends[-1] * np.dtype(dtype).itemsize != num_bytes:
        raise DataError(
            f"{ids_file} has {num_bytes} bytes, but the {ends[-1]} tokens of {index_file.name} take "
            f"{ends[-1] * np.dtype(dtype).itemsize}; the two do not belong together"
        )
    firsts = bounds[:-1]
    if num_bounds < 2 or bounds[0] != 0 or bounds[-1] != num_sequences or (np.diff(bounds) < 0).any():
        raise damaged("its documents do not cover its sequences")
    starts = np.unique(begins[firsts[firsts < num_sequences]])  # a document without tokens begins where the next does
    return dtype, starts[starts < ends[-1]]


def _scan(target: Path, ids_file: Path, dtype: Stored, num_tokens: int, starts: npt.NDArray[np.int64]) -> Description:
    ids = np.memmap(ids_file, dtype=np.dtype(dtype).newbyteorder("<"), mode="r", shape=(num_tokens,))
    digest, largest = hashlib.blake2b(f"{dtype}".encode(), digest_size=16), -1
    # In chunks, so that memory stays bounded.
    for first in range(0, num_tokens, _CHUNK):
        part = np.asarray(ids[first : first + _CHUNK])
        if int(part.min()) < 0:
            raise DataError(f"{ids_file} holds the negative token {part.min()}; it is damaged, make it again")
        largest = max(largest, int(part.max()))
        digest.update(part.tobytes())
    digest.update(starts.astype("<i8").tobytes())
    write_atomic(target, starts.astype("<i8").tobytes())
    return Description(format=_FORMAT, max_token=largest, digest=digest.hexdigest(), num_documents=len(starts))
