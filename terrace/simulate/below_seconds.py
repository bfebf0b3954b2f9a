"""Seconds of what an instruction reads below the device, writes there, or updates on the host's cores."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from terrace.plan.flats import FlatParamSpec
from terrace.plan.keep import HOST
from terrace.plan.kept import Traffic, groups, is_exact, updated_bytes
from terrace.plan.state_bytes import rests_rows
from terrace.program.kept import rows_of
from terrace.program.phase import Phase
from terrace.simulate.layers import recoding_bytes
from terrace.simulate.priced_instruction import NO_STREAM, Stream

if TYPE_CHECKING:
    from terrace.program.program import Program


def passed_stream(program: "Program", found: Traffic, update_s: float) -> Stream:
    """The pieces of `found`, which pass the ring, with `update_s` of computing in all."""
    medium, number = program.cluster.device.below[program.plan.keep.optimizer], found.num_pieces
    read_s, write_s = medium.read_s(found.num_bytes), medium.write_s(found.num_bytes)
    return Stream(number, read_s / number, write_s / number, update_s / number)


def moved_stream(program: "Program", of_params: tuple[int, int], of_gradients: int) -> Stream:
    """Seconds of parameters of so many bytes, read and written, or of gradients that are written."""
    (read, written), keep, media = of_params, program.plan.keep, program.cluster.device.below
    if of_gradients:
        return Stream(0, 0.0, media[keep.grads].write_s(of_gradients))
    if not read and not written:
        return NO_STREAM
    read = written if program.phase is Phase.RESTORE else read
    return Stream(0, media[keep.params].read_s(read), media[keep.params].write_s(written))


def looked_up_stream(program: "Program", block: int) -> Stream:
    """Seconds of rows below the device: read by one forward of a block, and written behind its update."""
    keep, num_micros = program.plan.keep, program.num_micros
    if not any(rests_rows(program.plan, flat) for flat in program.model.flats[block]):
        return NO_STREAM
    medium, rows = program.cluster.device.below[keep.table], rows_of(program.model, program.counts, block)
    # Of the host's memory an update reads records, too, before it writes them.
    return Stream(
        0,
        medium.pages_read_s(rows.pages_read, rows.looked_up) / num_micros,
        medium.pages_written_s(rows.pages_written, rows.written),
        medium.read_s(rows.read),
    )


def host_update_seconds(program: "Program", on_device_s: Sequence[float]) -> tuple[float, ...]:
    """Seconds in which the host's cores update a rank's shard of every block; of others, those of the device."""
    host = program.cluster.device.below[HOST]
    update_s = program.model.of_flats(lambda flats: host.update_s(sum(_bytes(program, flat) for flat in flats)))
    return tuple(
        own_s if updates_on_cores(program, block) else device_s
        for block, (own_s, device_s) in enumerate(zip(update_s, on_device_s, strict=True))
    )


def updates_on_cores(program: "Program", block: int) -> bool:
    """Whether the host's cores update a block. Rows of a table are updated on the device."""
    trained = [flat for flat in program.model.flats[block] if flat.trainable]
    return program.plan.keep.updates_on_host and not (trained and all(flat.is_spread for flat in trained))


def _bytes(program: "Program", flat: FlatParamSpec) -> float:
    states = ((group.numel, stored) for group in groups(program.plan, flat) for stored in group.formats)
    again = sum(numel * recoding_bytes(stored, on_cpu=True) for numel, stored in states if not is_exact([stored]))
    return updated_bytes(program.plan, flat) + again
