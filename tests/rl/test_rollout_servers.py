"""Responses by inference servers: the same policy, weights handed over bit for bit, and a line for every fault."""

import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from terrace.base.errors import ConfigError, TerraceError, TrainingError
from terrace.model.blocks import block_specs
from terrace.model.config import parse_model
from terrace.model.hf.names import stored_bytes
from terrace.model.hf.written import write_pretrained
from terrace.model.init import initial_value
from terrace.rl.calls.inline import InlineRuntime
from terrace.rl.calls.local import LocalRuntime
from terrace.rl.config import RlConfig, to_toml_table
from terrace.rl.predicted import predicted
from terrace.rl.resolve import parse, resolve
from terrace.rl.run import HANDED
from terrace.rl.values.ragged import Ragged
from terrace.rl.values.rows import Rows
from terrace.rl.workers import served
from terrace.rl.workers.handing import weights_folder
from terrace.rl.workers.served import ServedRollout, check_servers
from terrace.rl.workers.servers import RolloutKeys
from terrace.rl.workers.settings import EngineSettings
from tests.support.parity import exact
from tests.support.rl_runs import ALONE, GRPO, config_of, ran, served_by
from tests.support.stub_server import Answer, FaultError, GoneError, Stub, first, of_completions, slow, stubs
from tests.support.toys import cluster_of


def config_by(servers: list[Stub], *overrides: Mapping[str, Any], **more: Any) -> RlConfig:
    return config_of(ALONE, GRPO, served_by(servers, **more), *overrides)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "_FIRST_PAUSE_S", 0.001)


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_a_run_learns_from_what_servers_draw(server: str, tmp_path: Path) -> None:
    with stubs(2) as servers:
        config = config_by(servers, server=server)
        steps = ran(InlineRuntime(), config, tmp_path)
        assert all(each.num("/v1/completions") for each in servers)
        assert sum(each.num("/v1/completions") for each in servers) == 2 * 8
        # The second step's weights, and those of the first are gone.
        (weights,) = (tmp_path / HANDED).iterdir()
        assert weights.name.endswith("-00000001")
        assert {each.version for each in servers} == {str(weights)}
    assert config.algorithm.importance_bound == 2.0
    # The stub computes in fp64, as training does: the difference is that of fp32 in which log-probabilities are kept.
    assert all(0 < found["rollout/logprob_diff_max"] < 1e-5 for found in steps)
    assert all(found["sync/servers"] == 2 and found["sync/version_lag_max"] == 0 for found in steps)
    assert all(found["sync/stale_weights"] == found["sync/repeated_requests"] == 0 for found in steps)
    size = stored_bytes(config.model, 8)
    assert all(found["reshard/bytes_sent"] == found["reshard/bytes_planned"] == size for found in steps)
    assert all(found["time/reshard"] > 0 and found["time/generate"] > 0 for found in steps)
    report = predicted(config)
    assert report.sent_bytes["folder"] == size
    assert report.stages["generate"] > 0
    assert parse(to_toml_table(config)) == config


