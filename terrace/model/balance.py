"""Losses, capacity and bias that keep the loads of experts even: the section [balance] of a run. Pure: needs no torch.

Losses of a router are sums over tokens that are added to the loss for its gradient alone; both are divided by the same
number of labels. A token weighs w, the labels of its document over its tokens, so that a document weighs the
same in all losses, and those of routers are means over routed tokens. Where labels have weights, as in learning from
feedback, sums of weights take the place of both numbers of labels. Layers add up. With s the scores of a token
for E experts and z their logits:

    sequence   alpha sum_i f_i sum_t w s_i / sum_j s_j,   f_i = E / (k S) times the choices of i   in every sequence of
               S tokens (DeepSeek-V3, 2412.19437, equations 17-20)
    step       the same over all tokens of a step, with f_i of the choices of the step before (Switch Transformer,
               2101.03961, equations 4-6): a constant, so that this, too, is a sum over tokens
    z          alpha times the sum of w logsumexp(z)^2   (ST-MoE, 2202.08906, equation 5)

The bias of a gate chooses and does not weigh. After each step, with n_i the tokens that expert i got in it,

    bias       b_i += u sign(mean n - n_i)   (2408.15664, algorithm 1)
"""

from dataclasses import dataclass, fields

from terrace.base.errors import ConfigError

LOSSES = ("sequence", "step", "z")
_ENDLESS = 1e30  # beyond, sums in fp32 overflow
FIGURES = (*LOSSES, "dropped")  # of routers in a step's sums, in this order; the last counts choices


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """The factor of each loss of a router, of an expert's capacity, and the step u of a bias; 0 turns it off."""

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
        """The losses that are on."""
        return tuple(name for name in LOSSES if getattr(self, name))

    @property
    def active(self) -> tuple[str, ...]:
        """The keys that are on."""
        return tuple(item.name for item in fields(self) if getattr(self, item.name))
