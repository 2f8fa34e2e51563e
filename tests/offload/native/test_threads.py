"""Functions on torch's own threads."""

from __future__ import annotations

import ctypes

import pytest
import torch

from offload.native import threads


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_function_runs_once_on_each_thread(num_threads: int) -> None:
    if num_threads > 1 and threads.address_of("omp_get_thread_num") is None:
        pytest.skip("torch's threads cannot be asked")
    torch.ones(256, 256) @ torch.ones(256, 256)  # starts them
    seen: list[int] = []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda argument: seen.append(argument))
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    threads.run(address, 77, num_threads)
    assert seen == [77] * num_threads
    assert threads.most_threads() >= 1
