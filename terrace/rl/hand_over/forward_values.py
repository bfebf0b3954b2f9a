"""A rank's shard of the parameters as forwards see it, which the wire formats of a gather may have rounded.

Training gathers parameters in wire formats, and every rank rounds its own shard as well (terrace.comm.collectives).
Generation must use the same values:

    a dtype          rounds each element: done here, on the rank's shard
    a block format   whose blocks are the rank's whole shard or end where shards do: encoded and decoded here
    a block format   whose blocks span several ranks' shards, after an outer tier in another format: gathered

The last is a forward's gather, and its bytes are declared like those.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from terrace.comm import codecs
from terrace.comm.collectives import DTYPES
from terrace.plan.hops import encodings
from terrace.program.instruction import Instruction, Op
from terrace.program.message import Transfer

if TYPE_CHECKING:
    from terrace.runtime.engine import Engine
    from terrace.runtime.flat_param import FlatParam


def gather_of(engine: "Engine", block: int, flat: "FlatParam") -> Transfer | None:
    """The gather of a flat buffer before a forward; None if it changes no value."""
    place = engine.state.flats[block].index(flat)
    transfers = engine.program.message(Instruction(Op.GATHER, block)).transfers
    found = next((each for each in transfers if each.flat == place), None)
    return found if found is not None and _rounds(found, flat.shard.dtype) else None


def _rounds(transfer: Transfer, dtype: torch.dtype) -> bool:
    return any(hop.wire.block or DTYPES[hop.wire.codec] != dtype for hop in transfer.gathering)


def forward_values(engine: "Engine", block: int, flat: "FlatParam") -> Tensor:
    """This rank's shard of `flat` as forwards see it; `flat.shard` itself if nothing rounds it.

    Every rank of the engine calls this for the same buffers in the same order, since some may be gathered.
    """
    transfer = gather_of(engine, block, flat)
    if transfer is None:
        return flat.shard
    if not _is_local(flat, transfer):
        return _gathered(engine, block, flat, transfer)
    values = flat.shard
    for run in encodings(transfer.gathering):
        wire = run[0].wire
        if wire.block and not wire.packed:
            coded = torch.empty(1, wire.message_bytes(values.numel()), dtype=torch.uint8, device=values.device)
            codecs.encode(values.view(1, -1), wire, coded)
            values = torch.empty_like(values)
            codecs.decode(coded, wire, values.view(1, -1))
        else:
            values = values.to(DTYPES[wire.codec]).to(values.dtype)
    return values


def in_dtypes(values: Tensor, transfer: Transfer) -> Tensor:
    """Round `values`, on any device, as a gather in dtypes does."""
    for hop in transfer.gathering:
        values = values.to(DTYPES[hop.wire.codec]).to(values.dtype)
    return values


def _is_local(flat: "FlatParam", transfer: Transfer) -> bool:
    later = [run[0] for run in encodings(transfer.gathering) if run[0].tier != transfer.gathering[0].tier]
    return not any(hop.wire.block and flat.shard.numel() % hop.wire.block for hop in later)


def _gathered(engine: "Engine", block: int, flat: "FlatParam", transfer: Transfer) -> Tensor:
    tiers = engine.program.layout.tiers
    for hop in transfer.gathering:
        engine.runner.declared_bytes[transfer.message_class, tiers[hop.tier]] += hop.sent_bytes
    flat.gather(engine.comm.collectives, transfer, False)
    values = flat.full[flat.part(flat.layout.params)].clone()
    flat.free()
    return values
