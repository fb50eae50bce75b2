"""Where the named cases of traces are tested; each test that is named here must be there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

CASES = {
    "G01 grouped sigmoid router with a selection bias": (
        "models/test_router.py::test_g01_selection_by_biased_groups_weights_without_bias",
        "running/test_golden_routes.py::test_g01_selection_by_biased_groups_weights_without_bias",
        "trace/test_check_routing.py::test_weight_sum_is_that_of_the_kind",
    ),
    "G02 weights that are not normalised": (
        "models/test_router.py::test_g02_weights_that_are_not_normalised_stay_as_they_are",
        "running/test_golden_routes.py::test_g02_weights_that_are_not_normalised_stay_as_they_are",
        "trace/test_flat_sources.py::test_router_logits_kinds_of_weight",
        "trace/test_check_routing.py::test_weight_sum_is_that_of_the_kind",
    ),
    "G03 a batch padded on the left": (
        "running/test_decode.py::test_pads_have_no_rows",
        "running/test_decode.py::test_a_batch_decodes_as_each_row_alone",
        "trace/test_trace_cases.py::test_g03_pads_are_flagged",
        "trace/test_steps.py::test_g03_pads_take_no_part",
    ),
    "G04 a diffusion batch whose rows end at different steps": (
        "running/test_decode.py::test_rows_end_at_different_steps",
        "running/test_decode.py::test_a_finished_row_leaves_the_batch",
    ),
    "G05 a dense layer": (
        "running/test_recorder.py::test_routing_is_what_the_routers_returned",
        "trace/test_trace_cases.py::test_g05_a_dense_layer_has_no_rows",
    ),
    "G06 512 experts and the sentinel": (
        "trace/test_trace_cases.py::test_g06_many_experts_and_the_sentinel",
    ),
    "G07 ids out of range, and zero experts": (
        "trace/test_check_routing.py::test_g07_ids_of_zero_experts_need_a_declaration",
        "trace/test_steps.py::test_g07_zero_experts_take_part_but_cost_nothing",
        "trace/test_steps.py::test_g07_an_impossible_id_is_refused_with_its_place",
        "trace/test_trace_files.py::test_writer_refuses_a_record_that_does_not_fit",
    ),
    "G08 prefill alone": (
        "running/test_decode.py::test_a_prompt_is_prefilled_to_its_last_token",
        "running/test_canvas_diffusion.py::test_a_prompt_alone_is_read_to_its_last_token",
        "trace/test_trace_cases.py::test_g08_a_prefill_keeps_its_last_token",
    ),
    "G09 SGLang's dump of two ranks": (
        "trace/test_sglang_dump.py::test_g09_tensor_parallel_copies_count_once",
        "trace/test_sglang_dump.py::test_g09_data_parallel_ranks_are_added",
        "trace/test_sglang_dump.py::test_g09_request_ids_are_refused",
    ),
    "G10 a killed recorder": (
        "record/test_run.py::test_kill_leaves_the_closed_parts",
        "trace/test_trace_cases.py::test_g10_a_killed_recorder_leaves_its_closed_parts",
        "cli/test_traces.py::test_a_partial_trace_needs_a_word",
    ),
    "G11 float16 scores, infinite and NaN": (
        "trace/test_trace_cases.py::test_g11_float16_scores_are_stored_as_float32",
    ),
    "G12 two million rows": ("trace/test_synthetic.py::test_g12_two_million_rows",),
    "G15 layers of 8, 6 and 4 experts": (
        "trace/test_trace_cases.py::test_g15_layers_of_different_sizes",
        "trace/test_steps.py::test_g15_layers_keep_their_own_sizes",
        "sim/test_product.py::test_g15_layers_of_8_6_and_4_experts_of_different_sizes",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_case_has_its_tests(case: str) -> None:
    for place in CASES[case]:
        file, _, name = place.partition("::")
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, place
