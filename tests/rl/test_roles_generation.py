"""Seconds and memory of generation: its bounds, and how memory and tensor rows change it."""

from dataclasses import replace

import pytest
import torch

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Kernels
from terrace.generation.cache_shape import cache_shape
from terrace.generation.states import StatePool
from terrace.model.blocks import block_specs
from terrace.model.config import parse_model
from terrace.model.kinds import LayerKind
from terrace.rl.placement.dataflow import Dataflow, ppo
from terrace.rl.placement.generation import Replica, rows_of
from tests.support.dataflows import llama, nodes, small
from tests.support.families import TABLES

NODE, SEVEN = nodes(1), llama()
FLOW = Dataflow(roles=ppo(SEVEN), prompts=64, samples=4, prompt_tokens=512, response_tokens=512)


def test_bytes_of_weights_and_of_a_token() -> None:
    one, eight = (Replica.of(NODE, SEVEN, rows, "bf16") for rows in (1, 8))
    assert one.weights_bytes == 2 * 6_738_415_616
    assert one.weights_bytes / 8 <= eight.weights_bytes < 1.001 * one.weights_bytes / 8  # norms are whole
    assert one.token_bytes == 8 * eight.token_bytes == 2 * 2 * 32 * 4096


@pytest.mark.parametrize("family", ["llama", "glm4_moe", "deepseek_v3"])
@pytest.mark.parametrize("rows", [1, 2])
def test_bytes_of_a_token_are_those_that_generation_allocates(family: str, rows: int) -> None:
    model = parse_model(TABLES[family])
    replica = Replica.of(NODE, model, rows, "bf16")
    assert replica.token_bytes == cache_shape(block_specs(model), rows).num_bytes(1, torch.bfloat16)


def test_bytes_of_states_are_those_that_generation_allocates() -> None:
    """Of a sequence of any length; rows divide the heads of keys in layers of both kinds."""
    model = parse_model(TABLES["qwen3_next"])
    deltas = [block.operations.delta for block in block_specs(model) if block.operations.delta.heads]
    for rows in (1, 2):
        replica = Replica.of(NODE, model, rows, "bf16")
        pool = StatePool(deltas, rows, torch.device("cpu"), torch.bfloat16)
        pool.copy(0, 15)
        assert replica.state_bytes * 16 == pool.nbytes
        # Room for two sequences' keys and values beside their states, which one more state exceeds.
        two = replica.generation(FLOW, 2)
        assert two.cache_bytes >= 2 * replica.state_bytes
        assert replica.running(FLOW, two.working_bytes) == 2
        assert replica.running(FLOW, two.working_bytes - replica.state_bytes) == 1
    assert rows_of(NODE, replace(model, num_kv_heads=2, delta=replace(model.delta, key_heads=1))) == [1]


def test_a_latent_is_cached_once_for_all_heads() -> None:
    table = TABLES["deepseek_v3"]
    one, two = (Replica.of(NODE, parse_model(table), rows, "bf16") for rows in (1, 2))
    vector = table["kv_lora_rank"] + table["qk_rope_head_dim"]
    assert one.token_bytes == two.token_bytes == 2 * table["num_hidden_layers"] * vector


def test_one_sequence_is_bound_by_reading_the_weights_and_many_by_their_keys_and_values() -> None:
    ideal = replace(NODE, device=replace(NODE.device, kernels=Kernels()))
    replica = Replica.of(ideal, SEVEN, 1, "bf16")
    bandwidth = ideal.device.memory_bandwidth_bytes_per_s
    embedding = 2 * SEVEN.vocab_size * SEVEN.hidden_size  # looked up, not read
    assert replica.decode_s(1, 1) == pytest.approx((replica.weights_bytes - embedding) / bandwidth, rel=0.01)
    more_s = replica.decode_s(64, 2000) - replica.decode_s(64, 1000)
    assert more_s == pytest.approx(64 * 1000 * replica.token_bytes / bandwidth, rel=1e-6)


def test_a_layer_takes_no_less_than_its_launch() -> None:
    replica = Replica.of(NODE, small(), 1, "bf16")
    assert replica.decode_s(1, 1) >= 12 * NODE.device.kernels.host_layer_s


def test_more_memory_runs_more_sequences_and_takes_no_longer() -> None:
    replica = Replica.of(NODE, SEVEN, 1, "bf16")
    seconds = []
    for room in range(int(16e9), int(80e9), int(2e9)):
        running = replica.running(FLOW, room)
        found = replica.generation(FLOW, running)
        assert found.working_bytes <= room
        assert running == found.sequences or found.working_bytes + found.cache_bytes / running * 1.01 > room
        seconds.append(found.seconds)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < seconds[0] / 2


def test_samples_share_the_memory_of_their_prompt() -> None:
    replica = Replica.of(NODE, SEVEN, 1, "bf16")
    alone = replace(FLOW, prompts=256, samples=1)
    assert replica.generation(FLOW, 4).cache_bytes == 4 * replica.token_bytes * (512 + 128)
    assert replica.generation(alone, 4).cache_bytes == 4 * replica.token_bytes * (512 + 512)
    assert replica.generation(FLOW, 4).prefill_s == pytest.approx(replica.generation(alone, 4).prefill_s / 4, rel=0.1)


def test_rows_send_and_share() -> None:
    one, two = (Replica.of(NODE, SEVEN, rows, "bf16") for rows in (1, 2))
    quiet = replace(NODE, device=replace(NODE.device, kernels=Kernels()))
    assert two.prefill_s(8, 512) > one.prefill_s(8, 512) / 2  # its messages
    apart = Replica.of(quiet, SEVEN, 2, "bf16"), Replica.of(quiet, SEVEN, 1, "bf16")
    assert apart[0].decode_s(4, 100) < apart[1].decode_s(4, 100)
    assert rows_of(NODE, SEVEN) == [1, 2, 4, 8]
    with pytest.raises(PlanError, match="rows = 3 do not divide the 8 devices"):
        Replica.of(NODE, SEVEN, 3, "bf16")
    with pytest.raises(PlanError, match="rows = 8 do not divide the 4 heads"):
        Replica.of(NODE, llama(512, 2, 4, 512), 8, "bf16")


def test_a_pass_of_a_token_reads_what_each_window_leaves() -> None:
    whole = llama(2048, 3, 16, 5504)
    kinds = (LayerKind(sliding_window=512, rope_theta=1e4), LayerKind(rope_theta=1e4), LayerKind(rope_theta=1e4))
    mixed, narrow = replace(whole, kinds=kinds), replace(whole, sliding_window=512)
    each = {model: Replica.of(NODE, model, 1, "bf16").decode_s(4096, 4000.0) for model in (mixed, whole, narrow)}
    assert each[narrow] < each[mixed] < each[whole]
    assert each[whole] - each[mixed] == pytest.approx((each[whole] - each[narrow]) / 3, rel=1e-6)
