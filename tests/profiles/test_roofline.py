"""Seconds from bytes and rates: the formulas, and that more work is never faster nor a faster part slower."""

import dataclasses
import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.hardware import Hardware, KernelRates, read_assumptions, read_hardware
from profiles.roofline import (
    ExpertLoad,
    ModelLoad,
    PackedLoad,
    Rates,
    achieved_rates,
    compute_s,
    expert_seconds,
    head_s,
    stream_s,
    verify_s,
)

SIZES = st.integers(0, 10**12)
experts = st.builds(
    ExpertLoad,
    num_layers=st.integers(1, 100),
    num_experts=st.integers(8, 512),
    chosen=st.integers(1, 8),
    expert_bytes=st.floats(1, 1e9),
    unpacked_bytes=st.floats(0, 1e9),
    row_flops=st.floats(1, 1e9),
    device_kept=st.floats(0, 8),
    ram_kept=st.floats(0, 8),
    is_on_host=st.booleans(),
)
packed_loads = st.builds(
    PackedLoad,
    packed_format=st.sampled_from(["measured", "another"]),
    num_weights=st.integers(1, 10**11),
    num_bytes=st.integers(1, 10**11),
    unpacked_bytes=SIZES,
    max_rows=st.integers(1, 800) | st.just(sys.maxsize),
)
loads = st.builds(
    ModelLoad,
    num_layers=st.integers(1, 200),
    resident_bytes=SIZES,
    ram_bytes=SIZES,
    disk_bytes=SIZES,
    unpacked_bytes=SIZES,
    cache_bytes=SIZES,
    row_flops=st.floats(1, 1e13),
    head_bytes=SIZES,
    head_row_flops=st.floats(1, 1e10),
    head_rows=st.integers(1, 1000),
    experts=st.none() | experts,
    multiplied=st.lists(packed_loads, max_size=2).map(tuple),
)
RATE = st.floats(1e6, 1e16)
rates = st.builds(
    Rates,
    memory_bytes_per_s=RATE,
    flops_per_s=RATE,
    link_bytes_per_s=st.one_of(RATE, st.just(math.inf)),
    disk_bytes_per_s=RATE,
    layer_call_s=st.floats(0, 0.1),
    expert_call_s=st.floats(0, 0.01),
    expert_spread=st.floats(0.1, 1),
    host_bytes_per_s=RATE,
    host_unpack_weights_per_s=RATE,
    host_flops_per_s=RATE,
    float32_flops_per_s=RATE,
    kernels=st.builds(dict, measured=st.builds(KernelRates, one_row=RATE, each_row=RATE)),
)
PLAIN = ModelLoad(
    num_layers=2,
    resident_bytes=100,
    ram_bytes=300,
    disk_bytes=50,
    unpacked_bytes=0,
    cache_bytes=50,
    row_flops=1000.0,
    head_bytes=10,
    head_row_flops=10.0,
    head_rows=4,
)
MACHINE = Rates(
    memory_bytes_per_s=1000.0,
    flops_per_s=10_000.0,
    link_bytes_per_s=100.0,
    disk_bytes_per_s=10.0,
    layer_call_s=0.01,
    expert_call_s=0.0,
    expert_spread=1.0,
    host_bytes_per_s=50.0,
    host_unpack_weights_per_s=40.0,
    host_flops_per_s=1e9,
)
MIXTURE = ExpertLoad(
    num_layers=3, num_experts=8, chosen=2, expert_bytes=10.0, unpacked_bytes=0.0, row_flops=100.0, device_kept=0.0,
    ram_kept=8.0,
)  # fmt: skip


@given(loads, rates, st.integers(1, 800))
def test_a_pass_is_no_faster_than_each_of_its_parts(load: ModelLoad, rate: Rates, rows: int) -> None:
    pass_s = verify_s(load, rate, rows=rows)
    assert pass_s >= max(stream_s(load, rate), compute_s(load, rate, rows=rows))
    assert pass_s >= load.num_layers * rate.layer_call_s
    assert math.isfinite(pass_s)


