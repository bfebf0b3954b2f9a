"""Gates against choices and weights worked out by hand, and whether they leak later tokens."""

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from terrace.base.errors import ModelError, PlanError
from terrace.model.balance import BalanceConfig
from terrace.model.blocks import block_specs
from terrace.model.config import parse_model, to_table
from terrace.model.experts.config import ExpertsConfig
from terrace.model.experts.gates import coarse, cosine, expert_choice, noisy
from terrace.model.experts.gating import Gating, Passage
from terrace.model.experts.mixture import Mixture, Router
from terrace.model.facts import refuse_non_causal
from terrace.model.hf.config import published_table
from terrace.model.init import initial_value
from terrace.model.spec import BlockSpec
from terrace.plan.balance_rules import check_balance
from terrace.plan.expert_traffic import ExpertTraffic
from terrace.plan.mesh import Mesh
from terrace.plan.presets import preset
from terrace.plan.tensor_traffic import TensorTraffic
from tests.support.mixtures import PLAIN, mixture
from tests.support.toys import cluster_of

WIDE = torch.float64


def rows(*lengths: int) -> Passage:
    """Sequences of these lengths, one after the other, in a run that begins with them."""
    sequences = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return Passage(None, sequences, len(lengths), torch.arange(sum(lengths)))


def router_of(experts: ExpertsConfig, hidden: int = 2) -> Router:
    torch.manual_seed(0)
    found = Router(mixture(experts, hidden_size=hidden, num_attention_heads=1, num_key_value_heads=1), dtype=WIDE)
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter)
    return found


def splitmix(number: int) -> int:
    """The generator of Steele et al. once more, from its published form."""
    number = (number + 0x9E3779B97F4A7C15) % 2**64
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) % 2**64
    return number ^ (number >> 31)


def scrambled(counter: int, key: int) -> float:
    number = splitmix((counter * 0x9E3779B97F4A7C15 + key - 0x9E3779B97F4A7C15) % 2**64)
    return ((number >> 11) + 0.5) / 2**53


@pytest.mark.parametrize(("seed", "layer", "place"), [(0, 1, 0), (7, 3, 123_456_789_012), (-1, 0, 5)])
def test_noise_is_what_its_definition_says(seed: int, layer: int, place: int) -> None:
    key = splitmix(splitmix(seed % 2**64) + layer)
    found = noisy.normal(seed, layer, torch.tensor([place]), 3)[0].tolist()
    for expert, value in enumerate(found):
        one, other = (scrambled(2 * (3 * place + expert) + half, key) for half in (0, 1))
        assert value == pytest.approx(math.sqrt(-2 * math.log(one)) * math.cos(2 * math.pi * other), abs=1e-12)


def test_noise_is_normal_and_differs_by_seed_layer_and_place() -> None:
    found = noisy.normal(3, 2, torch.arange(20_000), 8)
    assert abs(float(found.mean())) < 0.01
    assert float(found.std()) == pytest.approx(1, abs=0.01)
    assert float((found**4).mean()) == pytest.approx(3, abs=0.1)
    columns = torch.corrcoef(torch.cat([found[:, :4], noisy.normal(4, 2, torch.arange(20_000), 8)[:, :4]], 1).t())
    assert float((columns - torch.eye(8)).abs().max()) < 0.03
    assert torch.equal(noisy.normal(3, 2, torch.arange(19_990, 20_000), 8), found[19_990:])
    assert not torch.equal(noisy.normal(3, 1, torch.arange(10), 8), found[:10])


def test_the_noisy_gate_by_hand() -> None:
    """softplus(ln 3 - ln 1) with R' x = ln(e - 1) is 1: noise as it is."""
    x = torch.tensor([[1.0, 0.0]], dtype=WIDE)
    weight = torch.tensor([[1.0, 9.0], [2.0, 9.0], [4.0, 9.0]], dtype=WIDE)
    size = torch.tensor([[math.log(math.e - 1), 0.0]] * 3, dtype=WIDE)
    noise = torch.tensor([[3.5, 0.0, -1.0]], dtype=WIDE)
    assert noisy.logits(x, weight, size, None).tolist() == [[1.0, 2.0, 4.0]]
    assert noisy.logits(x, weight, size, noise)[0].tolist() == pytest.approx([4.5, 2.0, 3.0])


