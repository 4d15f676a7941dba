"""
Do the tests notice? Each bug here is planted into the real code, by changing one expression of one function, and an
existing test must then fail. No test exists for the sake of this table.
"""

import inspect
import textwrap

import pytest

import kernels
import paged
import sampling
import test_paged

# bug, where the function lives, its name, what stands there, what is planted instead, the test that fails, how it fails
BUGS = [
    (
        "no causal mask",
        *(kernels, "may_see", "key_positions <= query_positions"),
        "(key_positions <= query_positions) | True",
        *(test_paged.test_mixed_batches, AssertionError, "of the text differs"),
    ),
    (
        "V written into the K cache",
        *(kernels, "store_kv_torch", "torch.stack((k, v))", "torch.stack((v, v))"),
        *(test_paged.test_alone, AssertionError, "of the text differs"),
    ),
    (
        "mask flipped",
        *(kernels, "may_see", "key_positions <= query_positions", "key_positions >= query_positions"),
        *(test_paged.test_alone, AssertionError, "of the text differs"),
    ),
    (
        "stop one token early",
        *(paged.Scheduler, "advance", "len(request.generated_tokens) >= request.max_new_tokens"),
        "len(request.generated_tokens) >= request.max_new_tokens - 1",
        *(test_paged.test_alone, AssertionError, "11 tokens, wanted 12"),
    ),
    (
        "block hash ignores its parent",
        *(paged, "block_key", "sha256(parent + array", "sha256(array"),
        *(
            test_paged.test_a_block_is_found_only_after_the_same_prefix,
            AssertionError,
            "found .8, 4. of the first eight",
        ),
    ),
    (
        "a shared hit does not raise the reference count",
        *(paged.BlockAllocator, "share", "self.ref_counts[block] += 1", "self.ref_counts[block] = 1"),
        *(test_paged.test_life_of_a_shared_prefix, AssertionError, "block tables hold .*, reference counts say"),
    ),
    (
        "admission counts a shared block twice: as found and as to be allocated",
        *(paged.Scheduler, "_admit", "if needed + reserve > spare", "if needed + len(hits) + reserve > spare"),
        *(test_paged.test_admission_at_the_edge_of_the_pool, AssertionError, "it fits exactly"),
    ),
    (
        "admission counts a shared block twice: as found and as free",
        *(paged.Scheduler, "_admit", "if needed + reserve > spare", "if needed + reserve > allocator.num_free"),
        *(test_paged.test_admission_at_the_edge_of_the_pool, RuntimeError, "wanted 2, available 1"),
    ),
    (
        "finish does not free",
        *(paged.Scheduler, "complete", "self._leave(request)", "request.block_table = []; self._leave(request)"),
        *(test_paged.test_life_of_a_shared_prefix, AssertionError, "block tables hold .*, reference counts say"),
    ),
    (
        "preempt does not free",
        *(paged.Scheduler, "_preempt_for", "self._leave(victim)", "victim.block_table = []; self._leave(victim)"),
        *(test_paged.test_preemption_block_by_block, RuntimeError, "cannot grow: it is alone in the pool"),
    ),
    (
        "a whole prompt may hit the cache and compute nothing",
        *(paged.Scheduler, "_cached_prefix", "(request.num_tokens - 1) // self", "request.num_tokens // self"),
        *(test_paged.test_a_prompt_found_whole_still_computes_its_last_block, AssertionError, "to compute nothing"),
    ),
    (
        "a partial block is shared without copy",
        *(paged.Scheduler, "_plan_decodes", " or ref_counts[table[-1]] > 1", ""),
        *(test_paged.test_forked, AssertionError, "writes shared block"),
    ),
    (
        "the sink block is handed out",
        *(paged.BlockAllocator, "__init__", "self.free = list(range(num_blocks - 1, -1, -1))"),
        "self.free = list(range(num_blocks, -1, -1)); self.ref_counts.append(0)",
        *(test_paged.test_blocks_are_handed_out_taken_back_and_run_out, AssertionError, "no RuntimeError was raised"),
    ),
    (
        "noise depends on the batch row",
        *(sampling, "gumbel_noise", "seeds[:, None], pos", "(seeds + torch.arange(len(seeds)))[:, None], pos"),
        *(test_paged.test_mixed_batches, AssertionError, "of the text differs"),
    ),
    (
        "a preempted request samples before its generated tokens are recomputed",
        *(paged.Scheduler, "_admit", "prefill_target = num_tokens", "prefill_target = len(request.prompt_tokens)"),
        *(test_paged.test_preemption_block_by_block, AssertionError, "b: an input is missing"),
    ),
    (
        "a block is committed before its K,V exist: when it is allocated",
        *(paged.Scheduler, "_admit", "request.num_committed = len(hits)"),
        "request.num_computed_slots = num_tokens; self._commit(request); "
        "request.num_computed_slots = len(hits) * self.block_size",
        *(test_paged.test_a_block_is_findable_only_once_it_is_computed, AssertionError, "nothing to share yet"),
    ),
    (
        "a block is committed before its K,V exist: when it is scheduled",
        *(paged.Scheduler, "_plan_chunks", "left -= n"),
        "left -= n; request.num_computed_slots += n; self._commit(request); request.num_computed_slots -= n",
        *(test_paged.test_a_block_is_findable_only_once_it_is_computed, AssertionError, "nothing may be found"),
    ),
]


def plant(monkeypatch, owner, name: str, right: str, wrong: str):
    """Replace the function `name` of a module or class by one whose source has `wrong` where `right` stood."""
    function = inspect.getattr_static(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(right) == 1, f"{name} has {right!r} {source.count(right)} times: plant the bug anew"
    planted = {}
    exec(source.replace(right, wrong), function.__globals__, planted)
    monkeypatch.setattr(owner, name, planted[name])


@pytest.mark.parametrize(
    ("owner", "name", "right", "wrong", "test", "error", "message"),
    [bug[1:] for bug in BUGS],
    ids=[f"{bug[0]} -> {bug[5].__name__}" for bug in BUGS],
)
def test_a_planted_bug_fails_a_test(monkeypatch, owner, name, right, wrong, test, error, message):
    """Would catch: tests that pass whatever the code does, or fail for another reason than the bug."""
    test_paged.trained_model()  # by the code as it is
    plant(monkeypatch, owner, name, right, wrong)
    with pytest.raises(error, match=message):
        test()
