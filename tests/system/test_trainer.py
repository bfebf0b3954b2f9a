"""`terrace.Trainer` in a user's own loop: the numbers of plain PyTorch, checkpoints, clear words for mistakes."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import terrace
from bench.common import free_port
from terrace.base.errors import CheckpointError, ConfigError, ModelError, PlanError, TerraceError, TrainingError
from terrace.launch.start import LocalPool, World
from terrace.model.decoder import token_loss
from tests.support import warm
from tests.support.nightly import nightly
from tests.support.tiny_runs import environment
from tests.support.toys import cluster_of
from tests.support.trainer_cases import TOLERANCE, Case, make, simple, steps, train
from tests.support.user_models import (
    ADAMW,
    MODELS,
    Trained,
    batch_of,
    deviation,
    plain_blocks,
)

CASES = [
    *nightly(*(Case(model, "zero3", (1,), num_micros=2) for model in MODELS)),
    *(Case(model, "zero3", (2,)) for model in MODELS),
    Case("convolution", {"preset": "zero3", "recompute": ["*"]}, (2,), num_micros=2),
    Case("convolution", "three-level", (2, 2), num_micros=2),
    Case("tied", {"preset": "zero1", "mapping": {"node": {"pipeline": 2}}, "micro_batch": 2}, (1, 2), num_micros=4),
    *nightly(
        Case("tied", "three-level", (2, 1, 2)),
        Case("tied", {"preset": "zero3", "mapping": {"node": {"pipeline": 2}}, "micro_batch": 2}, (2, 2), num_micros=2),
    ),
    Case("regression", "ddp", (2,), local=True),
    Case("tied", "zero3", (2,), local=True, num_micros=2),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.model}-{case.plan}-{case.sizes}")
def test_trainer_equals_plain_pytorch(pool: LocalPool, case: Case) -> None:
    wanted = plain_blocks(case.model)
    for found in pool.run(cluster_of(*case.sizes).world_size, train, case):
        assert deviation(found, wanted) < TOLERANCE


def test_the_comparison_sees_a_difference(pool: LocalPool) -> None:
    (found,) = pool.run(1, train, Case("tied", "zero3", (1,)))
    found.parameters["block.1.inner.bias"][0] += 1e-8
    assert deviation(found, plain_blocks("tied")) > TOLERANCE


def save_one(world: World, case: Case, folder: str) -> Trained:
    """Two steps and a checkpoint."""
    found = Trained()
    with make(case) as trainer:
        steps(trainer, case, 0, 2, found)
        assert trainer.save(folder).name == "step-00000002"
    return found


def load_one(world: World, case: Case, folder: str) -> Trained:
    """One step after a checkpoint."""
    found = Trained()
    with make(case) as trainer:
        assert Path(folder) in trainer.load(folder).parents
        assert trainer.num_steps == 2
        steps(trainer, case, 2, 3, found)
        found.parameters = trainer.state_dict()
    return found


def test_a_checkpoint_goes_on_under_another_plan(pool: LocalPool, tmp_path: Path) -> None:
    begun = pool.run(2, save_one, Case("tied", "zero3", (2,)), str(tmp_path))
    for found in pool.run(4, load_one, Case("tied", "three-level", (2, 2)), str(tmp_path)):
        found.losses, found.norms = begun[0].losses + found.losses, begun[0].norms + found.norms
        assert deviation(found, plain_blocks("tied")) < TOLERANCE


def predicted(world: World) -> tuple[Any, ...]:
    """The report after three steps."""
    case = Case("tied", "zero3", (2,))
    with make(case, predict=True) as trainer:
        steps(trainer, case, 0, 3, Trained())
        report = trainer.report()
    assert report.predicted is not None
    return report.predicted, report.measured, str(report)


def test_bytes_and_memory_are_predicted_exactly_and_time_is_measured(pool: LocalPool) -> None:
    for expected, measured, text in pool.run(2, predicted):
        for category, size in expected.memory_bytes.items():
            held = measured.memory_bytes.get(category, 0)
            # How many blocks are whole at once depends on when messages run: the formula states the worst.
            assert held <= size if category in ("gathered", "grads_full") else held == size, category
        assert expected.sent_bytes == measured.sent_bytes
        assert 0 < expected.step_s < 1
        assert measured.time_s["forward"] > 0
        assert "sent: gather on package" in text
        assert "time: forward" in text


def test_one_process_needs_no_world_and_no_plan(tmp_path: Path) -> None:
    trainer = simple()
    assert trainer.cluster.world_size == 1
    assert trainer.plan.compute == "fp32"
    before = trainer.state_dict()
    result = trainer.step(torch.ones(6, 3), torch.zeros(6, 2))
    assert result.num_tokens == 12
    assert trainer.report().predicted is None
    after = trainer.state_dict()
    assert before.keys() == after.keys()
    assert not any(torch.equal(before[name], after[name]) for name in before)
    trainer.lr = 0.0
    trainer.step(torch.ones(6, 3), torch.zeros(6, 2))
    assert torch.equal(trainer.state_dict()["block.0.bias"], after["block.0.bias"])
    trainer.step(torch.ones(6, 3), torch.zeros(6, 2), lr=0.1)
    assert not torch.equal(trainer.state_dict()["block.0.bias"], after["block.0.bias"])


def test_unloaded_blocks_are_plain_modules_again() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).bfloat16()
    model[2].bias.requires_grad = False
    trainer = simple(blocks=model, cluster="local")
    # Labels of the same dtype: mse_loss of torch 2.11 has no backward for two.
    trainer.step(torch.ones(6, 3), torch.zeros(6, 2).bfloat16())
    values = trainer.state_dict()
    trainer.unload()
    assert {name: value.bfloat16() for name, value in values.items()}.keys() == {
        f"block.{name}" for name in model.state_dict()
    }
    for name, value in model.state_dict().items():
        assert type(model.get_parameter(name)) is nn.Parameter
        assert torch.equal(value, values[f"block.{name}"].bfloat16())
    assert not model[2].bias.requires_grad
    assert model(torch.ones(1, 3).bfloat16()).shape == (1, 2)
    with pytest.raises(TrainingError, match="closed"):
        trainer.step(torch.ones(6, 3), torch.zeros(6, 2))


class _Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


def _wrong_blocks(blocks: list[object], **options: Any) -> Callable[[], object]:
    return lambda: simple(blocks=blocks, **options).step(torch.ones(6, 3), torch.zeros(6, 2))


def _wrong_batch(inputs: Tensor, labels: Tensor, **options: Any) -> Callable[[], object]:
    return lambda: simple(**options).step(inputs, labels)


SIX, TWO = torch.ones(6, 3), torch.zeros(6, 2)
HALF: list[object] = [nn.Linear(3, 2).half()]
MISTAKES: list[tuple[Callable[[], object], type[TerraceError], str]] = [
    (_wrong_blocks([]), ModelError, "blocks is empty"),
    (_wrong_blocks([nn.Linear(3, 2), torch.relu]), ModelError, "block.1 is a .* not a torch.nn.Module"),
    (lambda: simple(blocks=nn.Linear(3, 2)), ModelError, "one Linear: give the list of modules"),
    (_wrong_blocks([nn.Linear(3, 2, device="meta")]), ModelError, "block.0.weight is on the meta device"),
    (_wrong_blocks([nn.ReLU()]), ModelError, "leave something to train"),
    (_wrong_blocks(HALF), ConfigError, "parameters of the blocks are float16"),
    (_wrong_blocks([nn.Linear(3, 2), _Pair()]), ModelError, "block.1 returns a tuple"),
    (_wrong_blocks([nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)]), ModelError, "buffer .* LayerNorm"),
    (_wrong_batch(SIX, TWO[:4]), ConfigError, "samples, and these differ"),
    (_wrong_batch(SIX, TWO, num_micros=4), ConfigError, "6 samples does not divide .* give 4 or 8"),
    (_wrong_batch(SIX, TWO, num_micros=0), ConfigError, "num_micros = 0"),
    (_wrong_batch(SIX, TWO, loss=nn.MSELoss()), TrainingError, 'not a sum.*reduction="sum"'),
    (_wrong_batch(SIX, TWO, loss=lambda output, _: output), TrainingError, "SUM of the losses"),
    (_wrong_batch(SIX, TWO, cluster="dgx-a100"), ConfigError, 'write cluster="local"'),
    (_wrong_batch(SIX, TWO, plan="zero4"), PlanError, "zero4"),
    (_wrong_batch(SIX, TWO, optimizer={"lr": 1.0}), ConfigError, "optimizer has an lr"),
    (_wrong_batch(SIX, TWO, optimizer={"betas": 1.0}), ConfigError, "betas"),
    (_wrong_batch(SIX, TWO, activation=(5, 99)), ConfigError, "no parameter has a dim of 99"),
    (_wrong_batch(SIX, TWO, keep_folder="/tmp"), ConfigError, "keep_folder = '/tmp' has no effect"),
    (lambda: simple().load("/nowhere"), CheckpointError, "holds no checkpoint"),
]


@pytest.mark.parametrize(
    ("make_mistake", "kind", "words"), MISTAKES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_mistakes_are_one_clear_line(make_mistake: Callable[[], object], kind: type[TerraceError], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        make_mistake()
    assert "\n" not in str(caught.value)


def test_a_loss_that_is_no_sum_passes_when_asked() -> None:
    assert simple(loss=nn.MSELoss(), check_loss=False).step(SIX, TWO).loss > 0


def other_batch(world: World) -> str:
    """Give each rank a batch of its own without saying so."""
    case = Case("regression", "zero3", (2,))
    with pytest.raises(ConfigError) as caught:
        make(case).step(*batch_of("regression", world.rank))
    return str(caught.value)


def test_ranks_with_different_batches_are_told(pool: LocalPool) -> None:
    for message in pool.run(2, other_batch):
        assert "rank 1 has other inputs than rank 0" in message


def tensor_axis(world: World) -> list[float]:
    """Blocks of this project's decoder, on two ranks under a tensor axis."""
    from tests.support.toys import MODELS as DECODERS
    from tests.support.toys import make_batch

    model = DECODERS["llama tied"]
    options: dict[str, Any] = {}
    if world.world_size > 1:
        plan = {"preset": "ddp", "mapping": {"package": {"tensor": 2}}, "micro_batch": 2}
        options = {"plan": plan, "cluster": cluster_of(2), "declared": model.declared, "activation": (6, 8)}
    blocks = model.blocks(torch.float64)
    with terrace.Trainer(blocks, loss=token_loss, lr=ADAMW.lr, predict=False, **options) as trainer:
        return [trainer.step(*make_batch(step, 2)).loss for step in range(2)]


