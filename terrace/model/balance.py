"""Load balancing of experts, the section [balance] of a run: router losses, capacity, gate bias. Needs no torch.

Router losses contribute only to the gradient, not to the reported loss. Like the loss, they are sums over tokens,
divided by the number of labels, and added up over layers. A token has the weight w = labels of its document / tokens of
its document, so that router losses weigh documents as the loss does. If labels have weights, as in learning from
feedback, sums of weights replace both numbers of labels. With s the scores of a token for E experts and z their logits:

    sequence   alpha sum_i f_i sum_t w s_i / sum_j s_j, in every sequence of S tokens, where f_i = E / (k S) times the
               number of choices of i (DeepSeek-V3, 2412.19437, equations 17-20)
    step       the same over all tokens of a step, with f_i from the previous step (Switch Transformer, 2101.03961,
               equations 4-6): f_i is then a constant, and the loss again a sum over tokens
    z          alpha times the sum of w logsumexp(z)^2 (ST-MoE, 2202.08906, equation 5)

The bias of a gate affects the choice of experts, not their weights. After each step, with n_i the tokens of expert i,

    bias       b_i += u sign(mean n - n_i)   (2408.15664, algorithm 1)
"""

from dataclasses import dataclass, fields

from terrace.base.errors import ConfigError

LOSSES = ("sequence", "step", "z")
_ENDLESS = 1e30  # beyond, sums in fp32 overflow
FIGURES = (*LOSSES, "dropped")  # router figures of a step, in this order; the last is a number of choices


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """Factors of the router losses and of the capacity, and the step u of the bias; 0 turns each off."""

    sequence: float = 0.0  # factor of the balance loss over each sequence
    step: float = 0.0  # factor of the balance loss over the whole step
    z: float = 0.0  # factor of the loss on a router's logits
    capacity: float = 0.0  # of an expert, over the tokens that even choices bring; 0: it takes all
    bias: float = 0.0  # step of the bias that evens the choices

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not 0 <= value < _ENDLESS:
                raise ConfigError(f"balance.{item.name} = {value} must be zero or a positive number below {_ENDLESS:g}")

    @property
    def losses(self) -> tuple[str, ...]:
        return tuple(name for name in LOSSES if getattr(self, name))

    @property
    def active(self) -> tuple[str, ...]:
        return tuple(item.name for item in fields(self) if getattr(self, item.name))
