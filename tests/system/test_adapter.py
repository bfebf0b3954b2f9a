"""Decoders of `transformers`, as they are, trained under a plan: the numbers of training them in plain PyTorch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import terrace
from terrace.base.errors import ModelError
from terrace.launch.start import LocalPool, World
from terrace.model.decoder import token_loss
from terrace.runtime.settings import OptimizerConfig
from tests.support.nightly import nightly
from tests.support.toys import cluster_of
from tests.support.user_models import NUM_STEPS, Trained, deviation, plain

transformers: Any = pytest.importorskip("transformers")

# transformers computes norms, softmax and rotary tables in fp32 whatever the model's dtype, whose last bits depend on
# how many rows a tensor has; an eps well above those bits keeps AdamW from dividing by them.
ADAMW = OptimizerConfig(lr=1e-2, eps=1e-3)
TOLERANCE, EXACT = 1e-6, 1e-10
VOCAB = 31
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
}
_GROUPED = _SIZES | {"num_key_value_heads": 2}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "initializer_range": 0.3}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_WINDOW = {"sliding_window": 3}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
_EAGER = {"experts_implementation": "eager", "num_experts_per_tok": 2}  # the others refuse fp64
_QWEN = {"num_experts": 4, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _GROUPED),
    "llama tied eager": ("Llama", _GROUPED | {"tie_word_embeddings": True, "attn_implementation": "eager"}),
    "qwen2": ("Qwen2", _GROUPED | {"tie_word_embeddings": True}),
    "qwen2 sliding": ("Qwen2", _GROUPED | _WINDOW | {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("Qwen3", _GROUPED | {"head_dim": 4}),
    "mistral sliding": ("Mistral", _GROUPED | _WINDOW),
    "gpt2": ("GPT2", _GPT2 | _NO_DROPOUT),
    "gpt_neox": ("GPTNeoX", _SIZES),
    "gpt_neox tied": ("GPTNeoX", _SIZES | {"tie_word_embeddings": True, "use_parallel_residual": False}),
    "olmo2": ("Olmo2", _GROUPED),
    "olmo3": ("Olmo3", _GROUPED | _WINDOW | _MIXED),
    "gemma3": ("Gemma3", _GROUPED | _WINDOW | _MIXED | {"head_dim": 4, "initializer_range": 0.1}),
    "phi": ("Phi", _SIZES),
    "gemma": ("Gemma", _GROUPED | {"head_dim": 4}),
    "granite scaled": ("Granite", _GROUPED | {"embedding_multiplier": 3.0}),
    "mixtral": ("Mixtral", _GROUPED | _EAGER | {"num_local_experts": 4}),
    "qwen2_moe": ("Qwen2Moe", _GROUPED | _EAGER | _QWEN),
}
TAKEN = [name for name in FAMILIES if name not in ("granite scaled", "phi")]
EVERYDAY = ("gpt2", "olmo3", "qwen2_moe")

_IN_FP32 = [name for name in TAKEN if not name.startswith("gpt")]
PIPELINE = {"preset": "zero1", "mapping": {"node": {"pipeline": 2}}, "micro_batch": 2}


def config_class(family: str) -> Any:
    """The configuration of a family's text model."""
    return getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")


def model_of(name: str) -> Any:
    """A tiny model in fp64, the same everywhere."""
    family, table = FAMILIES[name]
    torch.manual_seed(0)
    config = config_class(family)(**table)
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    model = getattr(transformers, family + head)(config)
    return model.double()


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and shifted labels of four sequences."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (4, 8), generator=generator)
    labels = tokens.roll(-1, dims=1)
    labels[:, -1] = labels[0, :3] = -100
    return tokens, labels


