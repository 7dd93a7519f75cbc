import gc
import importlib
import math
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from lowtide.cost import samples

# without this torch may count more for a block on a GPU than was asked for
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a script; children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


EXTENDED = (
    "commands/test_doctor.py::test_measuring_without_torch_exits_2",
    "commands/test_interrupt.py::test_ctrl_c_keeps_the_best_plan_so_far_and_says_so[looking for the smallest-90%]",
    "commands/test_kernels.py::test_run_compares_a_program_of_groups[how1",
    "commands/test_mutations.py::test_commands_survive_damaged_files[run]",
    "commands/test_plan_tiles.py::test_tiles_are_used_where_nothing_else_fits",
    "commands/test_report.py::test_the_device_of_a_run_is_found_where_it_was_measured",
    "commands/test_shard.py::test_a_mesh_of_several_axes_gives_the_gradients_of_one",
    "commands/test_tile.py::test_the_body_of_a_classifier_is_what_is_cut[vgg19:",
    "execute/breaks/test_boundary.py::test_gradients_between_graphs_are_those_of_eager[Decoder-lengths0]",
    "execute/breaks/test_boundary.py::test_gradients_between_graphs_are_those_of_eager[Residual-lengths2]",
    "execute/breaks/test_fused.py::test_every_graph_has_groups_and_every_budget_gives_the_same_bits",
    "execute/breaks/test_fused.py::test_the_backend_takes_groups_in_several_graphs_too",
    "execute/breaks/test_fused.py::test_tiles_of_one_of_the_graphs_have_groups_inside",
    "execute/breaks/test_later_graphs.py::test_a_branch_that_does_not_fit_is_refused_and_the_others_go_on",
    "execute/breaks/test_later_graphs.py::test_a_call_that_cannot_be_taken_back_goes_on_and_says_so",
    "execute/breaks/test_later_graphs.py::test_a_call_that_is_taken_back_leaves_nothing[a handler for everything]",
    "execute/breaks/test_later_graphs.py::test_another_branch_stays_inside_the_budget_from_its_first_call_on[inside",
    "execute/breaks/test_later_graphs.py::test_another_branch_stays_inside_the_budget_from_its_first_call_on[the sm",
    "execute/breaks/test_later_graphs.py::test_examples_plan_all_branches_without_a_trace",
    "execute/breaks/test_live.py::test_a_branch_that_fits_no_plan_is_told_of",
    "execute/breaks/test_live.py::test_later_branches_are_planned_with_those_before",
    "execute/breaks/test_numbers.py::test_a_count_is_a_constant_at_first_and_then_an_argument",
    "execute/breaks/test_numbers.py::test_a_graph_with_another_constant_runs_by_the_plan_that_is_known[an exponent",
    "execute/breaks/test_numbers.py::test_another_branch_takes_no_more_than_the_one_in_its_place",
    "execute/breaks/test_numbers.py::test_fused_kernels_take_the_number_too",
    "execute/breaks/test_numbers.py::test_other_uses_of_numbers[a part of the numbers",
    "execute/breaks/test_numbers.py::test_other_uses_of_numbers[tensors of one",
    "execute/breaks/test_numbers.py::test_the_backend_takes_numbers_as_arguments_too",
    "execute/breaks/test_subgraphs.py::test_nothing_of_the_rehearsal_is_held[Reading-1000",
    "execute/breaks/test_subgraphs.py::test_other_branches_and_evaluation_are_planned_when_they_come",
    "execute/breaks/test_subgraphs.py::test_steps_in_several_graphs_are_those_of_eager[Branching-50%",
    "execute/breaks/test_subgraphs.py::test_steps_in_several_graphs_are_those_of_eager[Foreign-90%",
    "execute/breaks/test_subgraphs.py::test_steps_in_several_graphs_are_those_of_eager[Recurrent-90%]",
    "execute/breaks/test_subgraphs.py::test_the_graphs_of_a_step_stay_inside_one_budget[Branching-1.0",
    "execute/breaks/test_subgraphs.py::test_the_graphs_of_a_step_stay_inside_one_budget[InLayers-0.6",
    "execute/breaks/test_subgraphs.py::test_the_graphs_of_a_step_stay_inside_one_budget[Reading-0.6]",
    "execute/breaks/test_subgraphs.py::test_the_smallest_budget_that_is_named_works",
    "execute/breaks/test_tiles.py::test_a_loss_over_many_words_runs_in_tiles_behind_a_break",
    "execute/compare/test_compare.py::test_the_zoo_is_bitwise_equal_and_its_peak_is_predicted[densenet161-recompute",
    "execute/compare/test_compare.py::test_the_zoo_is_bitwise_equal_and_its_peak_is_predicted[resnet50-inference-recompute",
    "execute/compare/test_partitioner.py::test_the_budget_holds[gpt2:",
    "execute/compile/test_family.py::test_another_step_than_the_one_traced_by_itself_is_not_used",
    "execute/compile/test_family.py::test_new_shapes_are_traced_once_with_symbols[batches",
    "execute/compile/test_family.py::test_new_shapes_are_traced_once_with_symbols[tokens]",
    "execute/compile/test_layouts.py::test_inputs_may_lie_in_memory_as_they_like[autocast",
    "execute/compile/test_layouts.py::test_inputs_may_lie_in_memory_as_they_like[pools",
    "execute/compile/test_layouts.py::test_inputs_may_lie_in_memory_as_they_like[recurrent",
    "execute/compile/test_layouts.py::test_inputs_may_lie_in_memory_as_they_like[upsampling",
    "execute/compile/test_slices.py::test_tiles_are_cut_from_convolutions_that_are_whole",
    "execute/compile/test_split.py::test_a_step_fits_that_does_not_with_whole_convolutions",
    "execute/compile/test_verify.py::test_a_gradient_that_is_zero_in_exact_arithmetic_may_be_any_rounding_in_tiles",
    "execute/graphs/test_replay.py::test_graphs_are_given_up_where_evaluation_needs_their_memory[size",
    "execute/graphs/test_replay.py::test_the_bits_are_those_without_graphs[other_shapes",
    "execute/graphs/test_replay.py::test_the_bits_are_those_without_graphs[shapes_in_turn",
    "execute/kernels/test_rounding.py::test_every_budget_gives_the_same_bits",
    "execute/memory/test_faults.py::test_memory_that_runs_out_while_the_step_is_measured",
    "execute/planning/test_other_shapes.py::test_a_program_serves_another_size",
    "execute/planning/test_other_shapes.py::test_several_examples_are_planned_at_once",
    "execute/runtime/test_parameter_offload.py::test_the_measured_peak_is_the_predicted_one[parameters,optimizer",
    "execute/runtime/test_parameter_offload.py::test_training_with_state_that_is_away[parameters,optimizer",
    "execute/shards/test_axes.py::test_a_budget_that_no_split_keeps_is_refused",
    "execute/shards/test_tiles.py::test_processes_with_and_without_tiles_compute_what_one_device_does",
    "execute/test_fit.py::test_a_graph_break_of_a_later_call_is_taken_as_in_the_first",
    "execute/test_fit.py::test_a_plan_from_disturbed_times_says_so_and_is_not_kept",
    "execute/test_fit.py::test_a_share_is_no_less_for_a_smaller_batch",
    "execute/test_long_runs.py::test_hundreds_of_steps_take_no_more_memory_than_the_first[Breaking",
    "execute/tiling/test_fused_tiles.py::test_a_chunked_loss_has_groups_inside_and_around",
    "execute/tiling/test_fused_tiles.py::test_a_way_that_disappoints_is_followed_by_the_next",
    "execute/tiling/test_fused_tiles.py::test_only_a_way_that_is_taken_is_compiled",
    "execute/tiling/test_fused_tiles.py::test_the_head_is_inside_the_loop_where_logits_are_widened_in_a_group",
    "execute/tiling/test_fused_tiles.py::test_tiles_that_are_slower_are_not_looked_for_again",
    "execute/tiling/test_fused_tiles.py::test_ways_are_compiled_one_by_one_where_none_that_was_estimated_fits",
    "execute/tiling/test_tiles.py::test_steps_in_single_precision[unet:",
    "execute/tiling/test_tiles.py::test_steps_in_tiles_are_those_of_the_whole[alexnet:batch=2,size=91-parts5",
    "execute/tiling/test_tiles.py::test_steps_in_tiles_are_those_of_the_whole[unet:base=1,batch=2,size=188-parts3",
    "execute/tiling/test_tiles.py::test_steps_in_tiles_are_those_of_the_whole[unet:base=1,batch=2,size=188-parts4",
    "execute/tiling/test_tiles.py::test_steps_in_tiles_are_those_of_the_whole[vgg19:batch=3,size=32,classes=10-parts6",
    "graph/access/test_rules.py::test_every_operator_of_the_zoo_is_known[densenet161",
    "integrations/test_lightning.py::test_a_step_in_several_graphs_logs_each_batch_once",
    "integrations/test_tensor_parallel.py::test_other_shapes_and_the_backend_give_the_same_bits",
    "plan/baselines/test_seed.py::test_what_each_makes_again[lower-sets-exact-90-78]",
    "plan/bounds/test_first_heavy.py::test_cases_prove_more_and_never_too_much",
    "plan/bounds/test_repeated_blocks.py::test_a_plan_with_blocks_is_better_than_without_after_few_moves_and_passes_the_checker",
    "plan/make/test_interrupt.py::test_while_the_host_is_tried[2",
    "plan/make/test_plan_loop.py::test_fit_reaches_with_tiles_what_recomputation_cannot",
    "plan/make/test_search.py::test_the_unet_document_is_feasible_at_a_third_and_as_far_down_as_anything_can_be",
    "plan/make/test_search.py::test_too_small_a_budget_names_one_that_works",
    "test_doc_blocks.py::test_commands_run[docs/commands.md",
    "test_doc_blocks.py::test_commands_run[docs/quickstart.md",
    "test_doc_blocks.py::test_commands_run[docs/running.md",
    "test_doc_blocks.py::test_python_runs[docs/integrations.md:169",
    "test_pace.py::test_nothing_is_said_beside_json",
    "trace/branches/test_branches.py::test_beyond_so_many_ways_a_graph_ends",
    "trace/branches/test_branches.py::test_in_several_graphs_branches_on_arguments_alone_are_followed[given",
    "trace/operators/test_networks.py::test_operators_of_networks[resnet50",
    "trace/operators/test_networks.py::test_operators_of_networks[unet",
    "trace/shards/test_local.py::test_every_kind_of_cut[locallyconnected:batch=8,size=17,channels=8,classes=10-2-any",
    "trace/shards/test_local.py::test_every_kind_of_cut[own-3-batch",
    "trace/shards/test_local.py::test_every_kind_of_cut[own-3-channels",
    "trace/shards/test_local.py::test_every_kind_of_cut[unet:base=2,batch=3,size=188-2-width",
    "trace/step/test_capture_function.py::test_what_was_imported_before_does_not_matter",
    "trace/tiles/test_record.py::test_tiles_are_the_same_as_by_aot_autograd[unet:base=2,batch=1,size=188-parts0",
    "trace/tiles/test_record.py::test_tiles_are_the_same_as_by_aot_autograd[vgg16body:batch=1",
)
"""How the names of tests begin that take 2 s or more and are close to others: `make test-extended` runs them."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark those tests, as others are where they stand."""
    for item in items:
        if item.nodeid.removeprefix("tests/").startswith(EXTENDED):
            item.add_marker(pytest.mark.extended)


