"""Cases that `make test` leaves to `make test-all`, since other cases of the default suite fail wherever they would.

The rest of a grid is marked where the grid is written (tests/support/nightly.py). Here are cases of short lists, which
took a fifth of the processor time of the suite: each has a sibling in the default suite with the same rule at another
size, placement, format or signal. Where a whole test is left out, a comment names what tests its parts by day.
"""

from collections.abc import Sequence

import pytest

BY_NIGHT: dict[str, tuple[str, ...]] = {
    # Another placement, size or optimizer of the same grid stays.
    "runtime/test_optimizers.py": (
        "test_every_plan_equals_one_process[sgd, momentum-(2, 2, 2) hsdp toy]",
        "test_every_plan_equals_one_process[lion-(4,) ddp deep llama tied]",
        "test_every_plan_equals_one_process[galore-(4,) ddp deep llama tied]",
        "test_every_plan_equals_one_process[sgd-(2, 2, 2) three-level llama, frozen layer]",
        "test_every_plan_equals_one_process[muon-(2, 2, 2) three-level mixture, frozen experts]",
        "test_state_and_buffers_are_what_the_formula_says[three-level-galore-mapping16]",
        "test_state_and_buffers_are_what_the_formula_says[three-level-lion-mapping12]",
        "test_state_and_buffers_are_what_the_formula_says[zero1-muon-mapping7]",
        "test_every_plan_equals_one_process[lsp-(2, 2) zero3 experts]",
        "test_every_plan_equals_one_process[muon-(2, 2, 2) three-level stacks]",
        "test_every_plan_equals_one_process[sgd-(2, 2) zero1 mixture, shared expert]",
        "test_every_plan_equals_one_process[galore-(2, 2) zero3 llama tied]",
        "test_every_plan_equals_one_process[lsp-(2, 2, 2) three-level stacks]",
        "test_every_plan_equals_one_process[muon-(4,) ddp wide llama, 8 kv heads]",
        "test_every_plan_equals_one_process[muon-(2, 2) zero1 llama tied1]",
    ),
    "runtime/test_own_optimizers.py": ("test_every_plan_equals_the_class_in_one_process[(2, 2) zero1 llama tied]",),
    "system/test_coded_base.py": (
        "test_steps_equal_plain_pytorch_over_decoded_matrices[(2,)-zero3 coded base1]",
        "test_codes_are_those_of_the_definition[300x192]",
    ),
    "rl/test_rollout_servers.py": ("test_a_run_learns_from_what_servers_draw[sglang]",),
    "rl/test_folder_hand_over.py": ("test_a_folder_has_the_bits_of_the_trained_model[stages]",),
    "model/test_further_folders.py": ("test_layers_for_further_tokens_come_in_and_go_out[Kimi-K2]",),
    "simulate/test_further_memory.py": ("test_what_a_layer_that_predicts_further_tokens_keeps[2-fp32]",),
    # By day a turn's random numbers and requests are tested, and the own engine's turns.
    "rl/test_served_turns.py": ("test_servers_draw_responses_of_many_turns",),
    # By day one process's gradient is compared with plain torch, and a resume of one rank has the same bits.
    "rl/test_environment_runs.py": ("test_ranks_take_the_step_of_one_process[two tensor ranks]",),
    # By day replay is compared with its definition on one and on four ranks in fp64.
    "rl/test_router_replay.py": ("test_in_bf16_training_finds_what_was_drawn",),
    "system/test_sparse_messages.py": (
        "test_a_run_equals_the_simulation[sizes0-ddp {'sync': {'package': 'topk:64', 'node': 'topk:64'}}]",
        "test_a_run_equals_the_simulation[sizes2-hsdp {'sync': {'system': 'topk:32+feedback'}}]",
    ),
    "system/test_coded_islands.py": (
        "test_rings_of_coded_changes_equal_a_simulation_that_codes_them[(3,)-Outer(tier='package', every=4, "
        "fragments=2, delay=1, optimizer='nesterov', lr=None, momentum=None, keep=0.5, penalty=False, clip=0.0)-"
        "int4+feedback]",
    ),
    "system/test_kept_inputs.py": (
        "test_other_plans_and_models_change_no_bit[zero3-{'unit': 2, 'recompute': ('block.*',)}-{}]",
    ),
    "system/test_pipeline.py": ("test_every_schedule_and_placement_equals_one_process[in turns-(2, 2, 2)]",),
    "system/test_tables.py": ("test_beside_every_axis[experts]",),
    "system/test_outer_loop.py": ("test_a_loop_equals_its_simulation[nesterov]",),
    "checkpoint/test_checkpoint.py": (
        "test_going_on_is_bitwise_the_same[tiers0-three-level-fp32]",
        "test_going_on_is_bitwise_the_same[tiers4-hsdp-fp64]",
        "test_another_plan_and_world_go_on_with_the_same_numbers[tiers2-zero1]",
        "test_another_plan_and_world_go_on_with_the_same_numbers[tiers0-ddp]",
        "test_going_on_is_bitwise_the_same[tiers2-ddp-bf16]",
        "test_going_on_is_bitwise_the_same[tiers3-zero++-fp64]",
        "test_the_first_step_is_the_same_when_resumed[zero++]",
        "test_another_plan_and_world_go_on_with_the_same_numbers[tiers5-ddp]",
    ),
    "checkpoint/test_checkpoint_stored.py": (
        "test_a_resume_under_the_same_plan_has_the_same_bits[bf16 states-adamw]",
        "test_a_resume_under_the_same_plan_has_the_same_bits[bf16 parameters-adamw]",
    ),
    "checkpoint/test_checkpoint_plans.py": (
        "test_a_decoder_saved_under_one_plan_is_there_under_every_other"
        "[ulysses 2 x ring 2, data 2-llama, frozen in part]",
        "test_a_decoder_saved_under_one_plan_is_there_under_every_other"
        "[rows on two tiers, data between-llama, frozen in part]",
        "test_a_decoder_saved_under_one_plan_is_there_under_every_other[alone-llama, frozen in part]",
        "test_a_decoder_saved_under_one_plan_is_there_under_every_other[rows 2 x columns 2 on one tier-gpt_neox]",
        "test_a_decoder_saved_under_one_plan_is_there_under_every_other[3 stages-llama, tied]",
    ),
    "system/test_forward.py": (
        "test_an_evaluation_finds_the_loss_of_the_step_and_changes_nothing[1f1b, sharded]",
        "test_an_evaluation_finds_the_loss_of_the_step_and_changes_nothing[tensor]",
        "test_an_evaluation_finds_the_loss_of_the_step_and_changes_nothing[another loss]",
    ),
    "system/test_independent.py": ("test_mixtures_equal_plain_loops[13]",),
    "system/test_projected_updates.py": (
        "test_a_resume_has_the_same_bits_and_another_plan_the_same_numbers[galore-zero3-{}]",
        "test_a_resume_has_the_same_bits_and_another_plan_the_same_numbers"
        "[lsp-zero1-{'experts': {'node': {'expert': 2}}}]",
        "test_a_resume_has_the_same_bits_and_another_plan_the_same_numbers"
        "[lsp-zero1-{'compute': 'bf16', 'master': 'bf16', 'optimizer_states': 'int8'}]",
    ),
    "rl/test_rl_run.py": (
        "test_a_run_that_goes_on_has_the_same_bits[grpo]",
        "test_a_run_that_goes_on_has_the_same_bits[ppo]",
    ),
    "rl/test_reshard_rounded.py": (
        "test_slices_have_the_values_of_forwards[zero3, int8 in fp8]",
        "test_slices_have_the_values_of_forwards[zero3, int8 on the inner tier]",
        "test_slices_have_the_values_of_forwards[zero3, int8]",
        "test_slices_have_the_values_of_forwards[three-level, int8]",
        "test_slices_have_the_values_of_forwards[zero3, fp8 on the outer tier]",
        "test_slices_have_the_values_of_forwards[zero1, refreshed in bf16]",
    ),
    # The same on more ranks stays.
    "system/test_lora.py": ("test_adapters_beside_a_tensor_axis_equal_plain_pytorch[(2,)]",),
    "system/test_scaled_once.py": ("test_ranks[2]",),
    "system/test_loss_scale.py": (
        "test_all_ranks_skip_a_step_that_overflows[(2,)]",
        "test_all_ranks_skip_a_step_that_overflows[(2, 2)]",
    ),
    "system/test_context_memory.py": ("test_what_a_layer_keeps_on_context_ranks[4-forms1]",),
    "system/test_recompute_operations.py": (
        "test_a_layer_of_tensor_ranks_keeps_the_predicted_bytes[sequences whole]",
        "test_the_bits_of_what_is_kept[(2,)-fp64-1]",
    ),
    "system/test_tensor.py": ("test_some_factorings_of_eight_equal_one_process",),
    "system/test_latent.py": ("test_axes_together_equal_one_process[True]",),
    "system/test_preferences.py": ("test_steps_equal_a_loop_over_single_responses[pipeline-dpo]",),
    "runtime/test_stored_states.py": (
        "test_every_plan_equals_one_process[(2, 2)-zero1 llama tied-[('adamw', 'bf16'), ('adamw', 'int8')]0]",
        "test_every_plan_equals_one_process"
        "[(2, 2, 2)-three-level llama tied-[('adamw', 'bf16'), ('lion', 'int8'), ('sgd', 'bf16'), ('muon', 'int8')]]",
    ),
    # A run that is killed in a save goes on, too.
    "system/test_going_on.py": ("test_a_run_that_stops_in_any_way_goes_on_with_the_same_bits[signal-4]",),
    # Another loop, cluster or pins of the same test stay.
    "cli/test_plan_members.py": ("test_a_plan_with_shares_is_written_and_is_the_step_that_simulate_plays[outer1]",),
    # Searches beside trying everything: others of the same test, and the regret over drawn spaces, stay.
    "planner/test_expert_plans.py": ("test_the_search_is_near_trying_everything[frontier 2x1x2-axes4-4]",),
    "planner/test_ends.py": ("test_the_search_is_near_trying_everything_with_stages_without_a_layer[experts]",),
    "planner/test_differing.py": ("test_the_search_is_near_trying_everything[two look-ups-frontier 2x2x2-axes0]",),
    # The number that the screen advises is that of test_the_fewest_members_are_those_that_searching_every_size_finds.
    "planner/test_least_nodes.py": ("test_the_members_that_are_advised_fit_and_fewer_do_not",),
    "rl/test_values.py": ("test_steps_equal_a_loop_over_responses[zero3-llama values]",),
    "data/test_chat_masks.py": (
        "test_masks_are_those_of_the_slow_reference[prefixes]",
        "test_masks_are_those_of_the_slow_reference[close prefixes]",
    ),
    "roster/test_roster_faults.py": ("test_a_random_history_replays_to_the_same_numbers[0]",),
    "runtime/test_head.py": (
        "test_plans_train_the_same_in_several_chunks[sizes0-case0]",
        "test_plans_train_the_same_in_several_chunks[sizes3-case3]",
        "test_plans_train_the_same_in_several_chunks[sizes5-case5]",
    ),
    "runtime/test_token_numbers.py": (
        "test_steps_and_scores_equal_plain_torch[sizes1-plan1-2-llama tied-True]",
        "test_steps_and_scores_equal_plain_torch[sizes4-plan4-4-gpt2-True]",
    ),
    "model/test_decoder.py": ("test_blocks_are_built_without_symbolic_algebra",),
    # The other product stays.
    "test_installed_products.py": (
        "test_without_a_product_the_command_line_has_the_rest[lab]",
        "test_without_a_product_the_contracts_of_imports_hold[lab]",
    ),
    "comm/test_lane.py": ("test_the_thread_of_a_lane_that_nobody_closed_ends[False]",),
    "data/test_data.py": ("test_micro_batches_make_up_the_global_batch[1-3]",),
    "rl/test_reshard.py": (
        "test_slices_have_the_bits_of_the_trained_model[rows on both tiers-2]",
        "test_slices_have_the_bits_of_the_trained_model[three levels, halves-1]",
    ),
    "checkpoint/test_checkpoint_sgd.py": ("test_sgd_goes_on_from_its_momentum_or_from_no_state_at_all[1]",),
    # Two whole jobs of a recipe, each with two cold ranks; launching by Slurm's variables is tested in launch/.
    "system/test_recipes.py": ("test_the_job_runs_ends_in_time_requeues_itself_and_goes_on",),
}


def mark_by_night(items: Sequence[pytest.Item], whole: bool) -> None:
    """Mark these cases nightly.

    Raises:
        pytest.UsageError: one of them is not among the tests of its file, all of which were collected if `whole`.
    """
    found: dict[str, dict[str, pytest.Item]] = {}
    for item in items:
        file, _, name = item.nodeid.removeprefix("tests/").partition("::")
        if file in BY_NIGHT:
            found.setdefault(file, {})[name] = item
    for file, tests in found.items():
        for name in BY_NIGHT[file]:
            if name in tests:
                tests[name].add_marker(pytest.mark.nightly)
            elif whole:
                raise pytest.UsageError(f"tests/support/by_night.py: tests/{file} has no test {name}")
