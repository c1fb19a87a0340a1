"""1F1B in the unmodified loop keeps as many microbatches as there are stages, however many go through."""

import torch
from bench.memory import measure_case

from tests.models.transformer import Transformer, TransformerConfig

ROWS = 4  # of a microbatch


def peak(rank, plan, microbatches):
    def make():
        torch.manual_seed(0)
        config = TransformerConfig(vocab=256, seq=48, d=64, n_layer=6, n_head=4)
        idx = torch.randint(256, (ROWS * microbatches, 49))
        return Transformer(config), (idx[:, :-1].contiguous(), idx[:, 1:].contiguous()), {}

    actual = measure_case(make, plan, pipeline={"microbatches": microbatches})
    return actual.peak - actual.before  # what the step needs beside parameters and the optimizer's state


def test_the_memory_of_a_step_grows_with_the_stages_and_not_with_the_microbatches(pools):
    by_key = {
        (schedule, count): pools[2].run(peak, f"pp=2,{schedule}", count, timeout=120)[0]
        for schedule, count in (("1f1b", 4), ("1f1b", 12), ("gpipe", 12))
    }
    assert by_key["1f1b", 12] < 1.3 * by_key["1f1b", 4]
    assert by_key["1f1b", 12] < 0.5 * by_key["gpipe", 12]
