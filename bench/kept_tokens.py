"""How large is the error of the divergence that is computed from a teacher's kept tokens?

The teacher is a run folder with a hold-out. The student is the teacher without half its layers (`terrace prune`), and
both see the first rows of the hold-out:

    kept     the divergence that training computes from k kept tokens, a quarter of them drawn
    one      that of the k most probable tokens with one outcome for all others, a lower bound

Target: with 64 tokens, `kept` is within 0.3 % of the divergence of all probabilities at temperatures 1 and 2.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.claims import Claim, judge, options_for_claims, print_table
from terrace.model.decoder import Head
from terrace.model.prune import Shares
from terrace.runtime.distilled import of_hidden, of_top_tokens
from terrace.runtime.hidden import OutputMatrix
from terrace.train.evaluate_own import evaluate_own, own_data
from terrace.train.prune import prune
from terrace.train.top_tokens import first_draws, kept_tokens
from terrace.train.trained import Trained, load_trained

TARGET, NEAR_K, NEAR_T = 0.003, 64, (1.0, 2.0)


@torch.no_grad()
def hidden_of(model: Trained, tokens: Tensor) -> tuple[Tensor, OutputMatrix]:
    """Inputs (B, S, H) of the output matrix, and the matrix."""
    *others, head = model.blocks
    assert isinstance(head, Head), "a language model"
    x = tokens
    for block in others:
        x = block(x)
    return head.entering(x), OutputMatrix(head.weight.detach(), slice(0, len(head.weight)), head.cap)


def one_outcome(log_p: Tensor, log_q: Tensor, k: int) -> Tensor:
    """Mean divergence of k + 1 outcomes, from log-probabilities (N, V)."""
    top = log_p.topk(k)
    chances, rest = top.values.exp(), (1 - top.values.exp().sum(-1)).clamp_min(1e-30)
    of_student = (1 - log_q.exp().gather(-1, top.indices).sum(-1)).clamp_min(1e-30)
    inside = (chances * (top.values - log_q.gather(-1, top.indices))).sum(-1)
    return (inside + rest * (rest.log() - of_student.log())).mean()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; with --check return 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", type=Path, help="run folder")
    parser.add_argument("--rows", type=int, default=96)
    options_for_claims(parser)
    options = parser.parse_args(arguments)
    teacher = load_trained(options.teacher)
    (source, *_) = own_data(options.teacher, print)
    student = prune(teacher, Shares(layers=0.5), lambda model: evaluate_own(model, [source]), options.teacher).model
    steps = range(min(source.num_batches, -(-options.rows // source.batch)))
    tokens = torch.cat([torch.from_numpy(source.rows(step, np.arange(source.batch))[0]) for step in steps])
    tokens = tokens[: options.rows]
    hidden, matrix = hidden_of(teacher, tokens)
    own, own_matrix = hidden_of(student, tokens)
    every, offsets = torch.arange(tokens.numel()), first_draws(np.arange(len(tokens)), tokens.shape[1])
    table, claims = list[list[str]](), list[Claim]()
    for temperature in (1.0, 2.0, 4.0):
        log_q = torch.log_softmax(own.flatten(0, 1) @ own_matrix.weight.t() / temperature, -1)
        log_p, p = of_hidden(hidden.flatten(0, 1), matrix, temperature)(every, log_q)
        whole = float((p * (log_p - log_q)).sum(-1).mean())
        for k in (32, 64):
            ids, log_probs = kept_tokens(hidden, matrix, temperature, k, offsets)
            known, weights = of_top_tokens(ids.flatten(0, 1), log_probs.flatten(0, 1))(every, log_q)
            gaps = [
                float(found) / whole - 1
                for found in ((weights * (known - log_q)).sum(-1).mean(), one_outcome(log_p, log_q, k))
            ]
            outside = float(1 - log_p.topk(k).values.exp().sum(-1).mean())
            table.append([f"{temperature:g}", str(k), f"{outside:.2%}", *(f"{gap:+.3%}" for gap in gaps)])
            if k == NEAR_K and temperature in NEAR_T:
                gap = abs(gaps[0])
                claims.append(Claim(name=f"distance at T = {temperature:g}", found=gap, low=gap, high=gap, goal=TARGET))
    print_table(["T", "k", "outside the k most probable", "kept", "one outcome"], table)
    return judge(claims, options)


if __name__ == "__main__":
    sys.exit(main())