def test_draws_follow_from_seeds_and_differences_weigh_tokens(tmp_path: Path) -> None:
    """Two runs by a stub whose draws follow from seeds; then by one that tells other numbers."""
    with stubs() as servers:
        first_run, again = (ran(InlineRuntime(), config_by(servers), tmp_path / name) for name in "ab")
        servers[0].faults.append(of_completions(_less_likely))
        other = ran(InlineRuntime(), config_by(servers), tmp_path / "c")
    names = ("reward/mean", "actor/pg_loss", "actor/grad_norm", "rollout/logprob_diff_max")
    assert [[found[name] for name in names] for found in first_run] == [
        [found[name] for name in names] for found in again
    ]
    assert other[0]["rollout/logprob_diff_max"] == pytest.approx(1.0, abs=1e-5)
    # Every ratio is e, truncated at 2: the gradient of the first step is twice that of equal numbers.
    assert other[0]["actor/grad_norm"] == pytest.approx(2 * first_run[0]["actor/grad_norm"], rel=1e-4)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_ranks_share_servers_and_draw_while_others_learn(tmp_path: Path) -> None:
    """Four ranks that train and ask, in stages of shards; then one that asks while another learns, a step ahead."""
    stages = {"plan": {"schedule": "1f1b", "mapping": {"system": {"pipeline": 2}}, "params": "node", "micro_batch": 1}}
    together = {"cluster": {"tiers": {"package": {"size": 1}}}}
    pools = [{"ranks": 1, "roles": ["actor"]}, {"ranks": 1, "roles": ["rollout"]}]
    apart = {"cluster": {"tiers": {"package": {"size": 1}, "node": {"size": 1}}}, "pool": pools, "run": {"max_lag": 1}}
    with stubs(2) as servers:
        alone = ran(InlineRuntime(), config_by(servers), tmp_path / "alone")
        config = config_of(GRPO, served_by(servers), together, stages)
        assert config.cluster.world_size == 4
        shared = ran(LocalRuntime(), config, tmp_path / "shared")
        ahead_config = config_of(GRPO, served_by(servers), apart, {"run": {"steps": 4}})
        ahead = ran(LocalRuntime(), ahead_config, tmp_path / "ahead")
    for own, found in zip(alone, shared, strict=True):
        for name in ("reward/mean", "actor/pg_loss", "actor/grad_norm"):
            assert found[name] == pytest.approx(own[name], rel=1e-6, abs=1e-9), name
        assert found["reshard/bytes_sent"] == found["reshard/bytes_planned"] > stored_bytes(config.model, 8)
    assert [found["sync/version_lag"] for found in ahead] == [0, 1, 1, 1]
    assert all(found["rollout/logprob_diff_max"] < 1e-5 for found in ahead[:1])
    total = sum(predicted(config).sent_bytes.values())
    assert shared[0]["reshard/bytes_planned"] == total
    assert predicted(ahead_config).seconds > 0


def _less_likely(choice: Answer) -> None:
    logprobs = choice["logprobs"]["token_logprobs"]
    logprobs[:] = [each - 1.0 for each in logprobs]


MODEL = parse_model({"model_type": "llama", "vocab_size": 12, "hidden_size": 8, "num_hidden_layers": 1,
                     "num_attention_heads": 2, "intermediate_size": 8})  # fmt: skip
PROMPTS = Ragged.of([torch.tensor([3, 4, 5]), torch.tensor([6, 7])])
ROWS = Rows({"prompts": PROMPTS, "seeds": torch.tensor([1, 2]), "greedy": torch.tensor([False, True])})


def rollout_of(servers: list[Stub], folder: Path, num_tokens: int = 4, **more: Any) -> ServedRollout:
    """A rollout whose weights of version 1 are written."""
    keys = RolloutKeys(engine="http", urls=tuple(each.url for each in servers), **more)
    cluster = cluster_of(1)
    settings = EngineSettings(model=MODEL, cluster=cluster, plan=exact("ddp", cluster), num_micros=1, sequence=8)
    handed = str(folder / HANDED / "0a1b2c3d")
    shapes = {(block.name, param.name): param.shape for block in block_specs(MODEL) for param in block.params}
    write_pretrained(
        weights_folder(handed, 1),
        MODEL,
        lambda block, param: initial_value(MODEL, block, param, shapes[block, param], seed=1),
        "fp32",
    )
    return ServedRollout(None, keys=keys, settings=settings, handed=handed, num_tokens=num_tokens, stops=frozenset({0}))


def changed(**more: Any) -> Callable[[Answer], Answer]:
    return lambda choice: {**choice, **more}


def of_logprobs(**more: Any) -> Callable[[Answer], Answer]:
    return lambda choice: {**choice, "logprobs": {**choice["logprobs"], **more}}


