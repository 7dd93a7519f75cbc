import pytest

from lowtide.units import format_bytes, format_cost, format_count, format_rate, format_seconds


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (7_329_956_112, "6.83 GiB"),
        (1024**3 - 1, "1.00 GiB"),
        (1 << 60, "1.00 EiB"),
        (1 << 75, "32768.00 EiB"),
    ],
)
def test_bytes(value, text):
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999, "999"), (1000, "1.00 k"), (81_954_092_640, "81.95 G"), (999_999, "1.00 M")],
)
def test_counts(value, text):
    assert format_count(value) == text


def test_rates_carry_their_unit():
    assert format_rate(4e12, "FLOP") == "4.00 TFLOP/s"
    assert format_rate(0, "B") == "0 B/s"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.000 s"),
        (2.3e-8, "23.000 ns"),
        (0.000379, "379.000 µs"),
        (0.0227, "22.700 ms"),
        (1.0, "1.000 s"),
        (0.9999999999, "1.000 s"),
        (-0.5, "-500.000 ms"),
    ],
)
def test_seconds(value, text):
    assert format_seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 units"), (1, "1 unit"), (267.0, "267 units"), (10.5, "10.5 units"), (1e9, "1000000000 units")],
)
def test_unit_costs_are_no_seconds(value, text):
    assert format_cost(value, "unit") == text
    assert format_cost(value, "measured") == format_seconds(value)