def train(world: World, name: str, folder: str, plan: Any = "zero3") -> Trained:
    """Train under a plan; rank 0 saves the model as `transformers` does."""
    model, found = model_of(name), Trained()
    keys = {"beta1": ADAMW.beta1, "beta2": ADAMW.beta2, "eps": ADAMW.eps}
    trainer = terrace.Trainer(
        terrace.blocks_of(model),
        plan=plan,
        num_micros=1 if plan == "zero3" else 2,
        activation=None if plan == "zero3" else (8, 16),
        cluster=cluster_of(*((2,) if plan == "zero3" else (1, 2))),
        loss=token_loss,
        lr=ADAMW.lr,
        optimizer=keys,
        predict=False,
    )
    for step in range(NUM_STEPS):
        result = trainer.step(*batch_of(step))
        found.losses.append(result.loss)
        found.norms.append(result.grad_norm)
    found.parameters = trainer.state_dict()
    trainer.unload()
    for key, value in model.named_parameters():
        assert torch.equal(value, found.parameters[key]), key
    if world.rank == 0:
        model.save_pretrained(folder)
    return found


@pytest.mark.parametrize("name", [*EVERYDAY, *nightly(*(name for name in TAKEN if name not in EVERYDAY))])
def test_training_equals_plain_transformers(pool: LocalPool, name: str, tmp_path: Path) -> None:
    check(pool, name, tmp_path, "zero3")


@pytest.mark.parametrize("name", ["llama tied eager", *nightly("gpt2")])
def test_a_pipeline_trains_them_too(pool: LocalPool, name: str, tmp_path: Path) -> None:
    check(pool, name, tmp_path, PIPELINE)


def check(pool: LocalPool, name: str, tmp_path: Path, plan: Any) -> None:
    """Both give the same figures, and the saved model is the trained one."""
    model = model_of(name)
    wanted = plain(
        lambda tokens: model(tokens, use_cache=False).logits,
        list(model.parameters()),
        token_loss,
        [batch_of(step) for step in range(NUM_STEPS)],
        ADAMW,
    )
    wanted.parameters = {key: value.detach() for key, value in model.named_parameters()}
    for found in pool.run(2, train, name, str(tmp_path), plan):
        assert deviation(found, wanted) < (TOLERANCE if name in _IN_FP32 else EXACT), name
    eager = {key: FAMILIES[name][1][key] for key in FAMILIES[name][1] if key == "experts_implementation"}
    again = type(model).from_pretrained(tmp_path, dtype=torch.float64, **eager)
    tokens, _ = batch_of(9)
    assert torch.allclose(again(tokens).logits, model(tokens).logits, atol=1e-4)


def test_documents_packed_into_a_sequence_do_not_see_one_another() -> None:
    for name in ("llama", "mistral sliding", "gpt2", "gpt_neox", "olmo3", "gemma3"):
        model = model_of(name).eval()
        blocks = terrace.blocks_of(model)
        tokens, _ = batch_of(0)
        positions = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4]).expand(4, 8)
        with torch.no_grad():
            x = tokens
            for block in blocks:
                x = block(x, positions)
            alone = torch.cat([model(tokens[:, :3]).logits, model(tokens[:, 3:]).logits], dim=1)
        assert torch.allclose(x, alone, atol=1e-5), name


@pytest.mark.parametrize(
    ("name", "words"),
    [("granite scaled", "do not give its logits"), ("phi", "embed_dropout")],
)
def test_what_blocks_would_lose_is_refused(name: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        terrace.blocks_of(model_of(name))


@pytest.mark.parametrize(
    ("family", "more", "words"),
    [
        ("Gemma2", {"head_dim": 4}, "final_logit_softcapping = 30.0"),
        ("Granite", {"logits_scaling": 1.0005}, "logits_scaling = 1.0005"),
        ("Mixtral", {"output_router_logits": True, "num_local_experts": 2}, "output_router_logits = True"),
    ],
)
def test_what_the_loss_of_blocks_would_lack_is_refused_by_name(family: str, more: dict[str, Any], words: str) -> None:
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config_class(family)(**_GROUPED | more)).eval()
    before = {name: value.clone() for name, value in model.named_parameters()}
    with pytest.raises(ModelError, match=words):
        terrace.blocks_of(model)
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())


_MAMBA = {"mamba_d_state": 4, "mamba_n_groups": 1, "mamba_chunk_size": 8, "mamba_n_heads": 4, "mamba_d_head": 8}
_MAMBA2 = {"state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 8}
_ATTENDS = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1}


