"""The rollout draws with the parameters that learn; a difference above its usual size is said with its cause."""

from pathlib import Path
from typing import Any

import pytest

from terrace.rl.agreement import DIFFERENCE, Agreement, causes, rollout_is_exact
from terrace.rl.calls.local import LocalRuntime
from tests.support.rl_runs import FOUR, ONE_STAGE, config_of, ran

SHARDED = {"preset": "zero3", "micro_batch": 2, **ONE_STAGE}


def test_gathers_in_bf16_leave_the_rollout_at_the_difference_of_fp32(tmp_path: Path) -> None:
    """The cluster's file has the plan send bf16, unasked."""
    plans = {"actor": SHARDED, "reference": SHARDED}
    config = config_of(
        FOUR, {"algorithm": {"name": "grpo", "kl_coefficient": 0.0}, "plans": plans, "run": {"steps": 2}}
    )
    assert (config.plan.compute, config.plan.messages) == ("fp32", "bf16")
    assert rollout_is_exact(config), "no pass of the actor computes old log-probabilities again"
    agreement = Agreement(config)
    for found in ran(LocalRuntime(timeout_s=120.0), config, tmp_path):
        assert 0 < found[DIFFERENCE] < 1e-5
        assert not agreement.words(found)


@pytest.mark.parametrize(
    ("plan", "usual", "cause"),
    [
        ({"messages": "bf16"}, 1e-3, "nothing rounds on their way"),
        (
            {"wire": {key: {"package": "int8"} for key in ("gather", "gather_backward", "reduce")}},
            1e-3,
            "nothing rounds on their way",
        ),
        ({"wire": {"gather": {"package": "int8"}}}, 0.2, "plan.wire.gather.package = 'int8' beside 'bf16' of"),
        ({"compute": "bf16"}, 0.2, "plan.compute = 'bf16'"),
        ({"mapping": {"package": {"tensor": 2}}, "wire": {"tensor": {"package": "int8"}}}, 0.2, "plan.wire.tensor."),
    ],
)
def test_a_large_difference_is_said_once_with_its_cause(plan: dict[str, Any], usual: float, cause: str) -> None:
    whole = {"preset": "zero3", "micro_batch": 1, **plan}
    # A role that only scores reduces nothing.
    scores = {**whole, "wire": {key: value for key, value in plan.get("wire", {}).items() if key != "reduce"}}
    plans = {"actor": whole, "critic": whole, "reference": scores}
    config = config_of(FOUR, {"plans": plans, "run": {"mini_batch": 16}})
    assert rollout_is_exact(config) == (usual == 1e-3) == (not causes(config))
    agreement = Agreement(config)
    assert not agreement.words({DIFFERENCE: usual})
    assert not agreement.words({DIFFERENCE: 9.0, "sync/version_lag_max": 1.0}), "older weights drew"
    said = agreement.words({DIFFERENCE: 2 * usual})
    assert f"up to {usual:g} is usual: {cause}" in said
    assert said.endswith("algorithm.importance_bound = 2 weighs tokens by it")
    assert not agreement.words({DIFFERENCE: 3 * usual})
