"""The predicted forward of another model that runs before every step, on the same ranks under a plan of its own.

Its program is played as any other; what is kept between it and the step, and the messages of hidden states
(terrace.plan.handed_rows), are counted. Its gathers begin when the refreshes of the step have ended: both use the same
links.
"""

from collections.abc import Mapping

from terrace.model.operations import Loss
from terrace.plan.handed_rows import Held, row_moves, sent_bytes
from terrace.plan.plan import Plan
from terrace.plan.wire import FORMATS, MessageClass
from terrace.program.lowering import forward_programs, lowered
from terrace.program.report import StepReport
from terrace.simulate.links import send_s
from terrace.simulate.step import Step, play_stages, resolved

NAME = "teacher"  # category of seconds and bytes (terrace.runtime.beside)


def forward_beside(step: Step, plan: Plan, num_stages: int) -> tuple[StepReport, ...]:
    """Seconds, bytes and memory of the forward of `step` beside the steps of `plan`, for a rank of each of its stages.

    Raises `PlanError` for a plan that cannot run.
    """
    step = resolved(step)
    programs = forward_programs(lowered(step.model, step.blocks, step.num_micros))
    _, times_s = play_stages(programs, step.work)
    cluster, own = step.cluster, step.plan
    num_rows = step.num_micros * step.model.layout.data_degree * own.micro_batch
    held, read = Held(cluster, own, num_rows), Held(cluster, plan, num_rows)
    (loss,) = step.blocks[-1].operations.of(Loss)
    item, hidden = FORMATS[own.compute].element_bytes, loss.source.features.numel
    row_bytes = step.sequence * hidden * item
    moves = row_moves(held, read)
    # Messages leave at once, and ranks wait for the last.
    sent = [sent_bytes(cluster, moves, rank, row_bytes) for rank in range(cluster.world_size)]
    travel_s = max((_seconds(step, each) for each in sent), default=0.0)
    forward_s = max(sum(each.values()) for each in times_s)
    # A copy of the output matrix, where the forward frees it.
    owners = (-1, *step.blocks[-1].tied_to)
    is_freed = any(flat.layout.frees for block in owners for flat in step.model.flats[block])
    matrix = loss.vocabulary * hidden * item // step.model.tensor.degree * is_freed
    found = []
    for stage in range(num_stages):
        rank = read.mesh.at_stage(0, stage)
        program = programs[held.mesh.stage(rank)]
        kept = len(read.rows(rank)) * row_bytes + matrix * read.is_last(rank)
        own_sent = {(MessageClass.HIDDEN, tier): size for tier, size in sent[rank].items()}
        found.append(
            StepReport(
                time_s={NAME: forward_s + travel_s},
                sent_bytes={**program.sent_bytes, **own_sent},
                memory_bytes={NAME: sum(program.state_bytes.values()) + kept},
            )
        )
    return tuple(found)


def _seconds(step: Step, sent: Mapping[str, int]) -> float:
    return sum(send_s(step.cluster, step.cluster.index(tier), size) for tier, size in sent.items())