def test_the_disk_reads_while_the_link_copies() -> None:
    assert stream_s(PLAIN, MACHINE) == pytest.approx(50 / 10)
    fast_disk = dataclasses.replace(MACHINE, disk_bytes_per_s=1e9)
    assert stream_s(PLAIN, fast_disk) == pytest.approx(350 / 100)
    no_link = dataclasses.replace(MACHINE, link_bytes_per_s=math.inf)
    assert stream_s(PLAIN, no_link) == pytest.approx(50 / 10)


def test_what_is_not_locked_passes_through_staging_buffers() -> None:
    staged = dataclasses.replace(PLAIN, disk_bytes=0, staged_bytes=200)
    for staging, seconds in ((20.0, 1 + 10), (1e9, 3)):
        assert stream_s(staged, dataclasses.replace(MACHINE, staging_bytes_per_s=staging)) == pytest.approx(seconds)
    experts = dataclasses.replace(MIXTURE, are_staged=True)
    slow = dataclasses.replace(MACHINE, staging_bytes_per_s=20.0)  # the host itself would compute with 50
    found, locked = (expert_seconds(mixture, slow, rows=1) for mixture in (experts, MIXTURE))
    assert found.in_place == 0
    assert found.elsewhere_s == pytest.approx(found.asked * 10 / 20)
    assert locked.elsewhere_s == pytest.approx(locked.asked * 10 / 100)


def test_what_unpacking_moves_in_between_takes_its_time() -> None:
    for between in (0, 500):
        packed = dataclasses.replace(PLAIN, unpacked_bytes=1000, between_bytes=between)
        assert compute_s(packed, MACHINE, rows=1) == pytest.approx((1000 + between + 1500) / 1000)
        mixture = dataclasses.replace(MIXTURE, unpacked_bytes=100.0, between_bytes=float(between), device_kept=8.0)
        found = expert_seconds(mixture, MACHINE, rows=1)
        assert found.compute_s == pytest.approx(found.asked * (100 + between + 110) / 1000)


def test_layers_are_read_from_memory_or_bound_by_arithmetic() -> None:
    assert compute_s(PLAIN, MACHINE, rows=1) == pytest.approx(500 / 1000)
    assert compute_s(PLAIN, MACHINE, rows=100) == pytest.approx(100 * 1000 / 10_000)
    slow_host = dataclasses.replace(MACHINE, layer_call_s=7.0)
    assert compute_s(PLAIN, slow_host, rows=1) == pytest.approx(14)


def test_packed_weights_are_written_and_read_again() -> None:
    packed = dataclasses.replace(PLAIN, unpacked_bytes=1000)
    assert compute_s(packed, MACHINE, rows=1) == pytest.approx((1000 + 500 + 1000) / 1000)
    assert compute_s(packed, MACHINE, rows=100) == pytest.approx(1000 / 1000 + 10)


PACKED = PackedLoad(packed_format="int4", num_weights=500, num_bytes=300, unpacked_bytes=1000, max_rows=64)
MULTIPLIED = dataclasses.replace(PLAIN, row_flops=0.0, multiplied=(PACKED,))


def test_packed_weights_that_a_kernel_multiplies_are_read_once_or_computed_row_by_row() -> None:
    measured = dataclasses.replace(MACHINE, kernels={"int4": KernelRates(one_row=2000.0, each_row=4000.0)})
    rest_s = 200 / 1000  # other layers, keys and values
    for rows, kernel_s in ((1, 500 / 2000), (2, 500 / 2000), (16, 16 * 500 / 4000)):
        assert compute_s(MULTIPLIED, measured, rows=rows) == pytest.approx(rest_s + kernel_s)
    assumed = dataclasses.replace(
        MACHINE, float32_flops_per_s=7.0, flops_per_s=5000.0, kernels={"nf4": KernelRates(one_row=1, each_row=1)}
    )
    assert compute_s(MULTIPLIED, assumed, rows=1) == pytest.approx(rest_s + 300 / 1000)
    assert compute_s(MULTIPLIED, assumed, rows=16) == pytest.approx(rest_s + 16 * 2 * 500 / 5000)


