"""What `make test` takes of the tests that compile much, and what it leaves to `make test-all`.

- Some of the longest tests are for `make test-all` alone (`LONG`, `left_to_all`).
- Of tests with many parameters a run takes few cases, in which each value occurs (`covering`).
- The tests of some places take turns (`TAKE_TURNS`): `make test` runs one part in `TURNS` of them, by the number of
  commits. So all of them run every `TURNS` commits. `make test TURN=0` (1, 2, ...) chooses a part. `TURN=all` takes
  all of them, and so does pytest by itself.
"""

from __future__ import annotations

import os
import re
import subprocess
import zlib
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations
from pathlib import Path

import pytest

EVERYTHING = os.environ.get("HYBRID_JAX_TESTS") == "all"
left_to_all = pytest.mark.left_to_all
# The longest tests of what other tests look at too: by file and test, and how the case in brackets begins. A new
# one gets the mark `left_to_all` where it is written.
LONG = {
    "aot/test_cut.py": (
        "test_fp8_pages_add_no_launch_and_no_copy",
        "test_layers_that_share_a_state_have_scores_in_place_of_a_convolution",
    ),
    "aot/test_kinds.py": tuple(
        f"test_a_decode_step_is_one_command_buffer_and_stays_within_its_launches[{name}-1]"
        for name in ("qwen3_5_9b", "falcon_h1", "lfm2", "jamba")
    ),
    "aot/test_steps.py": (
        "test_a_decode_step_whose_tokens_triton_draws_copies_nothing_more",
        "test_a_step_that_judges_drafts_is_one_command_buffer_and_written_in_place[head_tree",
        "test_a_step_that_judges_drafts_is_one_command_buffer_and_written_in_place[head]",
        "test_a_step_that_judges_drafts_is_one_command_buffer_and_written_in_place[tree]",
        "test_a_step_that_judges_drafts_is_one_command_buffer_and_written_in_place[second]",
        "test_a_decode_step_is_one_command_buffer_and_stays_within_its_launches[64-2]",
        "test_a_prefill_step_with_the_triton_scan_copies_nothing_more[2-2048]",
        "test_experts_of_a_decode_step_are_in_its_command_buffer[1]",
        "test_mixers_side_by_side_copy_neither_arena_nor_rings",
        "test_the_logits_of_a_step_are_what_is_counted_for_them",
    ),
    "engine/test_donation.py": (
        "test_a_step_updates_its_state_in_place[exact_attention_first",
        "test_a_step_updates_its_state_in_place[exact_two_shapes",
        "test_a_step_updates_its_state_in_place[decode_two_shapes",
        "test_a_step_updates_its_state_in_place[decode_side_by_side_attention_first",
        "test_a_step_updates_its_state_in_place[fork_logprobs",
        "test_a_step_updates_its_state_in_place[fork_adjusted",
        "test_a_step_updates_its_state_in_place[prefill_one_frame",
        "test_a_step_updates_its_state_in_place[decode_adjusted",
        "test_a_step_updates_its_state_in_place[prefill_adjusted",
        "test_a_step_updates_its_state_in_place[prefill_other_side_by_side",
        "test_a_step_updates_its_state_in_place[exact_attention_behind_carried",
        "test_a_step_updates_its_state_in_place[decode_cut_shared",
        "test_a_step_updates_its_state_in_place[prefill_fp8",
        "test_a_step_that_judges_drafts_updates_its_state_in_place[exit_carried",
        "test_a_step_that_judges_drafts_updates_its_state_in_place[tree_fp8",
        "test_a_step_that_judges_drafts_updates_its_state_in_place[verify_reported_and_adjusted",
        "test_a_step_that_judges_drafts_updates_its_state_in_place[second]",
        "test_a_step_that_judges_drafts_updates_its_state_in_place[verify]",
        "test_steps_beside_it_update_its_state_in_place_too[JAC",
        "test_steps_beside_it_update_its_state_in_place_too[MAM",
        "test_steps_beside_it_update_its_state_in_place_too[second-prefill",
        "test_a_step_updates_its_state_in_place[decode_cut]",
        "test_a_step_updates_its_state_in_place[fork_cut",
        "test_a_prefill_that_stops_at_a_cut_updates_its_state_in_place[MA|MA",
        "test_a_prefill_that_stops_at_a_cut_updates_its_state_in_place[M|DG",
        "test_a_prefill_that_stops_at_a_cut_updates_its_state_in_place[A|P-float32-1-32-1",
        "test_a_prefill_that_stops_at_a_cut_updates_its_state_in_place[A|P-float32-1-32-3",
        "test_a_prefill_that_stops_at_a_cut_updates_its_state_in_place[MA!MAMA-float32-4-128-2",
    ),
    "schedule/test_allocation_faults.py": tuple(
        f"test_an_allocation_that_fails_costs_a_restart_and_no_token[{case}"
        for case in ("pages of two grains", "pages of four grains", "drafts", "recurrent")
    ),
    "engine/test_compile_count.py": ("test_a_warmup_covers_what_it_is_asked_for",),
    "engine/test_fusion_names.py": (
        "test_a_step_of_one_row_has_no_fusion_with_both_spellings[decode_one_frame",
        "test_a_step_of_one_row_has_no_fusion_with_both_spellings[prefill_bfloat16",
        "test_a_step_of_one_row_has_no_fusion_with_both_spellings[prefill_delta",
        "test_a_step_of_one_row_has_no_fusion_with_both_spellings[exact_delta",
        "test_a_step_of_one_row_has_no_fusion_with_both_spellings[decode_bfloat16_logprobs",
        "test_a_step_of_one_row_has_no_fusion_with_both_spellings[prefill_logprobs",
    ),
    "engine/test_interrupts.py": (
        "test_an_exception_at_any_line_of_speculation_loses_and_repeats_nothing[suffix",
        "test_an_exception_at_any_line_of_speculation_loses_and_repeats_nothing[ngram",
    ),
    "engine/test_judging.py": ("test_100_000_draws_follow_the_softmax[tree",),
    "engine/test_kernel_paths.py": (
        "test_tokens_are_those_of_xla[bamba",
        "test_tokens_are_those_of_xla[lfm2",
        "test_tokens_are_those_of_xla[jamba",
        "test_tokens_are_those_of_xla[with_cut_delta",
        "test_layers_draft_on_kernels_what_they_draft_by_xla[jamba",
        "test_windows_of_which_some_tokens_stay_give_plain_tokens[mamba2",
    ),
    "engine/test_program_store.py": ("test_another_engine_or_model_has_programs_of_its_own",),
    "sizing/test_sizing.py": (
        "test_the_logits_of_every_step_fit_what_is_counted_for_them[16-False",
        "test_no_step_holds_more_than_is_counted_for_temporaries[kinds14",
        "test_no_step_holds_more_than_is_counted_for_temporaries[kinds15",
        "test_no_step_holds_more_than_is_counted_for_temporaries[kinds19",
        "test_no_step_holds_more_than_is_counted_for_temporaries[kinds2",
        "test_no_step_holds_more_than_is_counted_for_temporaries[kinds3",
        "test_no_step_holds_more_than_is_counted_for_temporaries[kinds8",
        "test_no_step_holds_more_than_is_counted_for_temporaries[kinds9",
        "test_no_step_holds_more_than_is_counted_for_temporaries[kinds10",
        "test_no_step_holds_more_than_is_counted_for_temporaries[kinds13",
        "test_no_step_holds_more_than_is_counted_for_temporaries[kinds17",
    ),
    "engine/test_unjudged.py": ("test_requests_whose_logits_are_adjusted_are_judged[asked1",),
    "engine/test_walk.py": (
        "test_a_token_of_a_tree_gives_the_numbers_of_its_path[bamba-pallas",
        "test_a_token_of_a_tree_gives_the_numbers_of_its_path[jamba-pallas",
        "test_a_token_of_a_tree_gives_the_numbers_of_its_path[jamba-xla",
    ),
    "exactness/test_drafting_layers.py": (
        "test_a_second_model_like_the_first_is_always_right[draft-qwen3_next",
    ),
    "exactness/test_exact_mode.py": (
        "test_batches_rows_and_arrivals_change_no_bit[with_unknown_kind",
        "test_batches_rows_and_arrivals_change_no_bit[with_cut-exact_fp8",
        "test_batches_rows_and_arrivals_change_no_bit[windowed",
        "test_batches_rows_and_arrivals_change_no_bit[jamba",
        "test_batches_rows_and_arrivals_change_no_bit[mamba2",
    ),
    "exactness/test_matrix.py": (
        "test_few_rows_and_many_give_the_same_tokens[bamba",
        "test_few_rows_and_many_give_the_same_tokens[windowed",
        "test_penalties_bias_and_allowed_tokens[jamba",
    ),
    "exactness/test_planted_bugs.py": ("test_scales_of_fp8_move_with_what_they_scale",),
    "exactness/test_speculation.py": (
        "test_random_traffic_gives_plain_tokens",
        *(
            f"test_in_exact_mode_drafts_change_no_bit[{name}"
            for name in ("mamba2", "qwen3_next", "windowed", "with_unknown_kind", "jamba")
        ),
    ),
    "exactness/test_random_traffic.py": ("test_random_traffic_gives_the_plain_tokens[mamba2",),
    "exactness/test_tiny_pool.py": ("test_preemptions_and_evictions_change_no_token[64",),
    "interpreted/test_token_sampling.py": (
        "test_a_large_vocabulary",
        "test_the_kernel_draws_what_the_definition_draws[4096",
        "test_more_candidates_than_there_is_room_for[16",
    ),
    "interpreted/test_trial.py": ("test_an_engine_draws_the_same_tokens_by_either_kernel",),
    "parity/test_engine_parity.py": tuple(
        f"test_the_engine_continues_as_transformers_does[{family}"
        for family in (
            *("bamba", "falcon_mamba", "granite", "lfm2_attention", "mamba2", "mamba_"),
            *("nemotron", "qwen3_next", "qwen3_5_dense", "lfm2_moe", "jamba_experts_biases"),
        )
    ),
    "sim/test_adaptive_traces.py": (
        "test_adaptive_closes_four_tenths_of_the_gap_to_the_clairvoyant_on_average",
    ),
    "sim/test_allocator_studies.py": ("test_a_smoke_run_fills_every_table",),
    "sim/test_published.py": ("test_baselines_hit_what_the_published_simulator_hits[agents",),
    "batch/test_kills.py": ("test_the_bundled_model_goes_on_with_the_same_texts",),
    "api/test_speculation.py": (
        "test_one_draft_at_a_time_is_enough[ngram",
        "test_one_draft_at_a_time_is_enough[suffix",
        "test_one_draft_at_a_time_is_enough[mtp",
    ),
    "api/test_structured_outputs.py": ("test_every_completion_under_a_schema_is_valid[llm-1",),
    "batch/test_order.py": ("test_a_tiny_memory_is_enough_for_shuffled_documents",),
    "benchmarks/test_benchmarks.py": ("test_a_smoke_run_of_all_scripts_fills_tables_and_file",),
    "test_compare_commits.py": ("test_one_model_goes_through_hits_forks_and_evictions",),
    "benchmarks/test_gpu_7b_smoke.py": (
        "test_every_section_is_there_without_errors",
        "test_shares_of_the_floor_are_finite_and_positive",
        "test_bytes_of_the_decode_floor_are_those_counted_by_hand",
        "test_a_hit_skips_nine_tenths_of_the_prompt_and_their_flops",
        "test_both_kernels_draw_the_same_first_tokens",
        "test_a_model_with_a_cut_is_measured_beside_the_one_without",
    ),
    "benchmarks/test_on_gpu.py": (
        "test_both_scripts_leave_their_few_files",
        "test_the_report_holds_every_table",
    ),
    "train/test_distillation.py": (
        "test_measurements_are_means_over_tokens",
        "test_steps_lower_what_they_aim_at_and_leave_the_teacher[goal1",
        "test_steps_lower_what_they_aim_at_and_leave_the_teacher[goal2",
        "test_texts_are_read_with_the_tokenizer_of_the_model",
    ),
    "train/test_mtp.py": ("test_the_loss_follows_the_chain_that_drafts",),
    "typing/test_editors.py": ("test_mypy_finds_the_installed_package_from_anywhere",),
}


