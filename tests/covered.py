"""Slow tests, each with a quick one that covers what it covers: `make test` runs a selection, `make slow` the whole.

The rule: of tests that are variants of each other (methods of one file, engines, kinds of feedback, …) the one with
the most features is quick. Every method is traced in `make test` (`contract/test_algorithms.py::test_the_plan`), every
file of methods, channel and engine has a quick test of its numbers, and what follows from equality with a transcription
(a limit, a special case) is slow. By file: a quick test, of the same file if no other is named, and those that it
covers; `[id]` alone is the quick test itself with these parameters.
"""

BOTH = "contract/test_both_engines.py::test_the_hard_setting"
TRANSCRIPTION = "test_equals_the_transcription"
CLAIMS = "test_claims_hold_where_results_are_as_they_say_and_fail_where_all_are_the_same"

# fmt: off
COVERED: dict[str, dict[str, list[str]]] = {
    "parts/test_projection.py": {"parts/test_projection_properties.py::test_simplex": ["test_equals_bisection"]},
    "golden/test_robust_baselines.py": {
        "test_drfa": ["test_q_fedavg", "test_afl", "test_q_fedavg_without_fairness_is_fedavg"],
        "test_pdsgd": ["test_fast_dro"],
    },
    "golden/test_asfbo.py": {TRANSCRIPTION: ["[ShroFBO]", "[LAASFBO]", "[SimFBO]"]},
    "golden/test_bome.py": {TRANSCRIPTION: ["test_the_gap_falls_as_the_barrier_promises"]},
    "golden/test_br_fedbi.py": {
        "test_estimates_on_full_batches_telescope": [
            "test_momentum_equals_the_transcription",
            "test_the_coin_decides_for_all_clients_how_many_samples_they_take",
            "test_br_fedbi_equals_the_transcription_under_a_rule",
            "test_with_the_mean_it_is_fedbio_with_one_step_and_shared_batches",
        ],
        "channels/test_robust.py::test_three_of_ten_clients_that_send_minus_ten_times_theirs": [
            "test_seven_equal_honest_clients_reach_the_solution_beside_three_liars",
        ],
    },
    "golden/test_cited_bilevel.py": {
        "test_fedmbo_equals_the_transcription": ["test_aggitd_equals_the_transcription_for_one_q_in_each_round"],
        "test_adafbio_equals_the_transcription": ["test_local_momentum_equals_the_transcription"],
        "test_mrbo_equals_the_transcription": ["test_stocbio_is_exact_on_unlike_clients"],
    },
    "golden/test_cobo.py": {
        TRANSCRIPTION: [
            "test_the_weights_become_the_clusters", "[one step]", "[one step, an even cohort, the cosine]",
            "test_fixed_weights_end_at_the_root_of_a_linear_system",
        ],
        "run/test_evaluation.py::test_means_and_quantiles_are_those_of_the_clients": [
            "test_each_client_evaluates_its_own_model_on_both_engines",
        ],
    },
    "golden/test_fedbio.py": {TRANSCRIPTION: [
        "test_one_local_step_is_exact", "test_a_minimax_problem", "[FedBiOAcc]", "[FedBiOLocal]", "[FedBiO]",
    ]},
    "golden/test_feddro.py": {
        TRANSCRIPTION: [
            "[GCIVR]", "[SCGD]", "[DSFedDRO]", "[MBSGD]", "[ParallelSGD]",
            "test_counterexample_trajectories[I-0.0-golden0]", "test_counterexample_trajectories[modified-1.5-golden2]",
            "test_counterexample_trajectories[FedDRO-1.5-golden3]",
        ],
        "test_counterexample_trajectories": [
            "test_shared_inner_values_converge", "test_equals_the_transcription[FedAvg II]",
        ],
    },
    "golden/test_fedmsa.py": {
        "golden/test_multi_level.py::test_equals_the_transcription": [
            "test_compositional_problems_equal_the_transcription", "test_the_limit_of_a_composition_is_the_solution",
        ],
        TRANSCRIPTION: [
            "test_all_clients_in_phase_1_make_the_limit_exact_with_one_client_in_phase_2",
            "test_the_limit_is_the_solution_for_any_number_of_local_steps",
            "test_one_local_step_without_momentum_is_soba",
        ],
    },
    "golden/test_fednest.py": {
        TRANSCRIPTION: ["[LFedNest-minimax]", "[FedNest-minimax]", "[FedNestSGD-bilevel]", "[LFedNestNonAlt-bilevel]"],
        "test_a_cohort_is_averaged_by_its_own_weights": [
            "test_equals_the_transcription[LFedNestSVRG-bilevel]", "test_equals_the_transcription[FedNest-bilevel]",
        ],
        "test_compositional_start_without_y": ["test_compositional_local_steps_are_exactly_x_minus_alpha_tau_h"],
    },
    "golden/test_first_order.py": {
        TRANSCRIPTION: [
            "[F2SA2-anchor-None]", "[VPBGD-none-None]", "[F2SA-none-None]",
            "test_the_limit_of_f2sa_is_off_by_a_constant_over_the_multiplier",
            "test_the_limit_of_v_pbgd_is_that_of_f2sa", "test_the_limit_of_f2sa_2_is_off_by_the_square_of_that",
            "test_the_limit_of_meha_is_off_by_a_constant_over_the_multiplier", "test_the_limit_without_an_anchor",
            "test_meha_without_convexity",
        ],
        "contract/test_server_optimizer.py::test_a_tuple_of_moments_only_where_there_are_several_lower_variables": [
            "test_an_optimizer_at_the_server_steps_both_lower_variables",
        ],
        "test_sgha_equals_the_transcription": [
            "[True]", "test_the_limit_of_sgha_is_off_by_a_constant_times_the_regularization",
        ],
    },
    "golden/test_hypergradient.py": {
        "parts/test_inverse_hessian.py::test_random_is_one_of_the_products_and_uniform": [
            "test_random_neumann_with_everyone", "test_random_neumann_of_one_cohort_estimates_that_cohorts_series",
        ],
        "golden/test_fednest.py::test_a_cohort_is_averaged_by_its_own_weights": [
            "test_one_step_of_x_is_the_closed_form",
        ],
        "golden/test_fednest.py::test_equals_the_transcription": ["test_light_step_is_each_clients_own_closed_form"],
    },
    "golden/test_minimax.py": {
        "test_proxskip_equals_the_transcription": [
            "test_the_mean_of_proxskips_control_variates_with_lost_and_with_clipped_replies",
            "test_proxskip_ends_at_the_saddle_point_and_remembers_the_clients_directions_there",
        ],
        TRANSCRIPTION: [
            "[MomentumLocalSGDA]", "[FedGDAGT]", "[LocalExtragradient]",
            "test_plain_local_steps_end_off_the_saddle_point", "test_anchored_steps_end_at_the_saddle_point",
            "test_the_limit_with_momentum",
        ],
    },
    "golden/test_multi_level.py": {TRANSCRIPTION: [
        "test_the_limit_is_the_solution_where_one_function_differs_and_with_tracked_jacobians",
        "test_two_functions_are_a_compositional_problem", "test_semideviation",
    ]},
    "golden/test_own_inner.py": {TRANSCRIPTION: [
        "[Local-SCGDM]", "[Acc-FCSG-M]", "[Fed-DR-SCGD]", "[FCSG-M]", "[ComFedL]",
        "test_an_averaged_inner_value_solves_another_problem",
    ]},
    "golden/test_personalised.py": {TRANSCRIPTION: ["test_local_train", "[FineTuned]", "[PFedMe]"]},
    "golden/test_saddle.py": {TRANSCRIPTION: ["[FedAvgSaddle-fedavg_saddle]"]},
    "golden/test_weighted_nodes.py": {TRANSCRIPTION: [
        "test_local_svrg_equals_the_transcription", "[ABA-letters1]",
        "test_a_random_output_and_a_center_that_is_a_client",
    ]},
    "channels/test_attacks.py": {
        "test_the_ledger_is_that_of_honest_clients": ["[alone]", "[knows all]"],
        "test_two_engines_agree": ["[alone]"],
    },
    "channels/test_compression.py": {
        "test_feedback_as_in_the_papers": [
            "[federation-difference]", "[federation-aggregate]", "[federation-None]",
            "test_with_feedback_a_quadratic_is_solved_and_without_it_is_not", "test_a_nested_method_converges",
        ],
        "test_who_is_absent_or_not_heard_keeps_its_memory": ["[simulation]"],
        "test_each_channel_of_a_chain_tells_the_clients_its_own": ["[nothing-simulation]", "[nothing-federation]"],
        "test_a_checkpoint_keeps_the_feedback": ["[error-simulation]"],
    },
    "channels/test_privacy.py": {
        "test_a_checkpoint_keeps_the_noise": ["[simulation]"],
        "engines/test_engines.py::test_sites_see_neither_the_seed_nor_the_servers_keys": [
            "test_the_seed_does_not_lead_to_the_noise[federation]",
        ],
        "test_the_estimate_of_the_hessian_is_right_from_the_start": [
            "test_a_clip_leaves_the_estimate_of_the_hessian_alone",
        ],
        "test_a_mark_finds_its_leaf_in_any_order": ["[dict]"],
    },
    "channels/test_private.py": {
        "test_one_client_changes_every_kind_of_result_of_a_round_by_at_most_what_is_declared": [
            "test_one_client_changes_every_result_of_a_method_by_at_most_what_is_declared",
        ],
        "test_another_cohort_of_a_round_comes_from_the_noise_seed_alone": ["[2]"],
        "test_the_methods_that_are_refused": [
            "[CommFedBiO]", "[FastDRO]", "[FedMBO]", "[QFedAvg]", "[WeightedNodesABA]",
        ],
        "test_a_poisson_cohort_has_each_client_with_the_same_probability": ["[20-6]", "[3-1]"],
        "test_a_session_ends_with_its_budget": ["test_the_calibrated_noise_spends_the_budget_at_the_last_round"],
    },
    "channels/test_private_records.py": {
        "engines/federation/test_records.py::test_with_the_noise_seed_fixed_sites_have_the_numbers_of_a_simulation": [
            "test_the_same_numbers_in_blocks_on_several_devices",
        ],
    },
    "channels/test_robust.py": {
        "test_three_of_ten_clients_that_send_minus_ten_times_theirs": [
            "test_with_the_plain_mean_they_do_harm", "[Krum]",
        ],
        "test_equals_numpy_variable_by_variable": ["test_unlike_honest_clients_move_the_median"],
    },
    "channels/test_secure.py": {
        "test_the_sum_of_as_many_clients_as_there_are_does_not_overflow": [
            "test_messages_of_sixteen_bits_are_half_as_long",
        ],
        "test_every_engine_has_the_same_numbers_to_the_last_bit": ["[mesh-16]", "[blocks-32]"],
        "test_the_fixed_point_is_that_of_numpy": ["[8.0]"],
        "engines/test_engines.py::test_two_shapes_of_one_problem": [
            "test_another_shape_and_another_bound_on_the_same_problem",
        ],
    },
    "contract/test_algorithms.py": {
        "engines/test_engines.py::test_a_mean_is_that_of_the_replies": [
            "test_lost_replies_of_equal_clients_change_nothing",
        ],
        "run/test_solve.py::test_a_sweep_over_a_float_compiles_once": ["test_a_sweep_over_a_float_compiles_once"],
        "golden/test_minimax.py::test_equals_the_transcription": ["test_x_stays_in_its_set"],
        "channels/test_privacy.py::test_nothing_is_larger_than_the_bound": [
            "test_a_bound_that_nothing_reaches_changes_nothing",
        ],
        "test_the_order_of_clients_does_not_matter": ["[ScaffoldSaddle-Minimax]"],
        BOTH: ["test_the_contract_of_anyone_s_method[FedAvg-SingleLevel-channel and faults]"],
        "test_a_solution_stays_put": ["[FedSVRG-SingleLevel]"],
    },
    "contract/test_placement.py": {
        "test_only_the_rows_of_cohorts_are_read": ["test_a_part_is_on_the_device"],
        "test_a_cohort_that_does_not_fit_goes_block_by_block": ["test_everybody_goes_block_by_block"],
        "test_rounds_in_any_portions": ["test_a_value_that_is_not_finite_ends_the_run_in_the_middle"],
    },
    "contract/test_secure.py": {"channels/test_secure.py::test_every_engine_has_the_same_numbers_to_the_last_bit": [
        "test_secure_sums[FedAvg-SingleLevel]",
    ]},
    "run/test_check.py": {
        "test_a_remedy_for_a_sum_is_one_that_the_clients_do_not_have_yet": ["test_a_sum_for_a_mean"],
        "test_at_a_stationary_point_rounding_is_no_wrong_derivative": [
            "[single-0]", "[single-1]", "[single-2]", "[bilevel-1]", "[bilevel-2]",
        ],
        "test_compositional_problems": ["[own outer]", "[one data set]", "[scope]"],
        "test_a_lower_level_that_curves_down_a_little": ["test_a_saddle_is_no_lower_level"],
        "test_the_wrong_sign": ["[minimax]"],
        "test_a_variable_that_is_not_used": [
            "[problem1-Bilevel.lower does not depend on y]", "[problem3-Minimax.objective does not depend on y]",
        ],
        "test_a_part_of_x_that_no_loss_uses": ["[bilevel]"],
        "test_a_value_that_is_not_finite": ["[it]"],
        "test_a_level_that_is_linear_in_y": ["[minimax]"],
        "test_no_problems_are_found_in_the_built_in_tasks": ["[portfolio-given1]"],
    },
    "contract/test_both_engines.py": {
        "test_who_does_not_answer_keeps_its_memory": ["[PDSGD-SingleLevel]"],
        "test_lost_repeated_and_late_requests_change_nothing": ["[PDSGD-SingleLevel]"],
        "test_the_hard_setting": ["[FedAvg-SingleLevel]"],
        "contract/test_algorithms.py::test_the_plan": ["test_single_precision[FedAvg-to-FedAvg]"],
    },
    "engines/test_checkpoints.py": {
        "test_the_last_round_that_all_have_is_used": ["[the coordinator]"],
        "test_another_keep_best_is_refused": ["[+far]", "[None]"],
        "test_rows_that_changed": ["test_all_rows_are_written_again"],
        "test_more_rounds_go_on_from_the_end": [
            "test_another_every_keeps_the_rows", "test_an_extended_run_is_an_uninterrupted_one",
        ],
        "test_keys_in_state_and_memory": ["test_resumed_is_uninterrupted[simulation]"],
        "test_another_evaluate_is_refused": [
            "[2-body]", "[2-array]", "[2-two]", "[2-callable]", "[2-optional]", "[2-added]",
        ],
    },
    "engines/test_corners.py": {
        "test_an_exchange_with_everyone_beside_a_cohort": ["[blocks]", "test_lost_replies_of_everyone"],
        "test_memory_is_the_own_cohorts_where_another_is_asked_first": ["[federation]"],
        "test_the_noise_hides_a_client_that_is_drawn_three_times": ["[federation]"],
        "test_maps_that_are_read_later": ["[federation]"],
        "test_exchanges_of_one_name_share_what_a_channel_remembers": ["[federation]"],
        "test_a_channel_stands_before_the_client_that_holds_the_centres_data": ["[federation]"],
    },
    "engines/test_engines.py": {
        "test_a_run_leaves_neither_loss_nor_data_behind": [
            "test_an_asynchronous_run_leaves_neither_loss_nor_data_behind",
        ],
        "test_who_is_not_heard_keeps_its_memory": ["[federation]"],
        "test_too_few_replies_fail_the_round": ["[federation]"],
    },
    "channels/test_codecs.py": {
        "test_the_levels_of_a_quantised_number": ["[8-127]"],
        "test_bits_are_packed_as_numpy_packs_them": ["[7]", "[8]", "[64]"],
        "test_random_places_are_one_of_each_stretch": ["[37-8]", "[9-9]"],
        "test_what_is_unbiased_by_its_error_bars": ["[Quantize(bits=4)]"],
    },
    "cli/test_cli.py": {
        "test_resume_keeps_how_often_a_run_was_evaluated": ["test_resume_gives_the_run_that_was_not_cut_short"],
        "test_a_new_algorithm_for_every_class_of_problems": [
            "[compositional-settings1-distance-0.5]", "[minimax-settings0-distance-0.5]",
        ],
    },
    "data/test_sampling.py": {
        "test_a_cohort_is_a_sorted_set_of_clients": ["[10-4]", "[40-5]", "[6-5]"],
        "test_every_order_is_equally_likely": ["[3]"],
        "test_every_client_is_equally_likely": ["[10-4]"],
        "test_every_sample_equally_often": ["[3-equal]", "[3-ragged]", "[5-equal]"],
        "test_a_batch_is_never_larger_than_the_data": ["[equal-True]", "[equal-False]"],
        "test_every_cohort_is_equally_likely": ["[6-3-20]"],
        "test_shuffled_is_a_bijection": ["[4]"],
    },
    "documents/test_reveals.py": {
        "channels/test_private_records.py::test_an_attack_on_one_record_succeeds_no_more_often_than_allowed": [
            "test_a_gradient_gives_the_rows_back_unless_records_are_hidden",
        ],
    },
    "experiments/test_page.py": {"test_the_files_of_an_experiment_are_those_of_its_results": [
        "[flamby-heart]", "test_the_pages_are_those_that_the_files_give",
    ]},
    "problems/test_objectives.py": {
        "test_value_weights_and_gradient_are_those_of_the_worst_case": [
            "test_the_printed_sign_of_chi2_drives_the_losses_apart",
        ],
        "golden/test_fednest.py::test_compositional_start_without_y": ["test_a_federated_step_is_a_step_on_the_whole"],
        "test_a_risk_is_the_same_in_single_precision_at_every_scale": ["test_a_capped_risk_in_single_precision"],
        "test_a_capped_risk_with_ties": [
            "[1.5-tied1]", "[1.5-tied2]", "[2.0-tied0]", "[2.0-tied2]", "[2.0-tied3]", "[3.0-tied0]", "[3.0-tied1]",
            "[3.0-tied3]",
        ],
    },
    "run/test_worth_survival.py": {
        "test_the_exact_models_minimise_coxs_loss": ["[True]"],
        "run/test_worth.py::test_all_splits_in_one_program_are_the_librarys_fedavg_on_each": [
            "test_fedavg_on_all_splits_is_the_librarys_on_each",
        ],
    },
    "base/test_convolutions.py": {
        "test_pooling_agrees_with_xla_with_ties": ["[max-size0-strides0-VALID]"],
        "test_pooling_agrees_with_xla_on_infinite_inputs": ["[size0-strides0-VALID]"],
    },
    "base/test_draws.py": {"test_another_default_generator_changes_nothing": ["[federation]"]},
    "problems/test_models.py": {
        "plan/test_computing.py::test_the_same_numbers": ["test_rematerialised_losses"],
        "engines/test_engines.py::test_narrow_values_are_added_up_in_float32": ["test_half_precision"],
        "test_the_same_network_in_any_library": ["[engine3-equinox]"],
        "test_one_batch_has_one_key": ["test_the_mean_over_masks_is_the_loss"],
    },
    "language/test_author.py": {"test_the_lower_levels_gradient_in_x": [
        "[federation-1, 3, 40, 200]", "[simulation-equal]", "[federation-equal]",
    ]},
    "golden/test_asynchronous.py": {
        "test_fedavg": ["test_fedbio", "[by staleness]", "test_one_client_after_another_is_a_synchronous_run"],
        "test_control_variates": ["test_fedavg[alike]"],
    },
    "language/test_clock.py": {
        "test_the_first_replies_end_an_exchange": ["test_a_deadline_leaves_out_late_replies"],
        "test_a_deadline_that_nobody_meets_in_some_round_ends_the_run": ["[drawn]"],
        "test_chances_are_those_of_the_simulation": ["[{'first': 15}]"],
        "test_the_numbers_are_those_without_a_clock": [
            "[Scaffold-SingleLevel]", "[FedBiOAcc-Bilevel]", "[FedNest-Bilevel]",
        ],
        "test_on_every_kind_of_simulation": ["[mesh]"],
        "test_of_like_clients_it_is_the_ledgers_sum": ["[FedAvg-SingleLevel]"],
    },
    "golden/test_optimizers.py": {"test_the_rules_of_the_paper": ["test_the_optimizers_of_the_paper"]},
    "golden/test_single_level.py": {
        "golden/test_asynchronous.py::test_control_variates": ["test_scaffold"],
        "test_fedsvrg": ["test_fedavg", "test_fedprox"],
    },
    "engines/federation/test_faults.py": {"engines/test_checkpoints.py::test_the_last_round_that_all_have_is_used": [
        "test_the_coordinator_is_killed_and_goes_on",
    ]},
    "engines/federation/test_hospitals.py": {"golden/test_fedbio.py::test_equals_the_transcription": [
        "test_own_intercepts_are_right_on_average_where_fedavg_is_not",
    ]},
    "engines/test_programs.py": {
        "test_programs_are_told_apart_by_what_they_call": ["[a partial]", "[an object]"],
        "engines/test_checkpoints.py::test_a_function_is_the_same_in_another_process": [
            "test_a_callbacks_fingerprint_is_the_same_in_every_process",
        ],
    },
    "engines/test_remembered.py": {
        "test_the_same_numbers": ["[lost replies]", "test_a_run_that_diverges_ends_as_on_the_device"],
    },
    "engines/federation/test_secure_federation.py": {
        "test_the_same_numbers_as_in_simulation_and_nothing_but_masks_leaves_a_site": [
            "test_with_certificates_the_numbers_are_the_same",
        ],
        "engines/federation/test_records.py::test_with_the_noise_seed_fixed_sites_have_the_numbers_of_a_simulation": [
            "test_with_noise_for_records",
        ],
    },
    "engines/federation/test_records.py": {
        "test_a_spent_budget_ends_the_answers_in_all_runs": ["test_with_faults_the_run_goes_on_without_the_site"],
    },
    "engines/federation/test_commands.py": {
        "report/test_status.py::test_it_shows_what_a_private_run_has_spent": ["test_the_status_page_of_a_private_run"],
    },
    "engines/federation/test_asynchronous.py": {"test_fedbio": ["test_fedavg"]},
    "contract/test_server_optimizer.py": {"test_what_travels_is_the_method_s": ["[WeightedNodesProx-WeightedNodes]"]},
    "testing/test_testing.py": {
        "test_a_problem_of_ones_own": ["test_a_sound_method_passes_what_the_broken_ones_fail"],
        "test_a_broken_method_is_caught_by_name": ["[loose clip]", "[equal clients]"],
    },
    "documents/test_docs.py": {
        BOTH: ["test_the_engine_and_the_transport_of_the_page_run"],
        "language/test_clock.py::test_the_first_replies_end_an_exchange": ["test_the_page_on_the_clock"],
    },
    "theory/test_theory.py": {
        "test_single_level_converges": ["test_full_batch_converges", "test_minimax_converges", "test_asfbo_converges"],
    },
    "run/test_tune.py": {"test_pictures": ["[1]", "[2]"]},
    "data/test_data.py": {"test_mnist": ["test_covtype", "test_fashion_mnist"]},
    "tasks/test_weighted_task.py": {
        "test_other_data": ["[fashion-mnist-4-360]"],
        "test_the_centre_is_like_its_kind": ["test_personal_models_are_scored_where_they_belong"],
        "base/test_convolutions.py::test_convolutions_agree_with_xla": [
            "test_the_networks_convolutions_are_convolutions",
        ],
    },
    "tasks/test_tasks.py": {"test_the_defaults_lower_the_metric": [
        "[minimax-quadratic]", "[composition]", "[portfolio]", "test_output_layers_of_the_clients_own",
    ]},
    "experiments/channels/test_channels_experiments.py": {
        CLAIMS: ["[experiment0-as_claimed]", "[experiment2-as_claimed_bytes]"],
    },
    "experiments/fedbio/test_fedbio_rates.py": {"test_the_logarithm_of_the_accelerated_methods_proof_is_taken_out": [
        "test_what_is_thinned_gives_what_the_whole_gives",
        "test_a_floor_like_a_power_of_the_step_has_the_slope_of_the_best_step",
    ]},
    "experiments/flamby/test_flamby_tables.py": {
        "test_claims_hold_on_flambys_own_numbers_and_fail_on_others": ["[experiment1-benchmark1]"],
    },
    "experiments/delay/test_delay.py": {
        "language/test_clock.py::test_what_cannot_be_corrected": ["test_the_correction_of_over_selection_is_refused"],
    },
    "contract/test_primitives.py": {"test_every_primitive_is_what_it_says": ["[lockstep]"]},
    "experiments/machinery/test_running.py": {
        "run/test_solve.py::test_a_sweep_over_a_float_compiles_once": [
            "test_all_runs_of_a_shape_share_one_compiled_program",
        ],
        "test_a_second_call_computes_nothing_and_writes_the_same": [
            "test_a_run_has_its_own_precision_and_leaves_the_process_its",
            "test_a_scaled_down_page_describes_what_was_run",
        ],
    },
    "experiments/choice/test_choice.py": {"test_equal_work_is_read_within_it": [
        "test_claims_hold_where_results_are_as_they_say_and_fail_where_all_are_the_same",
    ]},
    "cli/test_speeds.py": {
        "test_an_asynchronous_run_is_that_of_python_and_can_be_resumed": ["test_it_can_be_repeated_and_resumed"],
    },
    "language/test_when.py": {"test_only_those_who_have_to_do_the_work": ["[engine1]"]},
    "channels/test_account.py": {
        "TestEpsilon::test_of_cohorts_of_fixed_size": ["[LFedNest-4-0-2.0]"],
        "TestEpsilon::test_of_poisson_cohorts": ["[LFedNest-4-0-2.0]"],
        "TestEpsilon::test_of_all_clients": ["[LFedNest-4-0-2.0]"],
        "run/test_price.py::test_it_counts_what_a_round_releases_and_who_pays_for_it": [
            "test_every_exchange_of_a_round_is_a_release",
        ],
    },
    "data/test_clients.py": {
        "test_features_change_no_gradient": ["[None-plain]"],
        "test_features_that_are_not_made_row_by_row_are_refused": ["[1-two rows]", "[1-no rows]", "[1-a number]"],
    },
    "run/test_price.py": {"test_a_refusal_is_printed_below_the_plan": ["[None]", "[4]"]},
    "run/test_budget.py": {"test_a_complete_run_that_is_resumed_is_not_cut_short": ["[noise]"]},
    "engines/federation/test_dataflow.py": {"test_a_function_that_no_plan_has_is_refused_in_words": ["[-1]"]},
    "engines/federation/test_grpc.py": {
        "test_a_value_that_nothing_can_be_computed_with_is_left_out_by_name": ["[inf-not finite]"],
    },
    "tasks/test_flamby.py": {"test_coxs_loss_against_sorting": ["[1]"]},
    "problems/test_language_model.py": {
        "problems/test_models.py::test_the_same_network_in_any_library": [
            "test_clients_send_adapters_and_nothing_of_the_base",
        ],
    },
}
# fmt: on

