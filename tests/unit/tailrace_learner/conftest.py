"""Each library that may multiply matrices in the learner, by choice."""

from collections.abc import Iterator

import pytest

from tailrace_learner.core.cpu import kernels


@pytest.fixture(params=["torch", "onednn"])
def cpu_matmul(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each library in turn, selected."""
    if request.param == "onednn" and not kernels.has_onednn_linear():
        pytest.skip("this build of torch has no oneDNN linear kernel")
    kernels.select_matmul(request.param)
    yield request.param
    kernels.select_matmul("auto")
