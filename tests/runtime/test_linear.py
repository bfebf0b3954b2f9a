"""Weight gradients that the runtime computes, against autograd's on the same module, in fp64 to 1e-12."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from terrace.model import product_parts
from terrace.program.instruction import Instruction, Op
from terrace.runtime.batch import Batch
from terrace.runtime.engine import Engine
from terrace.runtime.linear import Matrix
from terrace.runtime.setup import Blocks, Training, Workload
from terrace.runtime.step_runner import StepRunner
from tests.support.adopted import Adopted, Experts
from tests.support.allocations import allocated
from tests.support.nightly import in_turns
from tests.support.parity import ADAMW, exact
from tests.support.toys import MODELS, cluster_of, make_batch

TOLERANCE = 1e-12
SIZE = 4  # of the square matrices of `Mixed`
LATER = ["toy", "llama tied", "gpt2", "gpt_neox", "mixture, shared expert"]  # models of delayed gradients
DTYPES = ["fp64", "fp32"]  # added up in place, and in a buffer
PLANS: list[dict[str, Any]] = [{}, {"unit": 2, "recompute": ("*",)}]


def reference(original: nn.Module, backwards: list[Callable[[nn.Module], Tensor]]) -> dict[str, Tensor]:
    module = copy.deepcopy(original)
    for run in backwards:
        torch.autograd.backward(run(module))
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def check(original: nn.Module, backwards: list[Callable[[nn.Module], Tensor]], hold: bool) -> None:
    wanted = reference(original, backwards)
    found = Adopted.of(original).gradients(backwards, hold)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=TOLERANCE, atol=TOLERANCE)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def squares(x: Tensor) -> Callable[[nn.Module], Tensor]:
    """The sum of squares of a module's output for `x`."""
    return lambda module: module(x).square().sum()


def strided(shape: tuple[int, ...], kind: str, seed: int) -> Tensor:
    """A tensor of this shape that lies in memory in some way."""
    if kind == "transposed" and len(shape) > 1:
        return normal(*shape[:-2], shape[-1], shape[-2], seed=seed).transpose(-1, -2)
    if kind == "sliced":
        return normal(*shape[:-1], 2 * shape[-1], seed=seed)[..., ::2]
    if kind == "expanded":
        return normal(shape[-1], seed=seed).expand(shape)
    return normal(*shape, seed=seed)


LAYOUTS = st.sampled_from(("contiguous", "transposed", "sliced", "expanded"))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from((None, "frozen", "trained")),
    st.booleans(),
    st.tuples(LAYOUTS, LAYOUTS),
    st.integers(1, 3),
    st.booleans(),
)
def test_any_shape_of_a_linear_layer(
    leading: list[int],
    num_inputs: int,
    num_outputs: int,
    bias: str | None,
    frozen: bool,
    kinds: tuple[str, str],
    times: int,
    hold: bool,
) -> None:
    layer = nn.Linear(num_inputs, num_outputs, bias=bias is not None, dtype=torch.float64)
    layer.weight.requires_grad = not frozen
    if bias == "frozen":
        layer.bias.requires_grad = False
    if not any(parameter.requires_grad for parameter in layer.parameters()):
        return
    inputs = [strided((*leading, num_inputs), kinds[0], seed).requires_grad_(seed != 1) for seed in range(times)]
    outputs = [strided((*leading, num_outputs), kinds[1], 9 + seed) for seed in range(times)]

    def backward(x: Tensor, dy: Tensor) -> Callable[[nn.Module], Tensor]:
        return lambda module: (module(x) * dy).sum()

    def take_input_gradients() -> list[Tensor]:
        grads = [x.grad for x in inputs if x.requires_grad]
        for x in inputs:
            x.grad = None
        assert all(grad is not None for grad in grads)
        return [grad for grad in grads if grad is not None]

    backwards = [backward(x, dy) for x, dy in zip(inputs, outputs, strict=True)]
    wanted = reference(layer, backwards)
    wanted_inputs = take_input_gradients()
    found = Adopted.of(layer).gradients(backwards, hold)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=TOLERANCE, atol=TOLERANCE)
    for mine, theirs in zip(take_input_gradients(), wanted_inputs, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=TOLERANCE, atol=TOLERANCE)