def test_the_noisy_gate_takes_the_softmax_of_its_best() -> None:
    router = router_of(replace(PLAIN, gate="noisy"))
    gating, x = Gating(BalanceConfig(), seed=5), torch.randn(4, 2, dtype=WIDE)
    passage = rows(4)
    calm = router(x, passage)
    router.gating = gating
    assert torch.equal(router(x, passage).weights, calm.weights)  # not training
    gating.trains, router.layer = True, 2
    choice = router(x, passage)
    z = x @ router.weight.t() + noisy.normal(5, 2, torch.arange(4), 8) * torch.log1p((x @ router.noise.t()).exp())
    best = z.topk(2, -1)
    assert torch.equal(choice.experts, best.indices)
    assert torch.allclose(choice.weights, best.values.softmax(-1), rtol=0, atol=1e-14)
    assert not torch.equal(choice.weights, calm.weights)


def test_the_cosine_gate_by_hand() -> None:
    """Lengths do not matter; at tau = 1/2 cosines count twice."""
    x = torch.tensor([[3.0, 4.0], [0.0, 2.0]], dtype=WIDE)
    vectors = torch.tensor([[5.0, 0.0], [0.0, 0.1], [-1.0, -1.0]], dtype=WIDE)
    found = cosine.logits(x, torch.eye(2, dtype=WIDE), vectors, torch.tensor([math.log(0.5)], dtype=WIDE))
    half = -math.sqrt(0.5)
    assert found[0].tolist() == pytest.approx([2 * 0.6, 2 * 0.8, 2 * 1.4 * half])
    assert found[1].tolist() == pytest.approx([0.0, 2.0, 2 * half])
    swapped = cosine.logits(x, torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=WIDE), vectors, torch.zeros(1, dtype=WIDE))
    assert swapped[0].tolist() == pytest.approx([0.8, 0.6, 1.4 * half])


def test_experts_choose_by_hand() -> None:
    """Two sequences, of 4 and 3 tokens: with k = 1 of 2 experts each takes 2 tokens of either."""
    scores = torch.tensor([0.9, 0.8, 0.3, 0.1, 0.6, 0.6, 0.6], dtype=WIDE)
    logits = torch.stack([scores.log(), (1 - scores).log()], 1)
    config = ExpertsConfig(num_experts=2, per_token=1, intermediate_size=4, gate="expert_choice", normalized=False)
    choice = expert_choice.choose(logits, torch.tensor([0, 0, 0, 0, 1, 1, 1]), 2, config)
    none = -1
    assert choice.experts.tolist() == [
        [0, none],
        [0, none],
        [none, 1],
        [none, 1],
        [0, 1],  # of equal scores the earlier two
        [0, 1],
        [none, none],
    ]
    assert choice.weights.flatten().tolist() == pytest.approx(
        [0.9, 0, 0.8, 0, 0, 0.7, 0, 0.9, 0.6, 0.4, 0.6, 0.4, 0, 0]
    )