# Tests of which a run takes few cases.
FEW_CASES = (
    *("aot", "kernels", "engine/test_sampling_groups.py", "schedule/test_scheduler_traffic.py"),
    "cli/test_cli.py",
)
TURNS = 8
TAKE_TURNS = (
    *("aot", "exactness", "interpreted", "kernels", "parity", "train", "typing"),
    *("models/test_cut.py", "benchmarks/test_benchmarks.py", "docs/test_notebook.py"),
    *(f"cache/test_{name}_machine.py" for name in ("adaptive", "cache", "pool", "simulated")),
    *(
        f"api/test_{name}.py"
        for name in (
            *("bundled_llm", "longest_prompts", "not_finite", "settings"),
            *("speculation", "structured_outputs"),
        )
    ),
    *("batch/test_kills.py", "cli/test_installation.py"),
    *("schedule/test_allocation_faults.py", "sizing/test_sizing.py"),
    *(
        f"engine/test_{name}.py"
        for name in (
            *("compile_count", "device_memory", "donation", "frames", "fusion_names"),
            *("interrupts", "judging", "kernel_choice", "kernel_paths", "larger_programs"),
            *("program_store", "sampling_groups", "serving", "short_chunk", "unjudged", "walk"),
        )
    ),
    *(
        f"sim/test_{name}.py"
        for name in (
            *("adaptive_traces", "allocator_studies", "paper_golden", "published", "tick_golden"),
        )
    ),
)
# Parameters and fixtures whose tests share programs, so they run in the same turn.
GROUPED_BY = ("bench", "adjusted_bench", "golden", "family", "model", "name", "layout", "records")


