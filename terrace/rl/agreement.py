"""Whether rollout and training find the same log-probabilities.

Generation uses the same rounded parameters as training's forwards: the hand-over sends them as the gathers and
refreshes of training round them (terrace.rl.hand_over.forward_values). So only the order of arithmetic differs. In fp32
that is rounding error; a narrower compute dtype, products in 8 bits and coded activations add more, and a router may
pick other experts for a token. Where gather_backward has another wire format than gather, the micro-batches of a step
compute with either.
"""

from terrace.model.facts import changed_by_rounding
from terrace.plan.layout import Layout, message_tiers
from terrace.plan.wire import OF_PARAMETERS, ROUTED_ROWS, MessageClass
from terrace.rl.algorithms.metrics import Metrics
from terrace.rl.config import RlConfig
from terrace.rl.placing import ACTOR

DIFFERENCE = "rollout/logprob_diff_max"
# The largest differences of log-probabilities that are usual; guesses, ten times what runs of a few thousand tokens
# showed: 1e-5 to 1e-4 in fp32, 1e-2 in bf16.
_IN_FP32, _ROUNDED = 1e-3, 0.2
_OF_FORWARDS = (MessageClass.TENSOR, MessageClass.CONTEXT, MessageClass.PIPELINE, *ROUTED_ROWS)


def causes(config: RlConfig) -> list[str]:
    """Settings under which generation and training differ by more than rounding in fp32."""
    plan = config.plan
    found = [f"rollout.engine = {config.rollout.engine!r}"] if config.rollout.is_served else []
    found += [f"plan.compute = {plan.compute!r}"] if plan.compute not in ("fp32", "fp64") else []
    found += [f"plan.products = {plan.products!r}"] if plan.products is not None else []
    for message in _OF_FORWARDS:
        row = plan.wire.get(message.value, {})
        found += [f"plan.wire.{message.value}.{tier} = {name!r}" for tier, name in row.items()]
    return found + _of_gathers(config)


def rollout_is_exact(config: RlConfig) -> bool:
    """Whether generation and training agree up to fp32 rounding, and no importance weights are configured."""
    return config.plan.compute == "fp32" and not causes(config) and config.algorithm.importance_bound is None


def _of_gathers(config: RlConfig) -> list[str]:
    # The next micro-batch's forward may reuse a block that was gathered for a backward.
    plan, layout = config.plan, Layout.of(config.places[ACTOR].cluster, config.plan)
    found = list[str]()
    for tier in (layout.tiers[index] for index in message_tiers(layout, MessageClass.GATHER_BACKWARD)):
        forward, backward = (plan.wire_format(each, tier).name for each in OF_PARAMETERS[:2])
        if forward != backward:
            found.append(f"plan.wire.gather.{tier} = {forward!r} beside {backward!r} of gather_backward")
    return found


class Agreement:
    """Tracks the log-probability difference over a run and warns once when it is unusually large."""

    def __init__(self, config: RlConfig) -> None:
        self._causes, self._bound = causes(config), config.algorithm.importance_bound
        # Rounding alone can change a router's choice.
        self._causes += changed_by_rounding(config.model)
        self._usual, self._has_said = _ROUNDED if self._causes else _IN_FP32, False

    def words(self, found: Metrics) -> str:
        """A warning with the cause at the first step with an unusually large difference; "" at all others.

        Steps with responses from older weights are skipped, since the updates in between explain their difference.
        """
        difference = found.get(DIFFERENCE, 0.0)
        if self._has_said or difference <= self._usual or found.get("sync/version_lag_max"):
            return ""
        self._has_said = True
        why = " and ".join(self._causes) or "nothing rounds on their way, so it is a fault: please report it"
        weighs = "" if self._bound is not None else "; algorithm.importance_bound = 2 weighs tokens by it"
        return (
            f"warning: rollout and training differ by {difference:.1e} in the log-probability of a token, and up to "
            f"{self._usual:g} is usual: {why}{weighs}"
        )
