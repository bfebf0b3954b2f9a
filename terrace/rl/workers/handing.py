"""Plans hand-overs from engine settings alone, without processes: for layouts, and for sender and receiver."""

from collections.abc import Sequence
from pathlib import Path

from terrace.comm.ledger import Ledger
from terrace.model.blocks import block_specs
from terrace.plan.wire import MessageClass
from terrace.program.lowering import build_stages
from terrace.rl.hand_over.transition import Apart, Transition
from terrace.rl.workers.settings import EngineSettings

MEET_S = 120.0  # for the ranks of two pools to meet


def transition_of(settings: EngineSettings, rows: int, apart: Apart | None = None) -> Transition:
    """Plan the hand-over from an engine to replicas of `rows` tensor ranks; raises `PlanError` as `HandOver` does."""
    specs = block_specs(settings.model)
    programs = build_stages(settings.cluster, settings.plan, specs, settings.num_micros, settings.sequence)
    held = [set(program.stage.held) for program in programs]
    return Transition.of(settings.cluster, settings.plan, specs, programs[0].model.flats, held, rows, apart=apart)


def weights_folder(handed: str, version: int) -> Path:
    """The folder of a version of the weights that servers load; `handed` is that of a run and of one of its starts."""
    return Path(f"{handed}-{version:08d}")


def reshard_bytes(ledger: Ledger) -> int:
    """Bytes that this rank has sent in hand-overs."""
    return sum(size for (message, _), size in ledger.total().items() if message is MessageClass.RESHARD)


def bytes_of_all(by_rank: Sequence[Sequence[int]]) -> dict[str, float]:
    """Sum each rank's (planned, sent) bytes to `bytes_planned` and `bytes_sent`."""
    planned, sent = map(sum, zip(*by_rank, strict=True))
    return {"bytes_planned": float(planned), "bytes_sent": float(sent)}