def turn_asked_for(root: Path) -> int | None:
    """The turn that HYBRID_JAX_TURN names; None for the tests of all turns.

    "commit" is that of the commit that is checked out, and 0 outside a repository.
    """
    given = os.environ.get("HYBRID_JAX_TURN", "all")
    if EVERYTHING or given == "all":
        return None
    if given != "commit":
        return int(given) % TURNS

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if git("rev-parse", "--is-shallow-repository") == "true":  # it cannot count
            return int(git("rev-parse", "HEAD"), 16) % TURNS
        return int(git("rev-list", "--count", "HEAD")) % TURNS
    except (OSError, subprocess.CalledProcessError):
        return 0


def in_turn(tests: Sequence[tuple[str, str]], turn: int) -> list[int]:
    """Which tests a turn runs.

    The groups of a file come one after another, each in the next turn. A file begins with a turn of its own, so that
    files with few tests do not all run in the same one.

    Args:
        tests: file and group of each. A group stays together.
        turn: from 0 to `TURNS` - 1.

    Returns:
        their places.
    """
    groups: dict[str, dict[str, int]] = {}
    for file, group in tests:
        places = groups.setdefault(file, {})
        places.setdefault(group, zlib.crc32(file.encode()) + len(places))
    return [n for n, (file, group) in enumerate(tests) if groups[file][group] % TURNS == turn]