def test_more_rows_than_a_kernel_takes_are_multiplied_with_unpacked_weights() -> None:
    measured = dataclasses.replace(MACHINE, kernels={"int4": KernelRates(one_row=1e9, each_row=1e9)})
    unpack_s, products_s = 1000 / 1000, (300 + 1000) / 1000
    assert compute_s(MULTIPLIED, measured, rows=65) == pytest.approx(200 / 1000 + unpack_s + 65 * 2 * 500 / 10_000)
    slow = dataclasses.replace(MACHINE, kernels={"int4": KernelRates(one_row=1e9, each_row=500.0)})
    assert compute_s(MULTIPLIED, slow, rows=65) == compute_s(MULTIPLIED, slow, rows=64), "never faster than fewer"
    few = dataclasses.replace(MULTIPLIED, multiplied=(dataclasses.replace(PACKED, max_rows=4),))
    assert compute_s(few, measured, rows=5) == pytest.approx(200 / 1000 + unpack_s + products_s)
    always = dataclasses.replace(MULTIPLIED, multiplied=(dataclasses.replace(PACKED, max_rows=sys.maxsize),))
    assert compute_s(always, measured, rows=65) == pytest.approx(200 / 1000, rel=1e-3)


def test_the_head_is_read_once_for_every_chunk_of_rows() -> None:
    assert head_s(PLAIN, MACHINE, rows=4) == pytest.approx(10 / 1000)
    assert head_s(PLAIN, MACHINE, rows=5) == pytest.approx(20 / 1000)
    alone_s = max(stream_s(PLAIN, MACHINE), compute_s(PLAIN, MACHINE, rows=3))
    assert verify_s(PLAIN, MACHINE, rows=3, head_calls=5) == pytest.approx(alone_s + 5 * 10 / 1000)


def test_achieved_rates_are_shares_of_the_data_sheet() -> None:
    card, achieved = read_hardware("rtx-4090"), read_assumptions().likely
    beside = dataclasses.replace(read_assumptions(), host_disk_bytes_per_s=7e9)
    half = achieved_rates(card, achieved, beside, half=True)
    full = achieved_rates(card, achieved, beside, half=False)
    assert half.flops_per_s == pytest.approx(achieved.compute * 165.2e12)
    assert full.flops_per_s == pytest.approx(achieved.compute * 82.6e12)
    assert half.link_bytes_per_s == pytest.approx(achieved.link * 31.5e9, rel=1e-3)
    assert half.disk_bytes_per_s == pytest.approx(achieved.disk * 7e9)
    assert achieved_rates(read_hardware("cpu"), achieved, beside, half=False).link_bytes_per_s == math.inf


def test_experts_that_are_asked_for_and_not_kept_move_and_those_asked_for_are_read() -> None:
    all_in_ram = expert_seconds(MIXTURE, MACHINE, rows=1)
    assert all_in_ram.asked == pytest.approx(3 * 2)
    assert (all_in_ram.link_bytes, all_in_ram.disk_bytes) == pytest.approx((60, 0))
    assert all_in_ram.elsewhere_s == pytest.approx(60 / 100)
    assert all_in_ram.compute_s == pytest.approx(max(60 / 1000, 3 * 2 * 100 / 10_000))
    assert all_in_ram.seconds == all_in_ram.elsewhere_s
    on_disk = expert_seconds(dataclasses.replace(MIXTURE, ram_kept=0.0), MACHINE, rows=1)
    assert (on_disk.link_bytes, on_disk.disk_bytes) == pytest.approx((0, 60))
    assert on_disk.elsewhere_s == pytest.approx(60 / 10)
    half = expert_seconds(dataclasses.replace(MIXTURE, device_kept=4.0, ram_kept=6.0), MACHINE, rows=1)
    assert (half.link_bytes, half.disk_bytes) == pytest.approx((30 - 15, 15)), "a half and a quarter are missed"
    there = expert_seconds(dataclasses.replace(MIXTURE, device_kept=8.0), MACHINE, rows=1)
    assert there.seconds == there.compute_s


