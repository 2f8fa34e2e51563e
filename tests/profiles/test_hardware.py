"""Known hardware: complete, plausible, and refused by the key where it is not."""

import pytest

from profiles.errors import ProfileError
from profiles.hardware import (
    FOLDER,
    Hardware,
    _letters_of,
    hardware_names,
    parse_assumptions,
    parse_hardware,
    read_assumptions,
    read_hardware,
)

CARD = (FOLDER / "rtx-4090.toml").read_text(encoding="utf-8")
ASSUMED = (FOLDER / "assumptions.toml").read_text(encoding="utf-8")
EXPECTED = {
    "a100-40gb", "a100-80gb", "apple-m2", "apple-m3", "apple-m4", "apple-m4-max", "apple-m4-pro", "cpu", "h100", "h200",
    "l40", "rtx-3060", "rtx-3060-ti", "rtx-3070", "rtx-3080", "rtx-3090", "rtx-4060", "rtx-4060-laptop",
    "rtx-4060-ti-16gb", "rtx-4060-ti-8gb", "rtx-4070", "rtx-4070-laptop", "rtx-4070-super", "rtx-4070-ti",
    "rtx-4070-ti-super", "rtx-4080", "rtx-4080-super", "rtx-4090", "rtx-4090-laptop", "rtx-5060-ti-16gb", "rtx-5070",
    "rtx-5070-ti", "rtx-5080", "rtx-5090", "rx-6800-xt", "rx-7600", "rx-7800-xt", "rx-7900-xt", "rx-7900-xtx",
}  # fmt: skip


def refusal(text: str) -> str:
    with pytest.raises(ProfileError) as caught:
        parse_hardware(text, "mine")
    assert caught.value.code == "E_HARDWARE"
    return caught.value.what


def test_every_known_name_reads_and_every_value_has_a_source() -> None:
    assert set(hardware_names()) == EXPECTED
    for name in hardware_names():
        hardware = read_hardware(name)
        assert all(hardware.sources.values())
        assert set(hardware.sources) >= {"memory_gib", "memory_gb_per_s", "half_tflop_per_s", "float32_tflop_per_s"}
        assert ("pcie_lanes" in hardware.sources) == (hardware.device == "cuda")


@pytest.mark.parametrize("name", sorted(name for name in EXPECTED if name.startswith(("rtx", "l40"))))
def test_consumer_rates_are_dense_with_float32_accumulation(name: str) -> None:
    """An SM of GA10x, AD10x and GB20x does 512 such FLOP a clock and 256 in float32: a sparse rate would be 4 times."""
    hardware = read_hardware(name)
    assert hardware.half_flops_per_s / hardware.float32_flops_per_s == pytest.approx(2, rel=0.01)


def test_the_data_center_rates_are_dense() -> None:
    assert read_hardware("a100-40gb").half_flops_per_s == 312e12
    assert read_hardware("h100").half_flops_per_s == read_hardware("h200").half_flops_per_s == 989.5e12


@pytest.mark.parametrize(
    ("name", "gb_per_s"), [("rtx-4090", 31.5), ("rtx-4060-ti-16gb", 15.75), ("rtx-5090", 63.0), ("cpu", float("inf"))]
)
def test_the_link_is_pcie_after_its_line_code(name: str, gb_per_s: float) -> None:
    assert read_hardware(name).link_bytes_per_s / 1e9 == pytest.approx(gb_per_s, rel=0.01)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        *((spelling, "rtx-4090") for spelling in ("rtx-4090", "RTX 4090", "rtx_4090", "rtx4090", "4090", "4090 24GB")),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx-4090-laptop"),
        ("4070ti", "rtx-4070-ti"),
        ("RTX 3060 12GB", "rtx-3060"),
        ("4060 Ti 8 GB", "rtx-4060-ti-8gb"),
        ("AMD Radeon RX 7900 XTX", "rx-7900-xtx"),
        ("7900xt", "rx-7900-xt"),
        ("M4 Max", "apple-m4-max"),
    ],
)
def test_names_are_found_however_they_are_spelled(spelling: str, name: str) -> None:
    assert read_hardware(spelling).name == name


def test_a_card_of_another_size_is_another_card() -> None:
    assert "no hardware 'RTX 3060 8GB' is known" in _unknown("RTX 3060 8GB").what
    assert len({_letters_of(name) for name in EXPECTED}) == len(EXPECTED), "every name can be told from the others"


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_what_is_untried_is_said(name: str) -> None:
    said = {"rx": "ROCm build, which such a card needs, is untried", "apple": "no Metal (MPS) path"}
    note = read_hardware(name).note
    assert next((words for start, words in said.items() if name.startswith(start)), "") in note
    assert ("laptop" in name) == ("a laptop's card" in note)


def _unknown(name: str) -> ProfileError:
    with pytest.raises(ProfileError) as caught:
        read_hardware(name)
    return caught.value