def is_long(file: str, test: str) -> bool:
    """Whether a test is in `LONG`: its file below tests/, and its name with its case.

    A name that ends with a digit means that number: "case[kinds2" is not "case[kinds20".
    """
    return any(
        test.startswith(name) and not re.match(r"\d\d", name[-1:] + test[len(name) :][:1])
        for name in LONG.get(file, ())
    )


def covering(cases: Sequence[Sequence[Hashable]]) -> list[int]:
    """Few of the cases, in order, in which every value of every parameter occurs.

    Each pick has the most values that no pick before it had; of those, the most pairs of values.

    Args:
        cases: the values of each case, one for each parameter.

    Returns:
        the places of the picked cases.
    """
    left = {value for case in cases for value in enumerate(case)}
    pairs: set = set()
    picked: list[int] = []

    def news(place: int) -> tuple[int, int]:
        values = list(enumerate(cases[place]))
        return len(left.intersection(values)), len(set(combinations(values, 2)) - pairs)

    while left:
        best = max(range(len(cases)), key=news)
        picked.append(best)
        values = list(enumerate(cases[best]))
        left.difference_update(values)
        pairs.update(combinations(values, 2))
    return sorted(picked)


def drawn(cases: Iterable[Sequence[Hashable]]) -> list:
    """Cases as `pytest.mark.parametrize` takes them: few in which every value occurs, the rest for `make test-all`."""
    cases = list(cases)
    few = set(covering(cases))
    return [
        pytest.param(*case, marks=() if place in few else left_to_all)
        for place, case in enumerate(cases)
    ]