def pytest_collection_finish():
    """What is imported stays: the cycle collector need not look at torch again and again."""
    if "torch" in sys.modules:
        importlib.import_module("torch._dynamo")
        importlib.import_module("torch._functorch.aot_autograd")
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 50)  # tracing makes many objects that live as long as it does


@pytest.fixture(scope="module", autouse=True)
def what_stays_is_collected_once():
    """The same for what tests before have left: torch keeps much of what it has compiled."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def quiet_machine():
    """Nothing is taken for disturbed, however busy the machine is that runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples.HostTimer, "worked", samples.HostTimer.now)
        patch.setattr(samples.HostTimer, "preempted", lambda _: 0)
        patch.setattr(samples, "_SPREAD", math.inf)
        yield


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """What tests measure and plan is kept apart from what the user's own cache has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWTIDE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def one_device():
    """The device is measured once, however many tests begin with an empty cache."""
    if "torch" not in sys.modules:  # no test that was collected needs it
        yield
        return
    from lowtide.cost import probe
    from lowtide.execute.planning import step_costs

    known, measure_device = {}, probe.measure_device

    def measured(kind):
        where = repr(probe.environment(kind))
        if where not in known:
            with pytest.MonkeyPatch.context() as quick:  # estimates follow from it, and no test from them
                quick.setattr(probe, "_CALL_SECONDS", 1e-3)
                quick.setattr(probe, "_BUFFER_BYTES", {"cpu": 32 << 20, "cuda": 1 << 30})
                known[where] = measure_device(kind)
        return known[where]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "measure_device", measured)
        patch.setattr(step_costs, "measure_device", measured)
        yield


@pytest.fixture(scope="session", autouse=True)
def nothing_is_logged():
    """Torch need not compute what it only logs."""
    if "torch" not in sys.modules:
        yield
        return
    from tests.unlogged import UNLOGGED

    with pytest.MonkeyPatch.context() as patch:
        for owner, name, instead in UNLOGGED:
            patch.setattr(owner, name, instead, raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def groups_without_a_compiler():
    """Most tests of groups run them operator by operator, so they need no compiler either."""
    if "torch" not in sys.modules or shutil.which("g++") is not None:
        yield
        return
    from lowtide.execute.kernels import compiler

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "kernel_compiler", lambda kind: f"none, for {kind}")
        yield


@pytest.fixture(scope="session")
def fork_server():
    """The process that others are forked from; the first of them starts it."""
    from tests import forked

    yield forked.Forks
    forked.stop()


@pytest.fixture
def forks(fork_server, tmp_path):
    """Starts processes that have torch from the beginning."""
    folder = tmp_path / "processes"
    folder.mkdir()
    return fork_server(folder)


DOCUMENTS = Path(__file__).parent.parent / "examples" / "documents"


def document_path(number: str) -> Path:
    return next(DOCUMENTS.glob(f"{number}_*.txt"))


@pytest.fixture(scope="session")
def documents() -> dict[str, bytes]:
    """The five documents by their number, `000` to `004`."""
    return {path.name[:3]: path.read_bytes() for path in sorted(DOCUMENTS.glob("00*_*.txt"))}