@pytest.mark.parametrize(
    ("family", "more", "outcome"),
    [
        ("Jamba", _ATTENDS | {"mamba_d_state": 4, "mamba_dt_rank": 4}, "take no rows of several documents"),
        ("Bamba", _MAMBA | {"attn_layer_indices": [1]}, "take no rows of several documents"),
        ("FalconH1", _MAMBA | {"mamba_d_ssm": 32}, "carry a state from one document of a row to the next"),
        ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "has no final norm"),
        ("Mamba2", _MAMBA2, "has no final norm"),
    ],
)
def test_hybrids_are_taken_or_refused_in_a_line(family: str, more: dict[str, Any], outcome: str) -> None:
    """Those that are taken keep their rows whole."""
    sizes = {key: value for key, value in (_SIZES if family == "Mamba2" else _GROUPED).items() if key != "n_head"}
    torch.manual_seed(0)
    config = config_class(family)(**sizes | more | {"pad_token_id": None})
    try:
        blocks = terrace.blocks_of(getattr(transformers, f"{family}ForCausalLM")(config).eval())
        found = str(blocks[1].refuses_positions)
    except ModelError as error:
        found = str(error)
    assert outcome in found
    assert "\n" not in found


def test_layers_that_carry_a_state_refuse_positions_before_the_step() -> None:
    torch.manual_seed(0)
    config = transformers.MiniMaxConfig(**_GROUPED, num_local_experts=2, num_experts_per_tok=1)
    blocks = terrace.blocks_of(transformers.MiniMaxForCausalLM(config).eval())
    tokens, labels = batch_of(0)
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4]).expand(4, 8)
    with terrace.Trainer(blocks, plan="ddp", loss=token_loss, lr=0.0, cluster=cluster_of(1), predict=False) as trainer:
        with pytest.raises(ModelError, match="MiniMaxForCausalLM take no rows of several documents: leave positions"):
            trainer.step(tokens, labels, positions)
        assert trainer.step(tokens, labels).loss > 0


def test_an_unnamed_cap_shows_at_large_logits() -> None:
    """A model from scratch has small logits, on which a cap is all but the identity: the comparison scales them up."""
    model = model_of("llama").eval()
    before = model.lm_head.weight.detach().clone()
    model.lm_head.register_forward_hook(lambda _module, _inputs, logits: logits)
    assert len(terrace.blocks_of(model)) == 4
    assert torch.equal(model.lm_head.weight, before)
    whole = model.forward

    def capped(*arguments: Any, **named: Any) -> Any:
        found = whole(*arguments, **named)
        found.logits = 30 * torch.tanh(found.logits / 30)
        return found

    model.forward = capped
    with pytest.raises(ModelError, match="do not give its logits"):
        terrace.blocks_of(model)


def test_dropout_is_refused_in_training_mode_alone() -> None:
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**_GPT2))
    with pytest.raises(ModelError, match=r"= 0\.1 of GPT2LMHeadModel is random"):
        terrace.blocks_of(model)
    assert len(terrace.blocks_of(model.eval())) == 4
    config = transformers.MixtralConfig(**_GROUPED, num_local_experts=4, router_jitter_noise=0.1)
    mixture = transformers.MixtralForCausalLM(config)
    with pytest.raises(ModelError, match=r"mlp\.jitter_noise = 0\.1 of MixtralForCausalLM is random"):
        terrace.blocks_of(mixture)
    assert len(terrace.blocks_of(mixture.eval())) == 4
    with pytest.raises(ModelError, match=r"itself fails on a few tokens \(.* need model.set_experts_implementation"):
        terrace.blocks_of(mixture.double())


def test_what_is_no_decoder_is_refused() -> None:
    with pytest.raises(ModelError, match="Linear is no causal language model of transformers"):
        terrace.blocks_of(nn.Linear(2, 2))
    t5 = transformers.T5Config(vocab_size=9, d_model=4, d_kv=2, d_ff=4, num_layers=1, num_heads=2)
    with pytest.raises(ModelError, match="T5ForConditionalGeneration"):
        terrace.blocks_of(transformers.T5ForConditionalGeneration(t5))