USES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "linear": lambda x, weight, bias: F.linear(x, weight),
    "with bias": lambda x, weight, bias: F.linear(x, weight, bias),
    "with keywords": lambda x, weight, bias: F.linear(bias=bias, weight=weight, input=x),
    "with a computed bias": lambda x, weight, bias: F.linear(x, weight, 2 * bias),
    "product": lambda x, weight, bias: x @ weight.T,
    "scaled": lambda x, weight, bias: F.linear(x, 2 * weight),
    "sum": lambda x, weight, bias: x + weight.sum() * bias,
    "look-up": lambda x, weight, bias: x + F.embedding(torch.tensor([3, 0, 3]), weight),
    "look-up with padding": lambda x, weight, bias: x + F.embedding(torch.tensor([3, 0, 3]), weight, padding_idx=3),
    "as input": lambda x, weight, bias: x + F.linear(weight, weight).mean() * bias,
    "recomputed": lambda x, weight, bias: checkpoint(F.linear, x, weight, bias, use_reentrant=False),
    "recomputed, nested": lambda x, weight, bias: checkpoint(F.linear, x, weight, bias, use_reentrant=True),
    "in autocast": lambda x, weight, bias: x + _autocast(x, weight),
}


def _autocast(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.linear(x.float(), weight.float()).double()


class Mixed(nn.Module):
    """Uses its three matrices in the ways of `uses`, one after the other."""

    def __init__(self, uses: list[tuple[str, int]], frozen: set[int]) -> None:
        super().__init__()
        self.uses = uses
        self.matrices = nn.ParameterList(normal(SIZE, SIZE, seed=index) for index in range(3))
        self.biases = nn.ParameterList(normal(SIZE, seed=9 + index) for index in range(3))
        for index in frozen:
            self.matrices[index].requires_grad = False

    def forward(self, x: Tensor) -> Tensor:
        for use, index in self.uses:
            x = torch.tanh(USES[use](x, self.matrices[index], self.biases[index]))
        return x


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(list(USES)), st.integers(0, 2)), min_size=1, max_size=5),
    st.sets(st.integers(0, 2)),
    st.integers(1, 3),
    st.booleans(),
)
def test_any_mixture_of_uses(uses: list[tuple[str, int]], frozen: set[int], times: int, hold: bool) -> None:
    def backward(seed: int) -> Callable[[nn.Module], Tensor]:
        return lambda module: module(normal(2, 3, SIZE, seed=seed).requires_grad_()).square().sum()

    check(Mixed(uses, frozen), [backward(seed) for seed in range(times)], hold)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.integers(1, 5),
    st.sampled_from(("", "up", "down")),
    LAYOUTS,
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    st.integers(1, 3),
)
def test_any_rows_of_a_stack(
    counts: list[int], inputs: int, frozen: str, kind: str, chosen: tuple[bool, bool, bool], times: int
) -> None:
    """Experts without a row among them; gradients of rows too."""
    needs_input, mixed, hold = chosen
    module = Experts(counts, inputs, frozen, mixed)
    each = [strided((sum(counts), inputs), kind, seed).requires_grad_(needs_input) for seed in range(times)]
    check(module, [squares(x) for x in each], hold)
    if needs_input:
        found: list[Any] = [x.grad for x in each]
        for x in each:
            x.grad = None
        reference(module, [squares(x) for x in each])
        for x, twice in zip(each, found, strict=True):  # by the reference and by what was checked
            torch.testing.assert_close(twice / 2, x.grad, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_other_dtypes_round_like_autograd(dtype: torch.dtype, bias: bool) -> None:
    layer = nn.Linear(32, 48, bias=bias, dtype=dtype)
    inputs = [normal(2, 16, 32, seed=seed, dtype=dtype) for seed in range(2)]
    backwards = [squares(x) for x in inputs]
    for times in (1, 2):
        wanted = reference(layer, backwards[:times])
        found = Adopted.of(layer).gradients(backwards[:times], hold=False)
        for name, value in wanted.items():
            assert (found[name] - value).norm() <= 2 * torch.finfo(dtype).eps * value.norm(), (name, times)


@pytest.mark.parametrize("hold", [False, True])
def test_bf16_gradients_are_added_in_fp32(hold: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each backward's gradient rounds once; their sum does not, whoever computes them."""
    monkeypatch.setitem(product_parts.PART_NUMEL, "cpu", 100)  # parts of five rows of 20, the last of three
    model = nn.Sequential(nn.Embedding(7, 20), nn.LayerNorm(20), nn.Linear(20, 48), Experts((20, 0, 44), 48)).bfloat16()
    tokens = [torch.randint(0, 5, (64,), generator=torch.Generator().manual_seed(seed)) for seed in range(9)]
    each = [reference(model, [squares(one)]) for one in tokens]
    found = Adopted.of(model).gradients([squares(one) for one in tokens], hold, torch.float32)
    assert found.keys() == each[0].keys()
    for name, value in found.items():
        wanted = torch.stack([one[name].float() for one in each]).sum(0)
        # Autograd rounds the rows of a token once for each time it is there.
        few = 8 if name == "0.weight" else 0.5
        assert (value - wanted).norm() <= few * torch.finfo(torch.bfloat16).eps * wanted.norm(), name
        assert value.dtype == torch.float32
        assert not torch.equal(value, value.bfloat16().float()), name


class Tied(nn.Module):
    """An embedding that is also the output matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(normal(11, SIZE))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.embedding(tokens, self.weight)), self.weight)


@pytest.mark.parametrize("hold", [False, True])
def test_look_up_and_product_of_one_weight(hold: bool) -> None:
    tokens = [torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    check(Tied(), [squares(one) for one in tokens], hold)


def test_a_frequent_token_rounds_once() -> None:
    """Half a thousand tokens of one kind; autograd sums them in bf16, which keeps 8 bits."""
    embedding = nn.Embedding(3, 8, dtype=torch.bfloat16)
    tokens, slope = torch.ones(512, dtype=torch.int64), normal(512, 8).abs().bfloat16()
    wanted = slope.double().sum(0).bfloat16()

    def backward(module: nn.Module) -> Tensor:
        found: Tensor = module(tokens)
        return (found * slope).sum()

    found = Adopted.of(embedding).gradients([backward, backward], hold=False)["weight"]
    assert torch.equal(found, torch.stack([0 * wanted, 2 * wanted, 0 * wanted]))
    assert not torch.equal(reference(embedding, [backward])["weight"][1], wanted)


def test_weights_may_be_gone_when_their_gradients_are_computed() -> None:
    layer = nn.Linear(5, 7, dtype=torch.float64)
    backwards = [squares(normal(3, 5))]
    wanted, found = reference(layer, backwards), Adopted.of(layer, "zero3", 2).gradients(backwards, hold=True)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=TOLERANCE, atol=TOLERANCE)


def test_no_tensor_of_the_weight_s_size_is_made() -> None:
    layer = nn.Linear(512, 1024, bias=False)
    adopted = Adopted.of(layer)
    (flat,) = adopted.flats
    flat.gradient.views.open(torch.empty_like(flat.full))
    x = normal(8, 512, dtype=torch.float32)

    def backward(module: nn.Module) -> None:
        torch.autograd.backward(module(x).sum())

    for _ in range(2):  # a first gradient, and one that is added
        with adopted.weights.recorded_in(adopted.weights.queue(hold=False)):
            peak, _, _ = allocated(lambda: backward(adopted.module))
        assert peak < layer.weight.nbytes / 4
    assert allocated(lambda: backward(layer))[0] >= layer.weight.nbytes


def test_of_a_stack_neither() -> None:
    module = Experts((1, 0, 0, 0, 0, 0, 1), 1024)
    adopted = Adopted.of(module)
    (flat,) = adopted.flats
    flat.gradient.views.open(torch.empty_like(flat.full))
    x = normal(2, 1024)

    def backward(module: nn.Module) -> None:
        torch.autograd.backward(module(x).sum())

    for _ in range(2):
        with adopted.weights.recorded_in(adopted.weights.queue(hold=False)):
            peak, _, _ = allocated(lambda: backward(adopted.module))
        assert peak < module.up.nbytes / 2
    assert allocated(lambda: backward(module))[0] >= 2 * module.up.nbytes


def test_what_is_recorded_must_not_change() -> None:
    adopted = Adopted.of(nn.Linear(3, 3))
    adopted.flats[0].gradient.views.open(torch.empty_like(adopted.flats[0].full))
    queue, x = adopted.weights.queue(hold=True), normal(2, 3, dtype=torch.float32)
    with adopted.weights.recorded_in(queue):
        torch.autograd.backward(adopted.module(x).sum())
    x.zero_()
    with pytest.raises(AssertionError, match="was changed"):
        queue.run()


def test_a_backward_of_one_s_own_is_autograd_s() -> None:
    layer = nn.Linear(3, 5, dtype=torch.float64)
    adopted = Adopted.of(layer)
    assert isinstance(adopted.module.weight, Matrix)
    x = normal(2, 3)
    for module in (layer, adopted.module):
        torch.autograd.backward(module(x).square().sum())
    for mine, theirs in zip(adopted.module.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=TOLERANCE, atol=TOLERANCE)
    with torch.inference_mode():
        assert torch.equal(adopted.module(x), layer(x))
    assert type(adopted.module(x)) is Tensor
    loss = adopted.module(x.requires_grad_()).square().sum()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.autograd.backward(slope.sum())


class _Delay:
    """Runs weight gradients as late as can be: just before a REDUCE that needs them."""

    def __init__(self, executor: StepRunner) -> None:
        self.executor: Any = executor
        self.waiting: list[Instruction] = []
        self.longest = 0
        self.reduce = self.executor.handlers[Op.REDUCE]
        self.executor.handlers |= {Op.BACKWARD: self.backward_input, Op.REDUCE: self.weights_and_reduce}

    def backward_input(self, now: Instruction) -> None:
        self.executor.passes.backward_input(now)
        self.waiting.append(now)

    def weights_and_reduce(self, now: Instruction) -> None:
        self.longest = max(self.longest, len(self.waiting))
        for earlier in self.waiting:
            self.executor.passes.backward_weight(earlier)
        self.waiting.clear()
        self.reduce(now)


def train(model_name: str, compute: str, delay: bool, **changes: Any) -> tuple[Tensor, int]:
    """Train on one rank; return the parameters and how many backwards waited at once for their second part."""
    model, cluster = MODELS[model_name], cluster_of(1)
    plan = replace(exact("zero3", cluster, **changes), compute=compute)  # type: ignore[arg-type]
    blocks = model.blocks(torch.float64)
    engine = Engine(
        Blocks(blocks), Workload(cluster=cluster, plan=plan, num_micros=4), model.objective, Training(optimizer=ADAMW)
    )
    delayed = _Delay(engine.runner) if delay else None
    for step in range(3):
        tokens, labels = make_batch(step, 4)
        engine.step([Batch(tokens[row : row + 1], labels[row : row + 1]) for row in range(4)], ADAMW.lr)
    engine.close()
    owned = [flat.optimizer.master for flat in engine.state if flat.optimizer]
    return torch.cat(owned), (delayed.longest if delayed else 0)


@pytest.mark.parametrize(("model", "compute", "changes"), in_turns(3, LATER, DTYPES, PLANS), ids=str)
def test_computed_later_a_weight_gradient_has_the_same_bits(model: str, compute: str, changes: dict[str, Any]) -> None:
    at_once, _ = train(model, compute, delay=False, **changes)
    later, waited = train(model, compute, delay=True, **changes)
    assert torch.equal(at_once, later)
    assert waited >= changes.get("unit", 1)


def test_a_step_ends_with_all_weight_gradients() -> None:
    model, cluster = MODELS["toy"], cluster_of(1)
    engine = Engine(
        Blocks(model.blocks(torch.float64)),
        Workload(cluster=cluster, plan=exact("ddp", cluster), num_micros=1),
        model.objective,
    )
    executor: Any = engine.runner
    executor.handlers[Op.BACKWARD] = executor.passes.backward_input
    tokens, labels = make_batch(0, 1)
    with pytest.raises(AssertionError, match=r"CLIP before the weight gradients of \[\(0, 0\)"):
        engine.step([Batch(tokens, labels)], ADAMW.lr)
    engine.close()