@pytest.mark.parametrize("per_token", [1, 3, 8])
def test_every_expert_takes_equally_many_tokens_of_a_sequence(per_token: int) -> None:
    config = replace(PLAIN, per_token=per_token, gate="expert_choice", normalized=False, scale=2.0)
    torch.manual_seed(1)
    logits, passage = torch.randn(5 + 0 + 9, 8), rows(5, 0, 9)
    choice = expert_choice.choose(logits, passage.sequences, 3, config)
    for first, last in ((0, 5), (5, 14)):
        taken = (choice.experts[first:last] >= 0).sum(0)
        assert taken.tolist() == [-(-per_token * (last - first) // 8)] * 8
        left = logits[first:last].softmax(-1).masked_fill(choice.experts[first:last] >= 0, 0).amax(0)
        chosen = logits[first:last].softmax(-1).masked_fill(choice.experts[first:last] < 0, 2).amin(0)
        assert bool((left <= chosen).all())
    assert torch.allclose(choice.weights, 2 * logits.softmax(-1).masked_fill(choice.experts < 0, 0))


def mixture_of(experts: ExpertsConfig) -> Mixture:
    torch.manual_seed(2)
    found = Mixture(mixture(experts, hidden_size=8), dtype=WIDE)
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return found


GATES = (
    replace(PLAIN, gate="noisy"),
    replace(PLAIN, gate="cosine", router_size=3),
    replace(PLAIN, gate="expert_choice", normalized=False),
)


@pytest.mark.parametrize("experts", GATES, ids=lambda experts: experts.gate)
def test_a_layer_is_its_definition_and_has_its_gradient(experts: ExpertsConfig) -> None:
    module, x = mixture_of(experts), torch.randn(2, 5, 8, dtype=WIDE)
    module.router.gating = gating = Gating(BalanceConfig(), seed=1)
    gating.trains, gating.passage = True, rows(5, 5)
    tokens = x.flatten(0, 1)
    choice = module.router(tokens, gating.passage)

    def through(token: Tensor, expert: int) -> Tensor:
        gate, up, down = (stack.weight[expert] for stack in (module.gate, module.up, module.down))
        return down @ (torch.nn.functional.silu(gate @ token) * (up @ token))

    expected = [
        sum(
            (weight * through(token, int(expert)) for expert, weight in zip(of, by, strict=True) if expert >= 0),
            torch.zeros(8, dtype=WIDE),
        )
        for token, of, by in zip(tokens, choice.experts, choice.weights, strict=True)
    ]
    assert torch.allclose(module(x).flatten(0, 1), torch.stack(expected), rtol=0, atol=1e-12)
    assert torch.autograd.gradcheck(module, (x.requires_grad_(),), eps=1e-6, atol=1e-6)
    torch.autograd.backward(module(x).sum())
    assert all(p.grad is not None and bool(p.grad.any()) for p in module.router.parameters())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"gate": "nosy"}, "gate = nosy is not implemented; did you mean 'noisy'"),
        ({"gate": "cosine"}, "router_size = 0 with gate = cosine"),
        ({"router_size": 4}, "router_size = 4 with gate = softmax"),
        ({"gate": "noisy", "normalized": False}, "normalized = False: the weights of gate = noisy sum to 1"),
        ({"gate": "expert_choice"}, "normalized = True: gate = expert_choice has the scores themselves"),
        ({"gate": "expert_choice", "normalized": False, "per_token": 9}, "per_token = 9 must be at most the 8 experts"),
        ({"num_groups": 4, "kept_groups": 2}, "num_groups = 4: groups of experts are of gate = 'sigmoid'"),
    ],
)
def test_gates_that_cannot_be(changed: dict[str, object], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        mixture(replace(PLAIN, **changed))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_that_differ_by_rounding_are_equal(dtype: torch.dtype) -> None:
    scores = torch.tensor([0.3, 0.3 * (1 + 4 * torch.finfo(dtype).eps), 0.31, 0.0, 1.0], dtype=dtype)
    found = coarse(scores)
    assert bool(scores[0] < scores[1])
    assert bool(found[0] == found[1] < found[2])
    assert torch.allclose(found, scores, rtol=1e-4, atol=0)


MIXTRAL = {"model_type": "mixtral", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 1}
MIXTRAL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3 = MIXTRAL | {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 6, "head_dim": 4}
QWEN3.pop("num_local_experts")


@pytest.mark.parametrize("table", [MIXTRAL, QWEN3], ids=lambda table: str(table["model_type"]))
@pytest.mark.parametrize(
    "keys",
    [
        {"gate": "noisy"},
        {"gate": "cosine"},
        {"gate": "cosine", "router_size": 3},
        {"gate": "expert_choice"},
        {"route": "even"},
    ],
    ids=str,
)
def test_gates_are_keys_of_a_model(table: dict[str, object], keys: dict[str, object]) -> None:
    normalizes = {"norm_topk_prob": keys.get("gate") == "noisy"} if "num_experts" in table else {}
    config = parse_model(table | keys | normalizes)
    assert config.experts is not None
    assert config.experts.router_size == (keys.get("router_size", 4) if keys.get("gate") == "cosine" else 0)
    assert parse_model(to_table(config)) == config
    specs = block_specs(config)
    module = Mixture(config)
    assert [(param.name, param.shape) for param in specs[1].params if param.name.startswith("mlp.")] == [
        (f"mlp.{name}", tuple(parameter.shape)) for name, parameter in module.named_parameters()
    ]
    with pytest.raises(ModelError, match=f"{next(iter(keys))} = .*transformers has none, so a .* folder cannot say it"):
        published_table(to_table(config), "float32", {})
    if config.experts.is_noncausal:
        with pytest.raises(ModelError, match="can neither be sampled from nor be evaluated"):
            refuse_non_causal(config)
    else:
        refuse_non_causal(config)


def test_a_family_without_keys_of_gates_is_written_as_before() -> None:
    assert not {"gate", "route", "router_size"} & set(to_table(parse_model(MIXTRAL)))


def test_a_temperature_begins_above_zero() -> None:
    config = parse_model(MIXTRAL | {"gate": "cosine"})
    assert 0 < float(initial_value(config, "layers.0", "mlp.router.temperature", (1,), 0).exp()) < 1


@pytest.mark.parametrize(
    ("balance", "gate", "mapping", "said"),
    [
        ({"sequence": 0.1}, "softmax", {"node": {"context": 2}}, ""),
        ({"capacity": 1.5}, "softmax", {"node": {"context": 2}}, "balance.capacity = 1.5 goes by the tokens of whole"),
        ({}, "expert_choice", {"node": {"context": 2}}, "gate = 'expert_choice' goes by the tokens of whole sequences"),
        ({"capacity": 1.5}, "expert_choice", {}, "balance.capacity has no effect with gate = 'expert_choice'"),
        ({"capacity": 4.0}, "softmax", {}, "balance.capacity = 4.0 has no effect: an expert may then take every token"),
        ({"step": 0.1}, "expert_choice", {}, "balance.step has no effect with gate = 'expert_choice'"),
        ({"step": 0.1, "capacity": 1.5}, "softmax", {}, "balance.step = 0.1 goes by the tokens that experts took, and"),
        ({"z": 0.1, "step": 0.1}, "noisy", {"node": {"context": 2}}, ""),
    ],
)
def test_what_goes_by_whole_sequences(
    balance: dict[str, float], gate: str, mapping: dict[str, dict[str, int]], said: str
) -> None:
    cluster = cluster_of(1, 2)
    plan = replace(preset("zero3", cluster), mapping=mapping)
    blocks = block_specs(parse_model(MIXTRAL | {"gate": gate}))
    with pytest.raises((ModelError, PlanError), match=said) if said else nullcontext():
        check_balance(BalanceConfig(**balance), Mesh.of(cluster, plan), plan, blocks)
    dense = parse_model({"model_type": "llama", **{key: MIXTRAL[key] for key in list(MIXTRAL)[1:7]}})
    if balance:
        with pytest.raises(ModelError, match=r"has no effect: no block of this model declares a router"):
            check_balance(BalanceConfig(**balance), Mesh.of(cluster, plan), plan, block_specs(dense))


def test_documents_that_are_dealt_out_have_no_sequence_loss() -> None:
    cluster = cluster_of(1, 2)
    plan = replace(preset("zero3", cluster), balance="cost")
    with pytest.raises(PlanError, match=r"balance.sequence = 0.1 goes by the choices of whole sequences, and plan"):
        check_balance(BalanceConfig(sequence=0.1), Mesh.of(cluster, plan), plan, block_specs(parse_model(MIXTRAL)))


def test_choices_that_are_not_counted_are_not_told() -> None:
    cluster = cluster_of(1, 2)
    own = [BlockSpec(name=spec.name, params=spec.params) for spec in block_specs(parse_model(MIXTRAL))]
    plan, balance = preset("zero3", cluster), BalanceConfig(sequence=0.1)
    check_balance(balance, Mesh.of(cluster, plan), plan, own)
    plan = replace(plan, mapping={"node": {"context": 2}})
    with pytest.raises(PlanError, match=r"which ranks share under this plan, and those of block 'layers.0' are not co"):
        check_balance(balance, Mesh.of(cluster, plan), plan, own)


def test_even_routes_have_nothing_to_balance() -> None:
    cluster = cluster_of(2)
    plan, config = preset("zero3", cluster), parse_model(MIXTRAL | {"route": "even"})
    assert config.experts is not None
    blocks = block_specs(replace(config, experts=replace(config.experts, biased=True)))
    for name in ("bias", "step"):
        with pytest.raises(ModelError, match=rf"balance.{name} = 0.1 has no effect with route = 'even'"):
            check_balance(BalanceConfig(**{name: 0.1}), Mesh.of(cluster, plan), plan, blocks)


def test_even_routing_needs_a_token_for_each_expert() -> None:
    cluster = cluster_of(2)
    plan = replace(preset("zero3", cluster), experts={"package": {"expert": 2}})
    block = block_specs(parse_model(MIXTRAL | {"route": "even"}))[1]
    with pytest.raises(PlanError, match=r"route = 'even' deals with 8 tokens at a time.* has 12: change"):
        ExpertTraffic.of(TensorTraffic.of(Mesh.of(cluster, plan), ("package",), plan, 12), block)
