"""Seconds of what an instruction reads below the device, writes there, or updates on the host's cores."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from terrace.plan.flats import FlatParamSpec
from terrace.plan.keep import HOST
from terrace.plan.kept import Traffic, groups, is_exact, updated_bytes
from terrace.program.instruction import Phase
from terrace.simulate.below import updates_on_cores
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


def host_update_seconds(program: "Program", on_device_s: Sequence[float]) -> tuple[float, ...]:
    """Seconds in which the host's cores update a rank's shard of every block; of others, those of the device."""
    host = program.cluster.device.below[HOST]
    update_s = program.model.of_flats(lambda flats: host.update_s(sum(_bytes(program, flat) for flat in flats)))
    return tuple(
        own_s if updates_on_cores(program, block) else device_s
        for block, (own_s, device_s) in enumerate(zip(update_s, on_device_s, strict=True))
    )


def _bytes(program: "Program", flat: FlatParamSpec) -> float:
    states = ((group.numel, stored) for group in groups(program.plan, flat) for stored in group.formats)
    again = sum(numel * recoding_bytes(stored, on_cpu=True) for numel, stored in states if not is_exact([stored]))
    return updated_bytes(program.plan, flat) + again
