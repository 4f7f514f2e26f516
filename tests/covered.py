"""Slow tests, each with a quick one that covers what it covers: `make test` runs a selection, `make slow` the whole.

The rule: of tests that are variants of each other (methods of one file, engines, kinds of feedback, …) the one with
the most features is quick. Every method is traced in `make test` (`contract/test_algorithms.py::test_the_plan`), every
file of methods, channel and engine has a quick test of its numbers, and what follows from equality with a transcription
(a limit, a special case) is slow. By file: `test` or `test[id]`, and the quick test, of the same file if none is named.
"""

PLAN = "contract/test_algorithms.py::test_the_plan"
BOTH = "contract/test_both_engines.py::test_the_hard_setting"
MESH = "contract/test_mesh.py::test_the_hard_setting"
TRANSCRIPTION = "test_equals_the_transcription"
CLAIMS = "test_claims_hold_where_results_are_as_they_say_and_fail_where_all_are_the_same"

COVERED: dict[str, dict[str, str]] = {
    "parts/test_projection.py": {
        "test_equals_bisection": "parts/test_projection_properties.py::test_simplex",
    },
    "golden/test_robust_baselines.py": {
        "test_afl": "test_drfa",
        "test_fast_dro[chi2 penalty-False-3]": "test_fast_dro",
        "test_q_fedavg_without_fairness_is_fedavg": "test_q_fedavg",
    },
    "golden/test_asfbo.py": {
        "test_equals_the_transcription[ShroFBO]": TRANSCRIPTION,
        "test_equals_the_transcription[LAASFBO]": TRANSCRIPTION,
        "test_equals_the_transcription[SimFBO]": TRANSCRIPTION,
    },
    "golden/test_bome.py": {"test_the_gap_falls_as_the_barrier_promises": TRANSCRIPTION},
    "golden/test_br_fedbi.py": {
        "test_the_coin_decides_for_all_clients_how_many_samples_they_take": "test_estimates_on_full_batches_telescope",
        "test_br_fedbi_equals_the_transcription_under_a_rule": "test_momentum_equals_the_transcription",
        "test_with_the_mean_it_is_fedbio_with_one_step_and_shared_batches": "test_estimates_on_full_batches_telescope",
        "test_seven_equal_honest_clients_reach_the_solution_beside_three_liars": (
            "channels/test_robust.py::test_three_of_ten_clients_that_send_minus_ten_times_theirs"
        ),
    },
    "golden/test_cited_bilevel.py": {
        "test_aggitd_equals_the_transcription_for_one_q_in_each_round": "test_fedmbo_equals_the_transcription",
        "test_local_momentum_equals_the_transcription": "test_adafbio_equals_the_transcription",
        "test_stocbio_is_exact_on_unlike_clients": "test_mrbo_equals_the_transcription",
    },
    "golden/test_cobo.py": {
        "test_the_weights_become_the_clusters": TRANSCRIPTION,
        "test_each_client_evaluates_its_own_model_on_both_engines": (
            "run/test_evaluation.py::test_means_and_quantiles_are_those_of_the_clients"
        ),
        "test_equals_the_transcription[one step]": TRANSCRIPTION,
        "test_equals_the_transcription[one step, an even cohort, the cosine]": TRANSCRIPTION,
        "test_fixed_weights_end_at_the_root_of_a_linear_system": TRANSCRIPTION,
    },
    "golden/test_fedbio.py": {
        "test_one_local_step_is_exact": TRANSCRIPTION,
        "test_a_minimax_problem": TRANSCRIPTION,
        "test_equals_the_transcription[FedBiOAcc]": TRANSCRIPTION,
        "test_equals_the_transcription[FedBiOLocal]": TRANSCRIPTION,
        "test_equals_the_transcription[FedBiO]": TRANSCRIPTION,
    },
    "golden/test_feddro.py": {
        "test_equals_the_transcription[GCIVR]": TRANSCRIPTION,
        "test_equals_the_transcription[SCGD]": TRANSCRIPTION,
        "test_equals_the_transcription[DSFedDRO]": TRANSCRIPTION,
        "test_shared_inner_values_converge": "test_counterexample_trajectories",
        "test_equals_the_transcription[MBSGD]": TRANSCRIPTION,
        "test_equals_the_transcription[ParallelSGD]": TRANSCRIPTION,
        "test_equals_the_transcription[FedAvg II]": "test_counterexample_trajectories",
        "test_counterexample_trajectories[I-0.0-golden0]": TRANSCRIPTION,
        "test_counterexample_trajectories[modified-1.5-golden2]": TRANSCRIPTION,
        "test_counterexample_trajectories[FedDRO-1.5-golden3]": TRANSCRIPTION,
    },
    "golden/test_fedmsa.py": {
        "test_compositional_problems_equal_the_transcription": (
            "golden/test_multi_level.py::test_equals_the_transcription"
        ),
        "test_all_clients_in_phase_1_make_the_limit_exact_with_one_client_in_phase_2": TRANSCRIPTION,
        "test_the_limit_is_the_solution_for_any_number_of_local_steps": TRANSCRIPTION,
        "test_one_local_step_without_momentum_is_soba": TRANSCRIPTION,
        "test_the_limit_of_a_composition_is_the_solution": "golden/test_multi_level.py::test_equals_the_transcription",
    },
    "golden/test_fednest.py": {
        "test_equals_the_transcription[LFedNestSVRG-bilevel]": "test_a_cohort_is_averaged_by_its_own_weights",
        "test_equals_the_transcription[FedNest-minimax]": TRANSCRIPTION,
        "test_equals_the_transcription[FedNestSGD-bilevel]": TRANSCRIPTION,
        "test_equals_the_transcription[FedNest-bilevel]": "test_a_cohort_is_averaged_by_its_own_weights",
        "test_equals_the_transcription[LFedNestNonAlt-bilevel]": TRANSCRIPTION,
        "test_compositional_local_steps_are_exactly_x_minus_alpha_tau_h": "test_compositional_start_without_y",
    },
    "golden/test_first_order.py": {
        "test_equals_the_transcription[F2SA2-anchor-None]": TRANSCRIPTION,
        "test_equals_the_transcription[VPBGD-none-None]": TRANSCRIPTION,
        "test_an_optimizer_at_the_server_steps_both_lower_variables": (
            "contract/test_server_optimizer.py::test_a_tuple_of_moments_only_where_there_are_several_lower_variables"
        ),
        "test_equals_the_transcription[F2SA-none-None]": TRANSCRIPTION,
        "test_sgha_equals_the_transcription[True]": "test_sgha_equals_the_transcription",
        "test_the_limit_of_f2sa_is_off_by_a_constant_over_the_multiplier": TRANSCRIPTION,
        "test_the_limit_of_v_pbgd_is_that_of_f2sa": TRANSCRIPTION,
        "test_the_limit_of_f2sa_2_is_off_by_the_square_of_that": TRANSCRIPTION,
        "test_the_limit_of_meha_is_off_by_a_constant_over_the_multiplier": TRANSCRIPTION,
        "test_the_limit_of_sgha_is_off_by_a_constant_times_the_regularization": "test_sgha_equals_the_transcription",
        "test_the_limit_without_an_anchor": TRANSCRIPTION,
        "test_meha_without_convexity": TRANSCRIPTION,
    },
    "golden/test_hypergradient.py": {
        "test_random_neumann_with_everyone": (
            "parts/test_inverse_hessian.py::test_random_is_one_of_the_products_and_uniform"
        ),
        "test_one_step_of_x_is_the_closed_form": "golden/test_fednest.py::test_a_cohort_is_averaged_by_its_own_weights",
        "test_light_step_is_each_clients_own_closed_form": "golden/test_fednest.py::test_equals_the_transcription",
        "test_random_neumann_of_one_cohort_estimates_that_cohorts_series": (
            "parts/test_inverse_hessian.py::test_random_is_one_of_the_products_and_uniform"
        ),
    },
    "golden/test_minimax.py": {
        "test_the_mean_of_proxskips_control_variates_with_lost_and_with_clipped_replies": (
            "test_proxskip_equals_the_transcription"
        ),
        "test_equals_the_transcription[MomentumLocalSGDA]": TRANSCRIPTION,
        "test_equals_the_transcription[FedGDAGT]": TRANSCRIPTION,
        "test_equals_the_transcription[LocalExtragradient]": TRANSCRIPTION,
        "test_plain_local_steps_end_off_the_saddle_point": TRANSCRIPTION,
        "test_anchored_steps_end_at_the_saddle_point": TRANSCRIPTION,
        "test_the_limit_with_momentum": TRANSCRIPTION,
        "test_proxskip_ends_at_the_saddle_point_and_remembers_the_clients_directions_there": (
            "test_proxskip_equals_the_transcription"
        ),
    },
    "golden/test_multi_level.py": {
        "test_the_limit_is_the_solution_where_one_function_differs_and_with_tracked_jacobians": TRANSCRIPTION,
        "test_two_functions_are_a_compositional_problem": TRANSCRIPTION,
        "test_semideviation": TRANSCRIPTION,
    },
    "golden/test_own_inner.py": {
        "test_equals_the_transcription[Acc-FCSG-M]": TRANSCRIPTION,
        "test_equals_the_transcription[Fed-DR-SCGD]": TRANSCRIPTION,
        "test_equals_the_transcription[FCSG-M]": TRANSCRIPTION,
        "test_equals_the_transcription[ComFedL]": TRANSCRIPTION,
        "test_an_averaged_inner_value_solves_another_problem": TRANSCRIPTION,
    },
    "golden/test_personalised.py": {
        "test_equals_the_transcription[FineTuned]": TRANSCRIPTION,
        "test_equals_the_transcription[PFedMe]": TRANSCRIPTION,
    },
    "golden/test_saddle.py": {
        "test_equals_the_transcription[FedAvgSaddle-fedavg_saddle]": TRANSCRIPTION,
    },
    "golden/test_weighted_nodes.py": {
        "test_local_svrg_equals_the_transcription": TRANSCRIPTION,
        "test_equals_the_transcription[ABA-letters1]": TRANSCRIPTION,
        "test_a_random_output_and_a_center_that_is_a_client": TRANSCRIPTION,
    },
    "channels/test_attacks.py": {
        "test_the_ledger_is_that_of_honest_clients[alone]": "test_the_ledger_is_that_of_honest_clients",
        "test_the_ledger_is_that_of_honest_clients[knows all]": "test_the_ledger_is_that_of_honest_clients",
        "test_two_engines_agree[alone]": "test_two_engines_agree",
    },
    "channels/test_compression.py": {
        "test_feedback_as_in_the_papers[federation-difference]": "test_feedback_as_in_the_papers",
        "test_feedback_as_in_the_papers[federation-aggregate]": "test_feedback_as_in_the_papers",
        "test_feedback_as_in_the_papers[federation-None]": "test_feedback_as_in_the_papers",
        "test_with_feedback_a_quadratic_is_solved_and_without_it_is_not": "test_feedback_as_in_the_papers",
        "test_a_nested_method_converges": "test_feedback_as_in_the_papers",
        "test_who_is_absent_or_not_heard_keeps_its_memory[simulation]": (
            "test_who_is_absent_or_not_heard_keeps_its_memory"
        ),
        "test_a_checkpoint_keeps_the_feedback[error-simulation]": "test_a_checkpoint_keeps_the_feedback",
    },
    "channels/test_privacy.py": {
        "test_the_seed_does_not_lead_to_the_noise[federation]": (
            "engines/test_engines.py::test_sites_see_neither_the_seed_nor_the_servers_keys"
        ),
        "test_a_clip_leaves_the_estimate_of_the_hessian_alone": (
            "test_the_estimate_of_the_hessian_is_right_from_the_start"
        ),
        "test_a_mark_finds_its_leaf_in_any_order[dict]": "test_a_mark_finds_its_leaf_in_any_order",
    },
    "channels/test_private.py": {
        "test_one_client_changes_every_result_of_a_method_by_at_most_what_is_declared": (
            "test_one_client_changes_every_kind_of_result_of_a_round_by_at_most_what_is_declared"
        ),
        "test_another_cohort_of_a_round_comes_from_the_noise_seed_alone[2]": (
            "test_another_cohort_of_a_round_comes_from_the_noise_seed_alone"
        ),
        "test_the_calibrated_noise_spends_the_budget_at_the_last_round[None]": (
            "test_the_calibrated_noise_spends_the_budget_at_the_last_round"
        ),
    },
    "channels/test_private_records.py": {
        "test_the_same_numbers_in_blocks_on_several_devices": (
            "engines/federation/test_records.py::test_with_the_noise_seed_fixed_sites_have_the_numbers_of_a_simulation"
        ),
    },
    "channels/test_robust.py": {
        "test_with_the_plain_mean_they_do_harm": "test_three_of_ten_clients_that_send_minus_ten_times_theirs",
        "test_three_of_ten_clients_that_send_minus_ten_times_theirs[Krum]": (
            "test_three_of_ten_clients_that_send_minus_ten_times_theirs"
        ),
        "test_unlike_honest_clients_move_the_median": "test_equals_numpy_variable_by_variable",
    },
    "channels/test_secure.py": {
        "test_every_engine_has_the_same_numbers_to_the_last_bit[mesh-16]": (
            "test_every_engine_has_the_same_numbers_to_the_last_bit"
        ),
        "test_every_engine_has_the_same_numbers_to_the_last_bit[blocks-32]": (
            "test_every_engine_has_the_same_numbers_to_the_last_bit"
        ),
        "test_the_fixed_point_is_that_of_numpy[8.0]": "test_the_fixed_point_is_that_of_numpy",
        "test_another_shape_and_another_bound_on_the_same_problem": (
            "engines/test_engines.py::test_two_shapes_of_one_problem"
        ),
    },
    "contract/test_algorithms.py": {
        "test_a_sweep_over_a_float_compiles_once": "run/test_solve.py::test_a_sweep_over_a_float_compiles_once",
        "test_x_stays_in_its_set": "golden/test_minimax.py::test_equals_the_transcription",
        "test_a_bound_that_nothing_reaches_changes_nothing": (
            "testing/test_testing.py::test_a_sound_method_passes_what_the_broken_ones_fail"
        ),
        "test_the_order_of_clients_does_not_matter[ScaffoldSaddle-Minimax]": (
            "test_the_order_of_clients_does_not_matter"
        ),
        "test_the_contract_of_anyone_s_method[FedAvg-SingleLevel-channel and faults]": BOTH,
        "test_a_solution_stays_put[FedSVRG-SingleLevel]": "test_a_solution_stays_put",
    },
    "contract/test_placement.py": {
        "test_nothing_is_compiled_from_chunk_to_chunk[0]": "test_nothing_is_compiled_from_chunk_to_chunk",
        "test_everybody_goes_block_by_block": "test_a_cohort_that_does_not_fit_goes_block_by_block",
        "test_a_value_that_is_not_finite_ends_the_run_in_the_middle": "test_rounds_in_any_portions",
    },
    "contract/test_secure.py": {
        "test_secure_sums[FedAvg-SingleLevel]": (
            "channels/test_secure.py::test_every_engine_has_the_same_numbers_to_the_last_bit"
        ),
    },
    "run/test_check.py": {
        "test_at_a_stationary_point_rounding_is_no_wrong_derivative[single-0]": (
            "test_at_a_stationary_point_rounding_is_no_wrong_derivative"
        ),
        "test_compositional_problems[own outer]": "test_compositional_problems",
        "test_a_saddle_is_no_lower_level": "test_a_lower_level_that_curves_down_a_little",
        "test_the_wrong_sign[minimax]": "test_the_wrong_sign",
        "test_a_variable_that_is_not_used[problem1-Bilevel.lower does not depend on y]": (
            "test_a_variable_that_is_not_used"
        ),
        "test_a_variable_that_is_not_used[problem3-Minimax.objective does not depend on y]": (
            "test_a_variable_that_is_not_used"
        ),
        "test_a_part_of_x_that_no_loss_uses[bilevel]": "test_a_part_of_x_that_no_loss_uses",
        "test_a_value_that_is_not_finite[it]": "test_a_value_that_is_not_finite",
        "test_at_a_stationary_point_rounding_is_no_wrong_derivative[single-1]": (
            "test_at_a_stationary_point_rounding_is_no_wrong_derivative"
        ),
        "test_at_a_stationary_point_rounding_is_no_wrong_derivative[single-2]": (
            "test_at_a_stationary_point_rounding_is_no_wrong_derivative"
        ),
        "test_at_a_stationary_point_rounding_is_no_wrong_derivative[bilevel-1]": (
            "test_at_a_stationary_point_rounding_is_no_wrong_derivative"
        ),
        "test_at_a_stationary_point_rounding_is_no_wrong_derivative[bilevel-2]": (
            "test_at_a_stationary_point_rounding_is_no_wrong_derivative"
        ),
        "test_a_level_that_is_linear_in_y[minimax]": "test_a_level_that_is_linear_in_y",
        "test_compositional_problems[one data set]": "test_compositional_problems",
        "test_compositional_problems[scope]": "test_compositional_problems",
        "test_no_problems_are_found_in_the_built_in_tasks[portfolio-given1]": (
            "test_no_problems_are_found_in_the_built_in_tasks"
        ),
    },
    "contract/test_both_engines.py": {
        "test_lost_repeated_and_late_requests_change_nothing[PDSGD-SingleLevel]": (
            "test_lost_repeated_and_late_requests_change_nothing"
        ),
        "test_the_hard_setting[FedAvg-SingleLevel]": "test_the_hard_setting",
        "test_single_precision[FedAvg-to-FedAvg]": PLAN,
    },
    "engines/test_checkpoints.py": {
        "test_all_rows_are_written_again": "test_rows_that_changed",
        "test_another_every_keeps_the_rows": "test_more_rounds_go_on_from_the_end",
        "test_resumed_is_uninterrupted[simulation]": "test_keys_in_state_and_memory",
        "test_an_extended_run_is_an_uninterrupted_one": "test_more_rounds_go_on_from_the_end",
        **{
            f"test_another_evaluate_is_refused[2-{case}]": "test_another_evaluate_is_refused"
            for case in ("body", "array", "two", "callable", "optional", "added")
        },
    },
    "engines/test_corners.py": {
        "test_lost_replies_of_everyone": "test_an_exchange_with_everyone_beside_a_cohort",
        **{
            f"{name}[federation]": name
            for name in (
                "test_memory_is_the_own_cohorts_where_another_is_asked_first",
                "test_the_noise_hides_a_client_that_is_drawn_three_times",
                "test_maps_that_are_read_later",
                "test_exchanges_of_one_name_share_what_a_channel_remembers",
                "test_a_channel_stands_before_the_client_that_holds_the_centres_data",
            )
        },
    },
    "engines/test_engines.py": {
        "test_an_asynchronous_run_leaves_neither_loss_nor_data_behind": (
            "test_a_run_leaves_neither_loss_nor_data_behind"
        ),
        **{
            f"{name}[federation]": name
            for name in ("test_who_is_not_heard_keeps_its_memory", "test_too_few_replies_fail_the_round")
        },
    },
    "channels/test_codecs.py": {
        **{
            f"test_bits_are_packed_as_numpy_packs_them[{size}]": "test_bits_are_packed_as_numpy_packs_them"
            for size in (7, 8, 64)
        },
        "test_random_places_are_one_of_each_stretch[37-8]": "test_random_places_are_one_of_each_stretch",
        "test_random_places_are_one_of_each_stretch[9-9]": "test_random_places_are_one_of_each_stretch",
        "test_what_is_unbiased_by_its_error_bars[Quantize(bits=4)]": "test_what_is_unbiased_by_its_error_bars",
    },
    "cli/test_cli.py": {
        "test_resume_gives_the_run_that_was_not_cut_short": "test_resume_keeps_how_often_a_run_was_evaluated",
        "test_a_new_algorithm_for_every_class_of_problems[compositional-settings1-distance-0.5]": (
            "test_a_new_algorithm_for_every_class_of_problems"
        ),
        "test_a_new_algorithm_for_every_class_of_problems[minimax-settings0-distance-0.5]": (
            "test_a_new_algorithm_for_every_class_of_problems"
        ),
    },
    "data/test_sampling.py": {
        "test_a_cohort_is_a_sorted_set_of_clients[10-4]": "test_a_cohort_is_a_sorted_set_of_clients",
        "test_a_cohort_is_a_sorted_set_of_clients[40-5]": "test_a_cohort_is_a_sorted_set_of_clients",
        "test_a_cohort_is_a_sorted_set_of_clients[6-5]": "test_a_cohort_is_a_sorted_set_of_clients",
        "test_every_order_is_equally_likely[3]": "test_every_order_is_equally_likely",
        "test_every_client_is_equally_likely[10-4]": "test_every_client_is_equally_likely",
        "test_every_cohort_is_equally_likely[6-3-20]": "test_every_cohort_is_equally_likely",
        "test_shuffled_is_a_bijection[4]": "test_shuffled_is_a_bijection",
    },
    "documents/test_reveals.py": {
        "test_a_gradient_gives_the_rows_back_unless_records_are_hidden": (
            "channels/test_private_records.py::test_an_attack_on_one_record_succeeds_no_more_often_than_allowed"
        ),
    },
    "experiments/test_page.py": {
        "test_the_files_of_an_experiment_are_those_of_its_results[flamby-heart]": (
            "test_the_files_of_an_experiment_are_those_of_its_results"
        ),
        "test_the_pages_are_those_that_the_files_give": "test_the_files_of_an_experiment_are_those_of_its_results",
    },
    "problems/test_objectives.py": {
        f"test_a_capped_risk_with_ties[{cap}-tied{tied}]": "test_a_capped_risk_with_ties"
        for cap, tied in (
            ("1.5", 1),
            ("1.5", 2),
            ("2.0", 0),
            ("2.0", 2),
            ("2.0", 3),
            ("3.0", 0),
            ("3.0", 1),
            ("3.0", 3),
        )
    },
    "run/test_worth_survival.py": {
        "test_the_exact_models_minimise_coxs_loss[True]": "test_the_exact_models_minimise_coxs_loss",
        "test_fedavg_on_all_splits_is_the_librarys_on_each": (
            "run/test_worth.py::test_all_splits_in_one_program_are_the_librarys_fedavg_on_each"
        ),
    },
    "base/test_convolutions.py": {
        "test_pooling_agrees_with_xla_with_ties[max-size0-strides0-VALID]": "test_pooling_agrees_with_xla_with_ties",
        "test_pooling_agrees_with_xla_on_infinite_inputs[size0-strides0-VALID]": (
            "test_pooling_agrees_with_xla_on_infinite_inputs"
        ),
    },
    "base/test_draws.py": {
        "test_another_default_generator_changes_nothing[federation]": "test_another_default_generator_changes_nothing",
    },
    "problems/test_models.py": {
        "test_the_same_network_in_any_library[engine3-equinox]": "test_the_same_network_in_any_library",
        "test_the_mean_over_masks_is_the_loss": "test_one_batch_has_one_key",
    },
    "language/test_author.py": {
        "test_the_lower_levels_gradient_in_x[federation-1, 3, 40, 200]": "test_the_lower_levels_gradient_in_x",
        "test_the_lower_levels_gradient_in_x[simulation-equal]": "test_the_lower_levels_gradient_in_x",
        "test_the_lower_levels_gradient_in_x[federation-equal]": "test_the_lower_levels_gradient_in_x",
    },
    "golden/test_asynchronous.py": {
        "test_fedavg": "test_fedbio",
        "test_one_client_after_another_is_a_synchronous_run": "test_fedbio",
    },
    "language/test_clock.py": {
        "test_a_deadline_that_nobody_meets_in_some_round_ends_the_run[drawn]": (
            "test_a_deadline_that_nobody_meets_in_some_round_ends_the_run"
        ),
        "test_chances_are_those_of_the_simulation[{'first': 15}]": "test_chances_are_those_of_the_simulation",
        "test_the_numbers_are_those_without_a_clock[Scaffold-SingleLevel]": (
            "test_the_numbers_are_those_without_a_clock"
        ),
        "test_on_every_kind_of_simulation[mesh]": "test_on_every_kind_of_simulation",
        "test_the_numbers_are_those_without_a_clock[FedBiOAcc-Bilevel]": "test_the_numbers_are_those_without_a_clock",
        "test_the_numbers_are_those_without_a_clock[FedNest-Bilevel]": "test_the_numbers_are_those_without_a_clock",
    },
    "golden/test_optimizers.py": {
        "test_the_optimizers_of_the_paper": "test_the_rules_of_the_paper",
    },
    "golden/test_single_level.py": {
        "test_scaffold": "golden/test_asynchronous.py::test_control_variates",
        "test_fedavg": "test_fedsvrg",
        "test_fedprox": "test_fedsvrg",
    },
    "engines/federation/test_faults.py": {
        "test_the_coordinator_is_killed_and_goes_on": (
            "engines/test_checkpoints.py::test_the_last_round_that_all_have_is_used"
        ),
    },
    "engines/federation/test_hospitals.py": {
        "test_own_intercepts_are_right_on_average_where_fedavg_is_not": (
            "golden/test_fedbio.py::test_equals_the_transcription"
        ),
    },
    "engines/test_programs.py": {
        "test_programs_are_told_apart_by_what_they_call[a partial]": "test_programs_are_told_apart_by_what_they_call",
        "test_programs_are_told_apart_by_what_they_call[an object]": "test_programs_are_told_apart_by_what_they_call",
        "test_a_callbacks_fingerprint_is_the_same_in_every_process": (
            "engines/test_checkpoints.py::test_a_function_is_the_same_in_another_process"
        ),
    },
    "engines/test_remembered.py": {
        "test_the_same_numbers[lost replies]": "test_the_same_numbers",
        "test_a_run_that_diverges_ends_as_on_the_device": "test_the_same_numbers",
    },
    "engines/federation/test_secure_federation.py": {
        "test_with_certificates_the_numbers_are_the_same": (
            "test_the_same_numbers_as_in_simulation_and_nothing_but_masks_leaves_a_site"
        ),
        "test_with_noise_for_records": (
            "engines/federation/test_records.py::test_with_the_noise_seed_fixed_sites_have_the_numbers_of_a_simulation"
        ),
    },
    "engines/federation/test_records.py": {
        "test_with_faults_the_run_goes_on_without_the_site": "test_a_spent_budget_ends_the_answers_in_all_runs",
    },
    "engines/federation/test_commands.py": {
        "test_the_status_page_of_a_private_run": "report/test_status.py::test_it_shows_what_a_private_run_has_spent",
    },
    "engines/federation/test_asynchronous.py": {
        "test_fedavg": "test_fedbio",
    },
    "contract/test_server_optimizer.py": {
        "test_what_travels_is_the_method_s[WeightedNodesProx-WeightedNodes]": "test_what_travels_is_the_method_s",
    },
    "testing/test_testing.py": {
        "test_a_broken_method_is_caught_by_name[loose clip]": "test_a_broken_method_is_caught_by_name",
        "test_a_broken_method_is_caught_by_name[equal clients]": "test_a_broken_method_is_caught_by_name",
    },
    "documents/test_docs.py": {
        "test_the_page_on_the_clock": "language/test_clock.py::test_a_deadline_leaves_out_late_replies",
    },
    "theory/test_theory.py": {
        "test_minimax_converges": "test_full_batch_converges",
        "test_asfbo_converges": "test_full_batch_converges",
    },
    "run/test_tune.py": {
        "test_pictures[1]": "test_pictures",
        "test_pictures[2]": "test_pictures",
    },
    "data/test_data.py": {
        "test_covtype": "test_mnist",
        "test_fashion_mnist": "test_mnist",
    },
    "tasks/test_weighted_task.py": {
        "test_other_data[fashion-mnist-4-360]": "test_other_data",
        "test_personal_models_are_scored_where_they_belong": "test_the_centre_is_like_its_kind",
        "test_the_networks_convolutions_are_convolutions": (
            "base/test_convolutions.py::test_convolutions_agree_with_xla"
        ),
    },
    "tasks/test_tasks.py": {
        "test_the_defaults_lower_the_metric[minimax-quadratic]": "test_the_defaults_lower_the_metric",
        "test_the_defaults_lower_the_metric[composition]": "test_the_defaults_lower_the_metric",
        "test_the_defaults_lower_the_metric[portfolio]": "test_the_defaults_lower_the_metric",
        "test_output_layers_of_the_clients_own": "test_the_defaults_lower_the_metric",
    },
    "experiments/channels/test_channels_experiments.py": {
        f"{CLAIMS}[{case}]": CLAIMS for case in ("experiment0-as_claimed", "experiment2-as_claimed_bytes")
    },
    "experiments/fedbio/test_fedbio_rates.py": {
        "test_what_is_thinned_gives_what_the_whole_gives": (
            "test_the_logarithm_of_the_accelerated_methods_proof_is_taken_out"
        ),
        "test_a_floor_like_a_power_of_the_step_has_the_slope_of_the_best_step": (
            "test_the_logarithm_of_the_accelerated_methods_proof_is_taken_out"
        ),
    },
    "experiments/flamby/test_flamby_tables.py": {
        "test_claims_hold_on_flambys_own_numbers_and_fail_on_others[experiment1-benchmark1]": (
            "test_claims_hold_on_flambys_own_numbers_and_fail_on_others"
        ),
    },
    "experiments/delay/test_delay.py": {
        "test_the_correction_of_over_selection_is_refused": "language/test_clock.py::test_what_cannot_be_corrected",
    },
    "contract/test_primitives.py": {
        "test_every_primitive_is_what_it_says[lockstep]": "test_every_primitive_is_what_it_says",
    },
    "experiments/machinery/test_running.py": {
        "test_all_runs_of_a_shape_share_one_compiled_program": (
            "run/test_solve.py::test_a_sweep_over_a_float_compiles_once"
        ),
        "test_a_run_has_its_own_precision_and_leaves_the_process_its": (
            "test_a_second_call_computes_nothing_and_writes_the_same"
        ),
        "test_a_scaled_down_page_describes_what_was_run": "test_a_second_call_computes_nothing_and_writes_the_same",
    },
    "experiments/choice/test_choice.py": {
        CLAIMS: "test_equal_work_is_read_within_it",
    },
    "cli/test_speeds.py": {
        "test_it_can_be_repeated_and_resumed": "test_an_asynchronous_run_is_that_of_python_and_can_be_resumed",
    },
    "language/test_when.py": {
        "test_only_those_who_have_to_do_the_work[engine1]": "test_only_those_who_have_to_do_the_work",
    },
}


def own_name(name: str) -> str:
    """A test's name without its parameters."""
    return name.partition("[")[0]


def _in_file(file: str, name: str) -> str:
    return name if "::" in name else f"{file}::{name}"


# For every slow test the quick one, both as file::test.
QUICK_FOR = {
    _in_file(file, name): _in_file(file, quick) for file, each in COVERED.items() for name, quick in each.items()
}