@pytest.mark.parametrize(
    ("name", "closest"), [("a100", "a100-40gb, a100-80gb"), ("rtx-490", "rtx-4090"), ("rtx4700 ti", "rtx-4070-ti")]
)
def test_an_unknown_name_lists_the_closest_and_all(name: str, closest: str) -> None:
    with pytest.raises(ProfileError) as caught:
        read_hardware(name)
    assert caught.value.code == "E_HARDWARE"
    assert f"'{name}'" in caught.value.what
    assert closest in caught.value.fix
    assert all(known in caught.value.fix for known in EXPECTED)


@pytest.mark.parametrize("name", ["", "assumptions", "../assumptions", "banana"])
def test_what_is_no_hardware_is_refused(name: str) -> None:
    with pytest.raises(ProfileError, match="is known"):
        read_hardware(name)


def test_a_whole_file_reads() -> None:
    hardware = parse_hardware(CARD, "mine")
    assert isinstance(hardware, Hardware)
    assert hardware.name == "mine"
    assert hardware.memory_bytes == 24 << 30


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("value = 24\n", "value = 24000\n", "memory_gib.value"),
        ("value = 1008\n", "value = 1008000000000\n", "memory_gb_per_s.value"),
        ("value = 165.2\n", "value = -1\n", "half_tflop_per_s.value"),
        ("value = 82.6\n", "value = true\n", "float32_tflop_per_s.value"),
        ("value = 82.6\n", "value = nan\n", "float32_tflop_per_s.value"),
        ("value = 165.2\n", 'value = "165"\n', "half_tflop_per_s.value"),
        ("value = 4\n", "value = 9\n", "pcie_generation.value"),
        ("value = 16\n", "value = 12\n", "pcie_lanes.value"),
        ("value = 16\n", "value = 16\nlength = 3\n", "pcie_lanes.length"),
        ('device = "cuda"', 'device = "tpu"', "device"),
        ('device = "cuda"', 'device = "cpu"', "pcie_generation"),
        ('title = "NVIDIA GeForce RTX 4090"', "title = 3", "title"),
        ("[memory_gib]", "[memory_gb]", "memory_gb"),
        ("[pcie_lanes]\nvalue = 16", "[pcie_lanes]", "pcie_lanes.value"),
        ('device = "cuda"\n', 'device = "cuda"\nspeed = 3\n', "speed"),
    ],
)
def test_unknown_keys_and_absurd_values_are_refused_by_name(old: str, new: str, named: str) -> None:
    assert old in CARD
    assert f"'{named}'" in refusal(CARD.replace(old, new, 1))


def test_a_value_without_a_source_is_refused() -> None:
    lines = [line for line in CARD.splitlines() if not line.startswith("source")]
    assert "source' in 'mine.toml' is missing" in refusal("\n".join(lines))
    assert "is no TOML" in refusal("[")


def test_assumptions_are_shares_in_order_each_with_a_reason() -> None:
    assumptions = read_assumptions()
    for name in ("memory", "compute", "link", "disk"):
        slow, likely, fast = (getattr(case, name) for case in (assumptions.slow, assumptions.likely, assumptions.fast))
        assert 0 < slow < likely < fast <= 1
    for name in ("layer_call_s", "expert_call_s", "expert_spread"):
        slow, likely, fast = (getattr(case, name) for case in (assumptions.slow, assumptions.likely, assumptions.fast))
        assert 1 >= slow > likely > fast > 0, name
    assert all(assumptions.reasons.values())
    card = read_hardware("rtx-4090")
    assert 23 << 30 < assumptions.usable_bytes(card) < card.memory_bytes
    assert assumptions.usable_bytes(read_hardware("cpu")) == read_hardware("cpu").memory_bytes


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("likely = 0.75", "likely = 1.75", "memory.likely"),
        ("slow = 0.6", "slow = 0.8", "memory"),
        ("slow = 1.3e-3", "slow = 0.1e-3", "layer_call_s"),
        ("[disk]", "[disc]", "disc"),
        ("likely = 0.98", "likely = 98", "usable_memory.likely"),
    ],
)
def test_assumptions_that_make_no_sense_are_refused_by_name(old: str, new: str, named: str) -> None:
    assert old in ASSUMED
    with pytest.raises(ProfileError) as caught:
        parse_assumptions(ASSUMED.replace(old, new, 1))
    assert f"'{named}'" in caught.value.what


def test_measured_rates_are_reached_in_the_fast_case_and_by_as_much_less_in_others() -> None:
    sheet, measured = read_assumptions(), read_assumptions().of_measured(1e9)
    assert measured.host_disk_bytes_per_s == 1e9
    for name in ("memory", "compute", "link", "disk"):
        assert getattr(measured.fast, name) == 1
        assert getattr(measured.likely, name) == pytest.approx(getattr(sheet.likely, name) / getattr(sheet.fast, name))
    assert measured.slow.layer_call_s == sheet.slow.layer_call_s
