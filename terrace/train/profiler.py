"""Traces chosen steps, predicted and measured side by side, for Perfetto or chrome://tracing.

`train.profile = "10-12"` traces three steps of rank 0, and with a pipeline of the first rank of every stage. Each step
is a file `profile/step-N-rank-R.json` in the run folder with two processes, predicted and measured, both starting at
zero, and each with its memory by category. On CUDA `profile/memory-rank-R.pickle` has every allocation of these steps,
for https://pytorch.org/memory_viz. With `train.profile_torch` torch's profiler records the same steps into
`profile/torch-rank-R.json`. The overhead of both is included in the times of the other files.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from terrace.accelerator import record_memory, write_memory
from terrace.base.errors import TrainingError
from terrace.base.files import write_atomic
from terrace.base.words import quantity
from terrace.cluster.cluster import Cluster
from terrace.plan.members import member_of
from terrace.program.recording import MemorySample, Recording
from terrace.runtime.engine import Engine
from terrace.runtime.tracing import Tracer
from terrace.simulate.curve import memory_curve
from terrace.simulate.members import member_step
from terrace.simulate.stages import Passed, record_stages
from terrace.simulate.step import play_whole
from terrace.simulate.trace import compared_trace_json
from terrace.train.config import RunConfig
from terrace.train.hooks import Hook, StepDone
from terrace.train.keys import parse_steps
from terrace.train.prediction import held_by_block, step_of

FOLDER = "profile"


class Profiler(Hook):
    """Traces the requested steps on the chosen ranks; does nothing elsewhere."""

    def __init__(
        self, engine: Engine, run: RunConfig, cluster: Cluster, folder: Path, note: Callable[[str], None]
    ) -> None:
        self._engine, self._run, self._cluster, self._folder = engine, run, cluster, folder / FOLDER
        self._note = note
        mesh = engine.program.mesh
        # Ranks of one stage run the same program, so the first one represents them.
        speaks = engine.rank in {mesh.at_stage(0, stage) for stage in range(engine.program.stage.num_stages)}
        asked = run.train.profile
        self._steps = parse_steps(asked) if asked is not None and speaks else range(0)
        self._tracer: Tracer | None = None
        self._first = 0  # step that the tracer has seen
        self._step: AbstractContextManager[None] | None = None  # traced now
        self._torch: torch.profiler.profile | None = None

    def before(self, step: int) -> None:
        if step not in self._steps:
            return
        if self._tracer is None:
            self._tracer, self._first = Tracer(self._engine), step
            record_memory(self._engine.device)
            if self._run.train.profile_torch:
                self._torch = torch.profiler.profile()
                self._torch.start()
        self._step = self._tracer.step()
        self._step.__enter__()

    def stepped(self, done: StepDone) -> None:
        if self._step is None or self._tracer is None:
            return
        self._step.__exit__(None, None, None)
        self._step = None
        if done.step == self._steps[-1]:
            self._write(self._tracer)

    def _write(self, tracer: Tracer) -> None:
        # Messages of the last step may still be under way.
        self._engine.drain()
        rank = self._engine.rank
        predicted, expected = self._predicted()
        curve = memory_curve(expected, held_by_block(self._run, expected.program))
        try:
            self._folder.mkdir(exist_ok=True)
            snapshot = self._folder / f"memory-rank-{rank}.pickle"
            names = [snapshot.name] if write_memory(self._engine.device, snapshot) else []
            for number, recording in enumerate(tracer.recordings(), self._first + 1):
                path = self._folder / f"step-{number}-rank-{rank}.json"
                text = compared_trace_json(
                    predicted, recording, step=number, rank=rank, memory=curve, begin_s=expected.begin_s
                )
                write_atomic(path, text)
                names.append(path.name)
                states, in_use = (max(each) for each in zip(*map(_sums, recording.memory), strict=True))
            if self._torch is not None:
                self._torch.stop()
                self._torch.export_chrome_trace(str(self._folder / f"torch-rank-{rank}.json"))
        except OSError as error:
            raise TrainingError(
                f"cannot write into {self._folder}: {error.strerror}; leave train.profile out, or make room"
            ) from error

        self._note(
            f"memory of step {self._steps[-1] + 1} at its peak: {quantity(curve.peak[0], 'B')} of states and "
            f"activations predicted; {quantity(states, 'B')} of states, {quantity(in_use, 'B')} in all measured; its "
            f"course is in {self._folder}: {', '.join(names)}"
        )

    def _predicted(self) -> tuple[Recording | list[Passed], Recording]:
        """What a trace shows of the predicted step, and its recording."""
        # A trace shows every micro-batch, so the prediction is played whole.
        member = member_of(self._run.cluster, self._engine.rank)
        played, stage = play_whole(member_step(step_of(self._run, self._cluster), member)), self._engine.program.stage
        recording = record_stages(played.programs, played.costs)[stage.index]
        return (recording if len(played.programs) == 1 else list(played.passes[stage.index])), recording


def _sums(sample: MemorySample) -> tuple[int, int]:
    return sum(sample.states_bytes.values()), sample.in_use_bytes