def _short(choice: Answer) -> Answer:
    return {**choice, "token_ids": choice["token_ids"][:1], "logprobs": {"token_logprobs": [-1.0]}} | {
        "finish_reason": "length"
    }


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (changed(logprobs=None), "returned no log-probabilities: start it so that it may"),
        (of_logprobs(token_logprobs=[-1.0]), "returned 1 log-probabilities of 4 tokens"),
        (
            of_logprobs(token_logprobs=[-1.0, None, -1.0, -1.0]),
            "returned a log-probability that is above 0 or",
        ),
        (
            of_logprobs(token_logprobs=[-1.0, 0.5, -1.0, -1.0]),
            "returned a log-probability that is above 0 or",
        ),
        (changed(token_ids=None, logprobs={"token_logprobs": []}), "returned no token ids (return_token_ids): start"),
        (changed(token_ids=[5, 5, 12, 5]), "drew token 12, and the model's vocabulary has 12"),
        (changed(token_ids=[5, 0, 5, 5]), "went on after token 0, which ends a response"),
        (changed(prompt_token_ids=[1, 3, 4, 5]), "continued another prompt than the one that was sent"),
        (changed(finish_reason="stop"), "and the run's end with [0]: serve the run's model"),
        (changed(finish_reason="abort"), "ended a response with finish_reason = 'abort'"),
        (_short, "cut a response at 1 tokens, and max_tokens was 4: raise its longest text"),
    ],
)
def test_an_answer_that_cannot_be_trusted_is_one_line(
    change: Callable[[Answer], Answer], line: str, tmp_path: Path
) -> None:
    with stubs() as servers:
        rollout = rollout_of(servers, tmp_path)
        rollout.load(version=1)
        servers[0].faults.append(of_completions(lambda choice: {**change(choice)}))
        # No response of these seeds ends early.
        with pytest.raises(TrainingError, match=re.escape(line)) as error:
            rollout.generate(ROWS)
        assert str(error.value).startswith(f"rollout server {servers[0].url} ")
        assert "\n" not in str(error.value)
        servers[0].faults.clear()
        rollout.load(version=1)
        made = rollout.generate(ROWS)
    assert made.ragged("responses").lengths.tolist() == [4, 4]
    assert made.objects("finish") == ("stop", "length")
    assert made.ragged("versions").values.tolist() == [1] * 8


def test_tokens_may_come_by_their_names(tmp_path: Path) -> None:
    with stubs() as servers:
        rollout = rollout_of(servers, tmp_path)
        rollout.load(version=1)
        usual = rollout.generate(ROWS)
        servers[0].faults.append(of_completions(changed(token_ids=None)))
        named = rollout.generate(ROWS)
    for column in ("responses", "rollout"):
        assert torch.equal(named.ragged(column).values, usual.ragged(column).values)


@pytest.mark.parametrize("error", [FaultError(500, "the engine is dead"), GoneError(), FaultError(429, "busy")])
def test_a_fault_that_passes_is_repeated_and_counted(error: Exception, tmp_path: Path) -> None:
    with stubs() as servers:
        rollout = rollout_of(servers, tmp_path)
        rollout.load(version=1)
        usual = rollout.generate(ROWS)
        servers[0].faults.append(first(3, error))
        made = rollout.generate(ROWS)
        assert rollout.counts() == {"sync/repeated_requests": 3, "sync/stale_weights": 0, "sync/servers": 1}
        assert rollout.counts()["sync/repeated_requests"] == 0
    assert torch.equal(made.ragged("responses").values, usual.ragged("responses").values)


def test_a_request_that_is_refused_ends_the_run_with_the_server_s_words(tmp_path: Path) -> None:
    with stubs() as servers:
        rollout = rollout_of(servers, tmp_path)
        rollout.load(version=1)
        servers[0].faults.append(first(1, FaultError(400, "top_k must be\nabove 0")))
        with pytest.raises(TrainingError, match=r"answered 400 for /v1/completions: top_k must be above 0$"):
            rollout.generate(ROWS)


