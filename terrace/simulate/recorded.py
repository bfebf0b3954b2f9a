"""A step for display: its prediction, with the recording and the memory of every stage.

Timelines show every micro-batch, so the programs are played whole here, however many there are. Displayed seconds are
the prediction's (terrace.simulate.step), which all commands share.
"""

from dataclasses import dataclass
from functools import cached_property

from terrace.program.recording import Recording
from terrace.simulate.critical import CriticalPath, critical_path, exposed_by_axis
from terrace.simulate.curve import MemoryCurve, memory_curve
from terrace.simulate.held_activations import activations_by_block
from terrace.simulate.stages import Passed, record_stages
from terrace.simulate.step import Prediction, Step, play_whole
from terrace.simulate.work import Work


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    prediction: Prediction
    whole: Prediction
    recordings: tuple[Recording, ...]
    curves: tuple[MemoryCurve, ...]  # activations included where kernels are known

    @property
    def step(self) -> Step:
        return self.prediction.step

    @property
    def step_s(self) -> float:
        return self.prediction.step_s

    @property
    def passes(self) -> tuple[list[Passed], ...]:
        """Passes of every stage, relative to the first stage's start."""
        return tuple(list(passes) for passes in self.whole.passes)

    @cached_property
    def end_s(self) -> float:
        """End of the last stage, relative to the first stage's start."""
        return max(each.begin_s + each.report.step_s for each in self.recordings)

    @cached_property
    def path(self) -> CriticalPath:
        return critical_path(*self.recordings)

    @cached_property
    def exposed_s(self) -> dict[tuple[str, str], float]:
        """Seconds of exposed messages on the busiest stage, by (axis, tier)."""
        return exposed_by_axis(self.recordings, self.prediction.busiest)

    @cached_property
    def fullest(self) -> int:
        """The stage with the highest memory peak."""
        return max(range(len(self.curves)), key=lambda stage: self.curves[stage].peak[0])


def record_predicted(prediction: Prediction) -> RecordedStep:
    # A folded prediction has no times for the extrapolated micro-batches.
    whole = prediction if prediction.is_whole else play_whole(prediction.step)
    recordings = record_stages(whole.programs, whole.costs)
    return RecordedStep(
        prediction=prediction,
        whole=whole,
        recordings=tuple(recordings),
        curves=tuple(_curve(prediction.step, recording) for recording in recordings),
    )


def _curve(step: Step, recording: Recording) -> MemoryCurve:
    # FLOPs do not determine activations.
    if not isinstance(step.work, Work):
        return memory_curve(recording)
    backend = step.cluster.device.type
    return memory_curve(recording, activations_by_block(step.work, step.plan, recording.program.blocks, backend))
