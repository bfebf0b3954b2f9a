"""The parts of an engine by themselves: a state that is loaded without communication, a runner of any program."""

from pathlib import Path

import torch

from terrace.checkpoint.parts import parts_of, slices_of
from terrace.checkpoint.reading import Checkpoint, restore
from terrace.checkpoint.reshard import hand_over
from terrace.checkpoint.writing import save
from terrace.program.lowering import build, forward_programs, restoring_program
from terrace.program.verify import verify
from terrace.runtime.batch import Batch
from terrace.runtime.clock import make_clock
from terrace.runtime.comm import Comm
from terrace.runtime.describe import describe, with_dims
from terrace.runtime.engine import Engine
from terrace.runtime.linear import WeightGradients
from terrace.runtime.model_state import ModelState
from terrace.runtime.step_runner import StepRunner
from tests.support.parity import ADAMW, exact, flatten
from tests.support.toys import MODELS, cluster_of, make_batch

CPU = torch.device("cpu")
MODEL, CLUSTER = MODELS["llama tied"], cluster_of(1)
NAMES = [spec.name for spec in MODEL.declared]


def fresh_state() -> tuple[ModelState, list[torch.nn.Module]]:
    blocks = MODEL.blocks(torch.float64)
    specs = with_dims(describe(blocks, NAMES), MODEL.declared)
    program = build(CLUSTER, exact("zero3", CLUSTER), specs, num_micros=2)
    verify(program)
    return ModelState(program, 0, blocks, specs=specs, settings=ADAMW), blocks


def runner_of(state: ModelState, comm: Comm) -> StepRunner:
    return StepRunner(state, comm, objective=MODEL.objective, clock=make_clock(CPU), weights=WeightGradients())


def batches_of(step: int) -> list[Batch]:
    tokens, labels = make_batch(step, 2)
    return [Batch(tokens[row : row + 1], labels[row : row + 1]) for row in range(2)]


def trained() -> tuple[Engine, list[torch.nn.Module]]:
    blocks = MODEL.blocks(torch.float64)
    engine = Engine(
        blocks,
        names=NAMES,
        cluster=CLUSTER,
        plan=exact("zero3", CLUSTER),
        num_micros=2,
        objective=MODEL.objective,
        optimizer=ADAMW,
        declared=MODEL.declared,
    )
    for step in range(2):
        engine.step(batches_of(step), ADAMW.lr)
    engine.drain()
    return engine, blocks


def test_a_state_is_loaded_and_handed_over_without_an_engine(tmp_path: Path) -> None:
    engine, blocks = trained()
    folder = save(engine, tmp_path, 2, {}, keep=1)
    engine.close()
    loaded, handed = fresh_state(), fresh_state()
    restore(loaded[0], Checkpoint(folder))
    slices = slices_of(engine.program.mesh, 0)
    for source, target in zip(engine.state, handed[0], strict=True):
        hand_over(*([part for _, part in parts_of([flat], slices)] for flat in (source, target)))
    engine.state.gather(engine.comm.collectives)
    for state, own in (loaded, handed):
        comm = Comm(state.program)
        runner = runner_of(state, comm)
        runner.run((), program=restoring_program(state.program))
        runner.drain()
        state.gather(comm.collectives)
        assert torch.equal(flatten(own), flatten(blocks))
        comm.close()


def test_one_runner_without_an_engine_runs_forwards_and_steps_in_turn() -> None:
    engine, _ = trained()
    state, _ = fresh_state()
    comm = Comm(state.program)
    runner = runner_of(state, comm)
    (forward,) = forward_programs([state.program])
    verify(forward)
    losses = []
    for step in range(3):
        before = runner.run(batches_of(step), program=forward)
        sums = runner.run(batches_of(step), ADAMW.lr)
        torch.testing.assert_close(before.loss, sums.loss, rtol=1e-12, atol=0)
        losses.append(sums.loss)
    assert losses[2] == engine.step(batches_of(2), ADAMW.lr).loss
    runner.drain()
    comm.close()
    engine.close()