def test_a_killed_server_is_named_and_the_others_draw_what_it_had(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with stubs(2) as servers:
        rollout = rollout_of(servers, tmp_path)
        rollout.load(version=1)
        usual = rollout.generate(ROWS)
        servers[0].close()
        made = rollout.generate(ROWS)
        assert torch.equal(made.ragged("responses").values, usual.ragged("responses").values)
        assert rollout.counts()["sync/servers"] == 1
        words = f"terrace: rollout server {servers[0].url} is left out until the next hand-over: Connection refused\n"
        assert capfd.readouterr().err == words
        servers[1].close()
        with pytest.raises(TrainingError, match=r"no rollout server answers \(.*; .*: Connection refused\): start one"):
            rollout.generate(ROWS)


def test_a_slow_server_is_left_out_at_its_deadline(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with stubs(2) as servers:
        rollout = rollout_of(servers, tmp_path, deadline_s=0.5)
        rollout.load(version=1)
        servers[1].faults.append(slow(30.0))
        begin_s = time.monotonic()
        made = rollout.generate(ROWS)
        assert time.monotonic() - begin_s < 10.0
    assert len(made) == 2
    assert f"{servers[1].url} is left out until the next hand-over: no answer for /v1/completions within 0.5 s" in (
        capfd.readouterr().err
    )


def test_responses_of_other_weights_are_counted_and_drawn_again(tmp_path: Path) -> None:
    with stubs() as servers:
        rollout = rollout_of(servers, tmp_path)
        rollout.load(version=1)
        usual = rollout.generate(ROWS)
        servers[0].restarted()
        made = rollout.generate(ROWS)
        counts = rollout.counts()
        assert 1 <= counts["sync/stale_weights"] <= 2
        assert servers[0].num("/collective_rpc") == 2, "loaded again once, whatever the number of requests"
        # One that is started again while it draws.
        again = iter([None])
        servers[0].faults.append(of_completions(lambda choice: None if next(again, 0) == 0 else servers[0].restarted()))
        redrawn = rollout.generate(ROWS)
        assert rollout.counts()["sync/stale_weights"] >= 1
        assert servers[0].num("/v1/completions") >= 7, "a response was drawn again"
        # One that is never given its weights back is left out.
        servers[0].faults.append(lambda path, answer: {"weight_version": "other"} if path == "/weight_info" else None)
        with pytest.raises(TrainingError, match="and says that its weights are 'other'"):
            rollout.generate(ROWS)
    for found in (made, redrawn):
        assert torch.equal(found.ragged("responses").values, usual.ragged("responses").values)


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (FaultError(404, "Not Found"), "answered 404 for /collective_rpc: Not Found; it must see"),
        (FaultError(500, "shapes differ"), r"no rollout server answers \(.*: 500 for /collective_rpc: shapes differ\)"),
    ],
)
def test_a_server_that_does_not_load_is_one_line(fault: FaultError, line: str, tmp_path: Path) -> None:
    def refuses(path: str, answer: Answer) -> None:
        if path == "/collective_rpc":
            raise fault

    with stubs() as servers:
        rollout = rollout_of(servers, tmp_path)
        servers[0].faults.append(refuses)
        with pytest.raises(TrainingError, match=line):
            rollout.load(version=1)


def test_servers_are_asked_before_the_run() -> None:
    with stubs(max_model_len=20) as (server,):
        keys = RolloutKeys(engine="http", urls=(server.url,))
        check_servers(keys, 20)
        with pytest.raises(ConfigError, match=r"takes texts of up to 20 tokens, and run\.max_prompt"):
            check_servers(keys, 21)
    with pytest.raises(ConfigError, match="Connection refused; start it first: VLLM_SERVER_DEV_MODE=1 vllm"):
        check_servers(keys, 20)
    check_servers(RolloutKeys(), 10**9)


TWO = {"tiers": {"system": {"size": 2}}}
HTTP = {"rollout": {"engine": "http", "urls": ["http://127.0.0.1:1"]}}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"rollout": {"engine": "http"}}, "needs rollout.urls"),
        ({"rollout": {"urls": ["http://a:1"]}}, "rollout.urls = .* has no effect under rollout.engine = 'own'"),
        ({"rollout": {"engine": "http", "urls": ["http://a:1", "http://a:1"]}}, "names a server twice"),
        ({"rollout": {"engine": "http", "urls": ["a:1"]}}, "'a:1' is no address of a server"),
        ({"rollout": {"engine": "http", "urls": ["http://a:1/v1"]}}, "give scheme, host and port alone"),
        ({"rollout": {"engine": "http", "urls": ["http://a:99999"]}}, "is no address of a server"),
        ({"rollout": {"engine": "tgi"}}, "rollout.engine = 'tgi'"),
        ({"rollout": {**HTTP["rollout"], "server": "vlm"}}, "rollout.server = 'vlm' is not known.*vllm"),
        ({"rollout": {**HTTP["rollout"], "requests": 0}}, "rollout.requests = 0 must be from 1"),
        ({"rollout": {**HTTP["rollout"], "deadline_s": 0.0}}, "rollout.deadline_s = 0.0 must be above 0"),
        ({"rollout": {**HTTP["rollout"], "deadline_s": 600.0}, "cluster": TWO}, "must be below run.timeout_s = 600"),
        ({**HTTP, "run": {"max_lag": 1}}, "run.max_lag = 1: rollout servers return whole responses"),
        ({**HTTP, "run": {"router_replay": True}}, "run.router_replay needs the experts of each token"),
    ],
)
def test_wrong_keys_are_one_line(given: Mapping[str, Any], line: str) -> None:
    with pytest.raises(TerraceError, match=line):
        config_of(ALONE, GRPO, given)


def test_servers_need_no_search_for_a_place() -> None:
    with pytest.raises(ConfigError, match="--place auto places generation on the cluster's ranks"):
        resolve("sort", None, {"plan": None}, HTTP, is_placed=False)
