"""Faults of lowering: a rank's program is not its share of the whole."""

from .fault import Fault

PLACE, TIDY, EARLY = "lower/place.py", "lower/tidy.py", "lower/prologue.py"
SECTION4, TIME = "parity/test_section4.py", "parity/test_section4_time.py"

LOWER = (
    Fault(
        "a mean divides by the local count",
        "ops/reductions.py",
        "count *= program.values[op.inputs[0]].shape[dim]",
        "count *= program.layouts[op.inputs[0]].local_shape(program.values[op.inputs[0]].shape, program.mesh.sizes, "
        "dict.fromkeys(program.mesh.names, 0))[dim]",
        f"{SECTION4}::test_a_mean_over_a_split_label_is_a_sum_of_shares",
    ),
    Fault(
        "a mean of shares is not divided",
        "ops/reductions.py",
        "return divided(replace(op, target=target), count)",
        "return divided(replace(op, target=target), 1)",
        f"{SECTION4}::test_a_mean_over_a_split_label_is_a_sum_of_shares",
    ),
    Fault(
        "a slice is one part too far",
        "ops/parts.py",
        '"end": unit.times(part + 1)',
        '"end": unit.times(part + 2)',
        "lower/test_local.py",
    ),
    Fault(
        "a table that is split is looked up as if it were whole",
        "ops/lookups.py",
        """    if not weight.shards[0]:
        return op
""",
        """    if weight.shards:
        return op
""",
        "lower/test_collectives.py",
    ),
    Fault(
        "a mean over split rows is that of the rank",
        "ops/losses.py",
        "if not classes and (not samples or",
        "if not classes and (samples or",
        f"{SECTION4}::test_a_mean_with_ignored_labels_is_a_ratio_of_two_sums",
    ),
    Fault(
        "statistics of a batch norm are a rank's own",
        "ops/norms.py",
        "split_axes(program.layouts[op.inputs[0]], 0))",
        "split_axes(program.layouts[op.inputs[0]], 1))",
        f"{SECTION4}::test_batch_norm_takes_its_statistics_over_all_rows_and_updates_its_buffers_once",
    ),
    Fault(
        "the key of a dropout is that of all dropouts",
        "ops/random.py",
        'replace(op, target="runtime.dropout").with_arguments(op_key=op.name',
        'replace(op, target="runtime.dropout").with_arguments(op_key=""',
        "lower/test_local.py",
    ),
    Fault(
        "sections have the sizes of the first dim",
        "ops/parts.py",
        "parts = tuple(program.sizes_of(name)[dim] for name in op.outputs)",
        "parts = tuple(program.sizes_of(name)[0] for name in op.outputs)",
        "lower/test_local.py",
    ),
    Fault(
        "views keep their whole sizes",
        "ops/localizing.py",
        "return op.with_arguments(**{name: program.sizes_of(op.outputs[0])})",
        "return op",
        "lower/test_passes.py::test_views_get_local_sizes_from_atoms",
    ),
    Fault(
        "outputs leave as they are made",
        PLACE,
        "return in_time(replicated(len(value.shape)), produced, self.sizes)",
        "return produced",
        f"{SECTION4}::test_a_bias_after_a_split_product_is_added_once_and_not_tp_times",
    ),
    Fault(
        "gradients of microbatches are not summed",
        PLACE,
        "layout.with_placement(MB, REPLICATE) if added_up else layout",
        "layout",
        f"{TIME}::test_a_sum_stays_a_sum_and_a_mean_a_mean",
    ),
    Fault(
        "a reshard forgets its dim",
        PLACE,
        'for key in ("dim", "sharding", "to_dim", "to_sharding"):',
        'for key in ("sharding", "to_dim", "to_sharding"):',
        "emit/test_file.py",
    ),
    Fault(
        "a bias is put into a product that others read",
        TIDY,
        "alone = len(users[op.inputs[0]]) == 1 and op.inputs[0] not in needed",
        "alone = True",
        "lower/test_tidy.py",
    ),
    Fault(
        "a count is that of one microbatch",
        EARLY,
        "if op.target in COUNTED and samples and MB in samples",
        "if op.target in COUNTED and not samples",
        f"{TIME}::test_a_mean_over_labels_divides_by_those_that_count_in_all_microbatches",
    ),
    Fault(
        "algorithms over microbatches are not refused",
        EARLY,
        "            yield str(op)",
        "            continue",
        f"{TIME}::test_batch_norm_is_refused_with_its_line_and_runs_on_batches_of_their_own_if_asked",
    ),
    Fault(
        "a sum is in place of what is read again",
        "lower/overlap.py",
        "len(users[source]) == 1 and source not in needed",
        "True",
        "lower/test_passes.py::test_only_a_product_that_nobody_else_reads_is_summed_in_place",
    ),
    Fault(
        "a sum whose gradient is a pending sum is taken for an invariant one",
        "reshard.py",
        'yield step("all_reduce_to_r", REPLICATE)',
        'yield step("all_reduce", REPLICATE)',
        "test_reshard.py::test_on_the_way_back_the_gradient_arrives_in_the_layout_that_the_start_promises",
    ),
    Fault(
        "joined products lose their biases",
        "lower/overlap.py",
        'biases = tuple(columns["bias"]) if any(columns["bias"]) else None',
        "biases = None",
        "lower/test_passes.py::test_joined_products_keep_their_biases_and_each_its_own",
    ),
    Fault(
        "a crossing value is not settled",
        PLACE,
        "return sendable_layout(produced) if wanted is None else wanted",
        "return produced if wanted is None else wanted",
        "lower/test_pipeline.py::test_partial_sums_are_summed_before_they_go_to_another_mesh",
    ),
)