def test_experts_in_ram_are_computed_there_where_moving_them_takes_longer() -> None:
    host = dataclasses.replace(MACHINE, host_bytes_per_s=500.0, host_flops_per_s=1001.0)
    one = expert_seconds(MIXTURE, host, rows=1)
    assert (one.in_place, one.link_bytes) == (pytest.approx(6), 0)
    # A row takes a little less than a tenth of a second of the host's arithmetic, an expert's way just that.
    assert one.elsewhere_s == pytest.approx(6 * 0.1, rel=0.01)
    faster = dataclasses.replace(host, host_flops_per_s=1e9)
    assert expert_seconds(MIXTURE, faster, rows=1).elsewhere_s == pytest.approx(6 * 10 / 500)
    many = expert_seconds(MIXTURE, host, rows=8)
    assert many.in_place == 0
    assert many.elsewhere_s == pytest.approx(many.link_bytes / 100)
    on_disk = expert_seconds(dataclasses.replace(MIXTURE, ram_kept=0.0), faster, rows=1)
    assert (on_disk.in_place, on_disk.elsewhere_s) == (0, pytest.approx(60 / 10))


def test_packed_experts_are_unpacked_by_the_host_first() -> None:
    host = dataclasses.replace(MACHINE, host_bytes_per_s=1e9)
    assert expert_seconds(MIXTURE, host, rows=1).in_place == pytest.approx(6)
    packed = dataclasses.replace(MIXTURE, unpacked_bytes=20.0)  # 50 weights: 1.25 s, and 0.1 s over the link
    assert expert_seconds(packed, host, rows=1).in_place == 0
    multiplied = dataclasses.replace(packed, host_multiplies=True)
    assert expert_seconds(multiplied, host, rows=1).elsewhere_s == expert_seconds(MIXTURE, host, rows=1).elsewhere_s
    quick = dataclasses.replace(host, host_unpack_weights_per_s=1000.0)
    assert expert_seconds(packed, quick, rows=1).elsewhere_s == pytest.approx(6 * 50 / 1000)


def test_packed_experts_that_a_kernel_multiplies_are_not_unpacked() -> None:
    """Each by its own rows: eight rows that choose two of eight experts give each about two."""
    expert = PackedLoad(packed_format="int4", num_weights=50, num_bytes=10, unpacked_bytes=100, max_rows=64)
    kernels = {"int4": KernelRates(one_row=500.0, each_row=800.0)}
    machine = dataclasses.replace(MACHINE, kernels=kernels)
    packed = dataclasses.replace(MIXTURE, unpacked_bytes=100.0, multiplied=expert, device_kept=8.0)
    assert expert_seconds(packed, machine, rows=1).compute_s == pytest.approx(6 * 50 / 500)
    assert expert_seconds(packed, machine, rows=8).compute_s == pytest.approx(3 * 2 * 8 * 50 / 800)
    unpacked = dataclasses.replace(packed, multiplied=None)
    assert expert_seconds(unpacked, machine, rows=1).compute_s == pytest.approx(6 * (100 + 110) / 1000)


def test_experts_that_stay_with_the_host_are_all_computed_there() -> None:
    found = expert_seconds(dataclasses.replace(MIXTURE, is_on_host=True, ram_kept=4.0), MACHINE, rows=1)
    assert (found.in_place, found.link_bytes) == (found.asked, 0)
    assert found.disk_bytes == pytest.approx(30)
    assert found.elsewhere_s == pytest.approx(6 * 10 / 50 + 30 / 10)


