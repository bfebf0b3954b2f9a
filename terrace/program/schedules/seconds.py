"""Task times, used by the timeline and by the automatic schedule."""

from dataclasses import dataclass

from terrace.base.errors import PlanError
from terrace.plan.stage import Pass


@dataclass(frozen=True, kw_only=True)
class TaskSeconds:
    """Seconds of one micro-batch's task, by virtual stage (in model order), and of the messages between them.

    `edge_s[k]` is the message between virtual stages k and k + 1, the same in both directions. An order uses
    `backward_s` for whole backwards, `input_s` and `weight_s` for split ones.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    input_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    edge_s: tuple[float, ...]

    def of(self, pass_: Pass) -> tuple[float, ...]:
        """Seconds of a pass, by virtual stage."""
        return (self.forward_s, self.backward_s, self.input_s, self.weight_s)[pass_]


def check_seconds(seconds: TaskSeconds, num_virtual: int) -> None:
    """Raise `PlanError` unless every virtual stage and every edge between two has a time of at least 0."""
    tasks = seconds.forward_s, seconds.backward_s, seconds.input_s, seconds.weight_s
    for number, (values, wanted) in enumerate(
        (*((each, num_virtual) for each in tasks), (seconds.edge_s, num_virtual - 1))
    ):
        if len(values) != wanted or min(values, default=0.0) < 0:
            what = f"{Pass(number).name.lower()} tasks" if number < len(tasks) else "edges"
            shown = f"{len(values)} of them" if len(values) != wanted else f"{min(values)} among them"
            raise PlanError(f"seconds of {what}: {shown}; give {wanted}, none below 0")
