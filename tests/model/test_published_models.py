"""The config.json files of published models, as they are."""

import json
from typing import Any

import pytest

from terrace.base.errors import ModelError
from terrace.model.blocks import num_params
from terrace.model.config import parse_model, to_table
from terrace.model.hf.config import published_table
from tests.support.published import PUBLISHED
from tests.support.toy_tables import KIMI


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_read_whole(name: str) -> None:
    table, count = PUBLISHED[name]
    config = parse_model(table)
    assert num_params(config) == count
    # The file that an export writes says the same under the older keys of RoPE as under the newer ones.
    published = published_table(to_table(config), "bfloat16", {})
    assert parse_model(json.loads(json.dumps(published))) == config
    without_newer = {key: value for key, value in published.items() if key != "rope_parameters"}
    assert parse_model(without_newer) == config


# A file that transformers wrote in full, as releases before 4.30 did, has these beside its own.
FULL_DUMP: dict[str, Any] = {
    "_commit_hash": None, "add_cross_attention": False, "bad_words_ids": None, "begin_suppress_tokens": None,
    "chunk_size_feed_forward": 0, "cross_attention_hidden_size": None, "diversity_penalty": 0.0, "do_sample": False,
    "encoder_no_repeat_ngram_size": 0, "exponential_decay_length_penalty": None, "is_encoder_decoder": False,
    "length_penalty": 1.0, "max_sequence_length": 2048, "num_beam_groups": 1, "num_beams": 1, "output_scores": False,
    "pruned_heads": {}, "remove_invalid_values": False, "tf_legacy_loss": False, "tie_encoder_decoder": False,
    "use_bfloat16": False,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_remarks_change_nothing(name: str) -> None:
    table, _ = PUBLISHED[name]
    assert parse_model(table | FULL_DUMP) == parse_model(table)


@pytest.mark.parametrize("key", ["full_attn_mod", "interpolate_factor", "lm_head_bias", "mlp_bias"])
def test_parts_that_a_family_does_without_are_not_remarks(key: str) -> None:
    """Each with another value than Phi-4-mini has would be another model."""
    table, _ = PUBLISHED["Phi-4-mini-instruct"]
    with pytest.raises(ModelError, match=f"{key} = .* is not implemented"):
        parse_model(table | {key: True if key.endswith("bias") else 2})


def test_an_unknown_key_comes_with_the_way_to_drop_it() -> None:
    table, _ = PUBLISHED["Llama-3.1-8B"]
    fix = "where it changes nothing that the model computes, delete it from config.json"
    with pytest.raises(ModelError, match=f"unknown key 'remark' for llama; .*{fix}"):
        parse_model(table | {"remark": 1})
    with pytest.raises(ModelError, match=rf"unknown key rope_scaling\.remark for rope_type llama3; .*{fix}"):
        parse_model(table | {"rope_scaling": table["rope_scaling"] | {"remark": 1}})


def test_the_inner_table_of_released_kimi_linear_folders() -> None:
    """Layers are named by numbers from 1 there, and an export writes them so."""
    plain = KIMI
    inner: dict[str, Any] = {"num_heads": 4, "head_dim": 3, "short_conv_kernel_size": 4}
    inner |= {"kda_layers": [1], "full_attn_layers": [2]}
    released = {key: value for key, value in plain.items() if not key.startswith("linear_") and key != "layer_types"}
    released |= {"linear_attn_config": inner, "mla_use_nope": True, "rope_theta": 10000.0, "rope_scaling": None}
    config = parse_model(released)
    assert config == parse_model(plain)
    assert published_table(to_table(config), "bfloat16", {})["linear_attn_config"] == inner
    with pytest.raises(ModelError, match="linear_num_heads = 2 and linear_attn_config disagree"):
        parse_model(released | {"linear_num_heads": 2})
    with pytest.raises(ModelError, match="must name each layer, from 1, once"):
        parse_model(released | {"linear_attn_config": inner | {"kda_layers": [3]}})
    with pytest.raises(ModelError, match=r"gate_lower_bound.* is not implemented"):
        parse_model(released | {"linear_attn_config": inner | {"gate_lower_bound": -5.0}})
