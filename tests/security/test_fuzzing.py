"""Hostile calls and graphs that are drawn: a short form of `make fuzz`, and that it finds what it looks for."""

from __future__ import annotations

import pytest

from tests.security.fuzzing import fuzz

SHORT = (
    *("aten::view.dtype", "aten::empty_strided", "aten::as_strided", "aten::_reshape_alias", "aten::to.dtype"),
    *("aten::_sparse_coo_tensor_unsafe", "aten::sparse_csr_tensor.crow_col_value_size", "aten::embedding"),
    *("aten::_embedding_bag", "aten::index.Tensor", "aten::max_unpool2d", "aten::fractional_max_pool2d_backward"),
    *("aten::max_pool2d_with_indices_backward", "aten::_foreach_add.List", "aten::_fused_adam_", "aten::resize_"),
    *("aten::cat", "aten::_fft_c2r", "aten::linalg_ldl_solve", "aten::lu_unpack", "aten::segment_reduce"),
    *("aten::_to_copy", "aten::gather", "aten::scatter_.src", "aten::histc", "aten::bincount"),
)


@pytest.mark.timeout(300)
def test_hostile_graphs_end_no_worker_and_read_nothing_foreign() -> None:
    report = fuzz(("graph:eager", seed) for seed in range(200))
    assert report.findings == []
    assert all(report.outcomes[outcome] >= 5 for outcome in ("result", "error", "protocol error"))


@pytest.mark.timeout(300)
def test_a_few_hundred_hostile_calls_end_no_worker_and_read_nothing_foreign() -> None:
    report = fuzz((name, seed) for name in SHORT for seed in range(12))
    assert report.findings == []
    assert sum(report.outcomes.values()) == 12 * len(SHORT)
    assert report.outcomes["result"] > 20


def test_changed_nested_tensors_end_no_worker_and_read_nothing_foreign() -> None:
    names = ("aten::nested_to_padded_tensor", "aten::to_padded_tensor", "aten::_nested_tensor_from_tensor_list")
    report = fuzz(((name, seed) for name in names for seed in range(30)), near=True)
    assert report.findings == []
    assert report.outcomes["result"] > 10
    assert report.outcomes["error"] > 10


def test_the_fuzzer_finds_a_worker_that_dies() -> None:
    report = fuzz([("aten::this_kills_the_child", 0)])
    assert [kind for kind, *_ in report.findings] == ["death"]
