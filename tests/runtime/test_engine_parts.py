"""The parts of an engine by themselves: a state that is loaded without communication, a runner of any program."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from terrace.base.errors import ProgramError
from terrace.checkpoint.parts import parts_of, slices_of
from terrace.checkpoint.reading import Checkpoint, restore
from terrace.checkpoint.reshard import hand_over
from terrace.checkpoint.writing import save
from terrace.comm.ledger import Meter
from terrace.model.balance import BalanceConfig
from terrace.plan.presets import PRESETS, preset
from terrace.program import lowering
from terrace.program.lowering import build, forward_programs, restoring_program
from terrace.runtime.batch import Batch
from terrace.runtime.clock import make_clock
from terrace.runtime.comm import Comm
from terrace.runtime.describe import describe, with_dims
from terrace.runtime.engine import Engine
from terrace.runtime.linear import WeightGradients
from terrace.runtime.model_state import ModelState
from terrace.runtime.routing.load import Load
from terrace.runtime.routing.passages import Passages
from terrace.runtime.setup import Blocks, Training, Workload, own_values
from terrace.runtime.step_runner import StepRunner
from tests.support.parity import ADAMW, exact, flatten
from tests.support.totals import verify
from tests.support.toys import MODELS, cluster_of, make_batch

CPU = torch.device("cpu")
MODEL, CLUSTER = MODELS["llama tied"], cluster_of(1)
NAMES = [spec.name for spec in MODEL.declared]


def fresh_state() -> tuple[ModelState, list[torch.nn.Module]]:
    blocks = MODEL.blocks(torch.float64)
    specs = with_dims(describe(blocks, NAMES), MODEL.declared)
    program = build(CLUSTER, exact("zero3", CLUSTER), specs, num_micros=2)
    verify(program)
    state = ModelState(
        program,
        0,
        blocks,
        specs=specs,
        settings=ADAMW,
        initial=own_values(blocks, NAMES),
        device=CPU,
        meter=Meter(),
        seed=0,
    )
    return state, blocks


def runner_of(state: ModelState, comm: Comm) -> StepRunner:
    passages = Passages((), comm.program, BalanceConfig(), comm.rank, CPU)
    load = Load(state.program, state.modules, BalanceConfig(), state.choices, CPU)
    clock, weights, objective = make_clock(CPU), WeightGradients(), MODEL.objective
    return StepRunner(state, comm, objective=objective, clock=clock, weights=weights, load=load, passages=passages)


def batches_of(step: int) -> list[Batch]:
    tokens, labels = make_batch(step, 2)
    return [Batch(tokens[row : row + 1], labels[row : row + 1]) for row in range(2)]


def engine_of(blocks: list[torch.nn.Module], num_micros: int) -> Engine:
    return Engine(
        Blocks(blocks, names=NAMES, declared=MODEL.declared),
        Workload(cluster=CLUSTER, plan=exact("zero3", CLUSTER), num_micros=num_micros),
        MODEL.objective,
        Training(optimizer=ADAMW),
    )


def trained() -> tuple[Engine, list[torch.nn.Module]]:
    blocks = MODEL.blocks(torch.float64)
    engine = engine_of(blocks, 2)
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


def states_of(engine: Engine) -> torch.Tensor:
    """Master parameters and moments."""
    parts = parts_of(engine.state, slices_of(engine.program.mesh, 0))
    return torch.cat([value.flatten().clone() for _, part in parts for value in part.values.values()])


def test_an_evaluation_refuses_every_program_but_forwards_of_its_engine() -> None:
    engine, _ = trained()
    (forward,) = forward_programs(engine.stage_programs())
    (other,) = forward_programs([build(CLUSTER, exact("ddp", CLUSTER), engine.state.specs, num_micros=2)])
    damaged = replace(forward, instructions=tuple(forward.instructions) * 2)
    values, loss = states_of(engine), engine.evaluate(batches_of(2)).loss
    for program, words in (
        (engine.program, "not one for phase train"),
        (restoring_program(engine.program), "not one for phase restore"),
        (other, "built for another cluster, plan, model or stage"),
        (damaged, "it runs twice"),
        (damaged, "it runs twice"),  # still, the second time
    ):
        with pytest.raises(ProgramError, match=words):
            engine.evaluate(batches_of(2), program)
    assert torch.equal(states_of(engine), values)
    # Neither a refused program nor a given one replaces the default.
    assert engine.evaluate(batches_of(2)).loss == loss == engine.evaluate(batches_of(2), forward).loss
    engine.close()


def test_a_step_that_repeats_has_the_bits_of_the_one_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for longest in (0, 10**9):
        monkeypatch.setattr(lowering, "_LONG_STEP", longest)
        engine = engine_of(MODEL.blocks(torch.float64), 24)
        assert engine.program.segments.repeats == (not longest)
        batches = [batch for step in range(12) for batch in batches_of(step)]
        results = [engine.step(batches, ADAMW.lr), engine.evaluate(batches), engine.step(batches, ADAMW.lr)]
        engine.drain()
        found.append(
            ([(each.loss, each.grad_norm) for each in results], states_of(engine), dict(engine.program.counts))
        )
        engine.close()
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][2] == found[1][2]


def test_one_rank_makes_the_same_step_under_every_preset_and_has_no_lane() -> None:
    found = []
    for name in PRESETS:
        blocks = MODEL.blocks(torch.float32)
        engine = Engine(
            Blocks(blocks, names=NAMES, declared=MODEL.declared),
            Workload(cluster=CLUSTER, plan=preset(name, CLUSTER), num_micros=2),
            MODEL.objective,
            Training(optimizer=ADAMW),
        )
        assert not engine.comm.lanes
        results = [engine.step(batches_of(step), ADAMW.lr) for step in range(3)]
        results.append(engine.evaluate(batches_of(3)))
        engine.check_bytes()
        assert engine.report({}).memory_bytes.get("gathered", 0) == 0
        found.append(([(each.loss, each.grad_norm) for each in results], flatten(blocks)))
        engine.close()
    for losses, parameters in found[1:]:
        assert losses == found[0][0]
        assert torch.equal(parameters, found[0][1])


def test_a_frozen_first_block_has_no_backward_to_run_again_for() -> None:
    model, runs = MODELS["llama, frozen table"], [0, 0]
    blocks = model.blocks(torch.float64)
    for number, block in enumerate(blocks[:2]):
        block.register_forward_hook(lambda *_, number=number: runs.__setitem__(number, runs[number] + 1))
    engine = Engine(
        Blocks(blocks, names=[spec.name for spec in model.declared], declared=model.declared),
        Workload(cluster=CLUSTER, plan=exact("zero3", CLUSTER, recompute=("*",)), num_micros=2),
        model.objective,
        Training(optimizer=ADAMW),
    )
    engine.step(batches_of(0), ADAMW.lr)
    assert not engine.state.specs[0].num_trainable
    assert runs == [2, 4]
    engine.close()