def test_a_pass_over_a_mixture_is_its_dense_part_and_its_experts() -> None:
    mixture = dataclasses.replace(PLAIN, experts=MIXTURE)
    added_s = expert_seconds(MIXTURE, MACHINE, rows=4).seconds
    assert verify_s(mixture, MACHINE, rows=4) == pytest.approx(verify_s(PLAIN, MACHINE, rows=4) + added_s)
    slow_host = dataclasses.replace(MACHINE, expert_call_s=1.0)
    assert expert_seconds(MIXTURE, slow_host, rows=1).seconds == pytest.approx(6)


def test_the_first_rows_of_a_mixture_are_the_dear_ones_and_texts_that_differ_ask_for_more() -> None:
    alike = dataclasses.replace(MACHINE, expert_spread=0.7)
    seconds = [expert_seconds(MIXTURE, alike, rows=rows).seconds for rows in (1, 2, 4, 8)]
    assert seconds[1] - seconds[0] > (seconds[3] - seconds[2]) / 4
    assert expert_seconds(MIXTURE, alike, rows=4, num_texts=4).asked > expert_seconds(MIXTURE, alike, rows=4).asked


def test_a_cpu_calls_kernels_before_it_runs_them() -> None:
    slow_calls = dataclasses.replace(MACHINE, layer_call_s=3.0, expert_call_s=0.5)
    on_cpu = dataclasses.replace(slow_calls, issues_meanwhile=False)
    assert compute_s(PLAIN, slow_calls, rows=1) == pytest.approx(2 * 3.0), "a card runs kernels meanwhile"
    assert compute_s(PLAIN, on_cpu, rows=1) == pytest.approx(2 * 3.0 + 0.5)
    kept = dataclasses.replace(MIXTURE, device_kept=8.0)
    less, more = (expert_seconds(kept, rates, rows=1) for rates in (slow_calls, on_cpu))
    assert more.seconds == pytest.approx(less.seconds + 6 * 10 / 1000), "six experts of ten bytes are read besides"


@pytest.mark.parametrize(("device", "is_meanwhile"), [("cpu", False), ("cuda", True)])
def test_weights_in_half_precision_may_be_read_more_slowly(device: str, is_meanwhile: bool) -> None:
    card = Hardware(
        name="x", title="x", device=device, memory_bytes=1, memory_bytes_per_s=8.0, half_memory_bytes_per_s=2.0,
        half_flops_per_s=64.0, float32_flops_per_s=16.0, link_bytes_per_s=1.0, link="", sources={},
    )  # fmt: skip
    sheet = read_assumptions()
    reached = dataclasses.replace(sheet.fast, memory=1.0, compute=1.0)
    half, full = (achieved_rates(card, reached, sheet, half=half) for half in (True, False))
    assert (half.memory_bytes_per_s, half.flops_per_s) == (2.0, 64.0)
    assert (full.memory_bytes_per_s, full.flops_per_s) == (8.0, 16.0)
    assert half.issues_meanwhile is is_meanwhile
    alike = achieved_rates(dataclasses.replace(card, half_memory_bytes_per_s=None), reached, sheet, half=True)
    assert alike.memory_bytes_per_s == 8.0


def test_a_kernels_measured_rates_reach_the_share_of_memory() -> None:
    kernels = {"int4": KernelRates(one_row=8.0, each_row=16.0)}
    machine = dataclasses.replace(read_hardware("cpu"), kernels=kernels)
    sheet = read_assumptions().of_measured(1e9)
    fast, likely = (
        achieved_rates(machine, case, sheet, half=True).kernels["int4"] for case in (sheet.fast, sheet.likely)
    )
    assert fast == kernels["int4"]
    assert likely.one_row / fast.one_row == pytest.approx(0.75 / 0.9)
    assert likely.each_row / fast.each_row == pytest.approx(0.75 / 0.9)
