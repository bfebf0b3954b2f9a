"""A model and a loop of your own: `terrace.Trainer` trains blocks, modules that run one after the other.

    python -m examples.own_loop
    torchrun --nproc-per-node 2 -m examples.own_loop
    torchrun --nproc-per-node 2 -m examples.own_loop --transformers

The script is the same on one process and on many: the trainer joins the world that torchrun made. With --transformers
the blocks are those of a `transformers` model, by `terrace.blocks_of`.
"""

import argparse
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import terrace

VOCAB, WIDTH, HEADS, LAYERS, LENGTH = 32, 64, 4, 2, 16


class Embedding(nn.Module):
    """Tokens (B, S) to activations (B, S, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Causal attention and an MLP; (B, S, WIDTH) to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # each (B, H, S, D)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))  # type: ignore[no-any-return]


def own_blocks() -> Sequence[nn.Module]:
    return [Embedding(), *(Layer() for _ in range(LAYERS)), nn.Linear(WIDTH, VOCAB)]


def transformers_blocks() -> Sequence[nn.Module]:
    """The blocks of a Llama; they call the model's own modules."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
    )
    return terrace.blocks_of(LlamaForCausalLM(config))


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The SUM over tokens: the trainer divides, once, by all labels of the step on all ranks."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Sequences that count up from a random number, and their next tokens; the same on every rank."""
    starts = torch.randint(VOCAB, (32, 1), generator=torch.Generator().manual_seed(step))
    tokens = (starts + torch.arange(LENGTH + 1)) % VOCAB
    return tokens[:, :-1], tokens[:, 1:]


def train(make_blocks: Callable[[], Sequence[nn.Module]], steps: int, say: Callable[[str], None]) -> float:
    """Train, and return the loss on sequences that were not trained on."""
    torch.manual_seed(0)
    with terrace.Trainer(make_blocks(), plan="zero3", loss=token_loss, lr=3e-3, say=say) as trainer:
        for step in range(steps):
            warm = min(1.0, (step + 1) / 10)
            result = trainer.step(*batch(step), lr=3e-3 * warm)
            if trainer.rank == 0 and step % 10 == 0:
                say(f"step {step:3}: loss {result.loss:.3f}, gradient norm {result.grad_norm:.2f}")
        held_out = trainer.evaluate(*batch(10_000)).loss  # every rank calls it
        if trainer.rank == 0:
            say(f"held-out loss {held_out:.4f}")
        return held_out


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--transformers", action="store_true", help="a Llama of transformers instead of own modules")
    choice = transformers_blocks if parser.parse_args().transformers else own_blocks
    train(choice, 60, print)