# An example in a docstring is slow where what it shows has a quick test.
EXAMPLES = {
    "rookery.language.asynchronous.Asynchronous": "golden/test_asynchronous.py::test_fedavg",
    "rookery.problems.problems.MultiLevel": "golden/test_multi_level.py::test_equals_the_transcription",
    "rookery.problems.problems.WeightedNodes": "golden/test_weighted_nodes.py::test_equals_the_transcription",
    "rookery.problems.models.CNN": "base/test_convolutions.py::test_convolutions_agree_with_xla",
    "rookery.algorithms.asfbo.ASFBO": "golden/test_asfbo.py::test_equals_the_transcription",
    "rookery.algorithms.bome.BOME": "golden/test_bome.py::test_equals_the_transcription",
    "rookery.algorithms.cobo.CoBo": "golden/test_cobo.py::test_equals_the_transcription",
    "rookery.algorithms.fedbio.FedBiO": "golden/test_fedbio.py::test_equals_the_transcription",
    "rookery.algorithms.feddro.FedDRO": "golden/test_feddro.py::test_equals_the_transcription",
    "rookery.algorithms.fedmsa.FedMSA": "golden/test_fedmsa.py::test_equals_the_transcription",
    "rookery.algorithms.fednest.FedNest": "golden/test_fednest.py::test_a_cohort_is_averaged_by_its_own_weights",
    "rookery.algorithms.first_order.F2SA": "golden/test_first_order.py::test_equals_the_transcription",
    "rookery.algorithms.meha.MEHA": "golden/test_first_order.py::test_equals_the_transcription",
    "rookery.algorithms.own_inner.FCSG": "golden/test_own_inner.py::test_equals_the_transcription",
    "rookery.algorithms.saddle.FedGDAGT": "golden/test_minimax.py::test_equals_the_transcription",
    "rookery.algorithms.br_fedbi.BRFedBi": "golden/test_br_fedbi.py::test_estimates_on_full_batches_telescope",
    "rookery.algorithms.sgha.SGHA": "golden/test_first_order.py::test_sgha_equals_the_transcription",
}


def own_name(name: str) -> str:
    """A test's name without its parameters."""
    return name.partition("[")[0]


def _in_file(file: str, name: str) -> str:
    return name if "/" in name.partition("[")[0] else f"{file}::{name}"


# For every slow test the quick one, both as file::test.
QUICK_FOR = {
    _in_file(file, f"{quick}{slow}" if slow.startswith("[") else slow): _in_file(file, quick)
    for file, each in COVERED.items()
    for quick, all_slow in each.items()
    for slow in all_slow
} | {f"src/{name.rpartition('.')[0].replace('.', '/')}.py::{name}": quick for name, quick in EXAMPLES.items()}
