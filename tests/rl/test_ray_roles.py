"""Roles as actors of Ray, on a cluster of two nodes of this machine."""

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from terrace.base.errors import ConfigError, DataError, HangError
from terrace.rl.calls.inline import InlineRuntime
from tests.support.rl_runs import ALONE, config_of, numbers, ran
from tests.support.toy_roles import Scaler, prompts_of

ROOT = Path(__file__).parents[2]
ENDED_S = 5.0  # within which the processes of a failed runtime end: under a second where nothing else runs
_ray: Any = pytest.importorskip("ray", reason="needs the package ray")
_cluster: Any = pytest.importorskip("ray.cluster_utils").Cluster
RayRuntime: Any = import_module("terrace.rl.calls.on_ray").RayRuntime  # which refuses to be imported without Ray


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Two nodes with two cores each."""
    before = signal.getsignal(signal.SIGTERM)  # Ray's is for a driver, and would be that of later tests
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))
        found = _cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        found.add_node(num_cpus=2)
        _ray.init(address=found.address, log_to_driver=False)
        signal.signal(signal.SIGTERM, before)
        yield
        _ray.shutdown()
        found.shutdown()


def test_roles_run_on_two_nodes_and_a_failure_ends_them() -> None:
    with RayRuntime(num_cpus=2.0, timeout_s=120.0) as runtime:
        roles = runtime.pool(2).host(actor=(Scaler, {}), reward=(Scaler, {"factor": 2.0}))
        assert len(set(nodes_of(runtime))) == 2
        rows = prompts_of(2, 2, 2, 2)
        responses = roles["actor"].generate.remote(rows, longer=2)
        assert responses.tokens == [4, 4, 4, 4]
        assert responses.get().tensor("made_by").tolist() == [0, 0, 1, 1]
        scores = roles["reward"].score.remote(rows, responses)
        assert scores.get().tensor("scores").tolist() == [0.0, 4.0, 8.0, 12.0]
        with socket.create_connection(runtime.meeting(), ENDED_S):
            pass
        assert roles["reward"].update(rows, scores) == {"mean": 6.0, "total": 24.0}, "ranks of two nodes add up"
        before_s = time.monotonic()
        with pytest.raises(DataError, match=r"^actor\.fail: row 3 has no prompt \(reported by rank 1\)$"):
            roles["actor"].fail(rank=1, how="input")
        assert time.monotonic() - before_s < ENDED_S
        with pytest.raises(DataError, match="row 3"):
            roles["reward"].pid()


@pytest.mark.nightly
def test_a_run_on_two_nodes_takes_the_steps_of_one_process(tmp_path: Path) -> None:
    """The rollout is on another node than the actor, which sends it its parameters."""
    pools = [{"ranks": 1, "roles": ["actor"]}, {"ranks": 1, "roles": ["rollout"]}]
    steps = {"run": {"steps": 1, "evaluate_every": 0}, "algorithm": {"name": "grpo"}}
    cluster = {"tiers": {name: {"size": 2 if name == "package" else 1} for name in ("package", "node", "system")}}
    config = config_of(steps, {"cluster": cluster, "pool": pools})
    (alone,) = ran(InlineRuntime(), config_of(ALONE, steps), tmp_path / "alone")
    (apart,) = ran(RayRuntime(num_cpus=2.0, timeout_s=120.0), config, tmp_path / "ray")
    assert numbers(apart) == pytest.approx(numbers(alone), rel=1e-9, abs=1e-9)
    assert apart["reshard/bytes_sent"] == apart["reshard/bytes_planned"] > 0


@pytest.mark.nightly
def test_ranks_of_a_node_are_neighbours_and_rows_go_to_another_pool() -> None:
    with RayRuntime(timeout_s=120.0) as runtime:
        actor = runtime.pool(3).host(actor=(Scaler, {}))["actor"]
        critic = runtime.pool(1).host(critic=(Scaler, {}))["critic"]
        nodes = nodes_of(runtime)
        assert len(set(nodes)) == 2
        assert nodes == sorted(nodes, key=nodes.index)
        rows = prompts_of(2, 2, 2, 2)
        assert critic.score(rows, actor.generate.remote(rows)).tensor("scores").tolist() == [0.0, 2.0, 4.0, 6.0]
        assert actor.state(plus=1.0) == [(0, 1.0), (1, 1.0), (2, 1.0)]


@pytest.mark.nightly
def test_an_actor_that_is_killed_or_late_is_named() -> None:
    with RayRuntime(timeout_s=60.0) as runtime:
        actor = runtime.pool(1).host(actor=(Scaler, {}))["actor"]
        with pytest.raises(HangError, match=r"process of rank 0 on .* died; the pool of actor was running actor\.fail"):
            actor.fail(rank=0, how="killed")
    with RayRuntime(timeout_s=20.0) as runtime:
        actor = runtime.pool(1).host(actor=(Scaler, {}))["actor"]
        late = actor.fail.remote(rank=0, how="stalled")
        time.sleep(20.5)  # nobody waits when its time is over
        with pytest.raises(HangError, match=r"actor\.fail: rank 0 did not answer within 20 s"):
            late.get()
    with pytest.raises(ConfigError, match="num_gpus = 1: roles run on the CPU"):
        RayRuntime(num_gpus=1.0)
    with pytest.raises(ConfigError, match="joined a Ray cluster already"):
        RayRuntime("127.0.0.1:1")


def nodes_of(runtime: RayRuntime) -> list[str]:
    """The node of each rank of the first pool."""
    return [node for node, _ in _ray.get([rank.actor.where.remote() for rank in runtime._ranks[0]])]