def test_a_tensor_axis_takes_the_decoder(pool: LocalPool) -> None:
    (alone,), both = pool.run(1, tensor_axis), pool.run(2, tensor_axis)
    assert both == [pytest.approx(alone, abs=TOLERANCE)] * 2


SCRIPT = """
import torch, terrace
from torch import nn
torch.manual_seed(torch.initial_seed() % 7)
blocks = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)]
trainer = terrace.Trainer(blocks, plan="zero3", cluster="local", loss=nn.CrossEntropyLoss(reduction="sum"), lr=1e-2)
for step in range(3):
    generator = torch.Generator().manual_seed(step)
    inputs, labels = torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)
    result = trainer.step(inputs, labels)
if trainer.rank == 0:
    print("loss", round(result.loss, 4), trainer.cluster.world_size, trainer.predicted is not None)
trainer.close()
"""


def test_under_torchrun_the_trainer_joins_by_itself(tmp_path: Path) -> None:
    """With the variables of torchrun, in processes that have imported torch; docs/training.md runs torchrun itself."""
    (tmp_path / "script.py").write_text(SCRIPT)
    table = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    places = ({"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2))
    first, other = (warm.Command(["script.py"], tmp_path, environment() | table | place) for place in places)
    said, errors = first.communicate(timeout=200)
    assert (first.returncode, other.wait(200)) == (0, 0), errors
    assert " 2 True" in said
    assert "2 ranks under torchrun" in said


def test_importing_terrace_does_not_import_torch() -> None:
    program = "import sys, terrace; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], timeout=100, check=True)
    with pytest.raises(AttributeError, match="no attribute 'Trainr'"):
        terrace.Trainr  # noqa: B018


def test_blocks_of_this_project_are_timed_and_take_packed_documents() -> None:
    """The head is run in parts, by the runtime, and is timed all the same."""
    from tests.support.toys import MODELS as DECODERS
    from tests.support.toys import make_batch

    tokens, labels = make_batch(0, 4)
    positions = torch.tensor([0, 1, 2, 0, 1, 2]).expand(4, 6).contiguous()
    found = []
    for packed in (True, False):
        with terrace.Trainer(DECODERS["llama tied"].blocks(torch.float64), loss=token_loss, lr=0.1) as trainer:
            if packed:
                result = trainer.step(tokens, labels, positions)
            else:  # each document in a row of its own
                result = trainer.step(tokens.reshape(8, 3), labels.reshape(8, 3))
            assert trainer.predicted is not None
            assert trainer.predicted.step_s > 0
        found.append([result.loss, result.grad_norm])
    assert found[0] == pytest.approx(found[1], abs=1e-12)
    with pytest.raises(ModelError, match="takes no positions"):
        simple().step(torch.ones(6, 3), torch.zeros(6, 2), torch.zeros(6, 2, dtype=torch.int64))
