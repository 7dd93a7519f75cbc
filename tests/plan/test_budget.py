import pytest

from lowtide.errors import PlanError
from lowtide.plan.budget import Budget, parse_budget


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("4500 MiB", 4500 << 20),
        ("1.5gib", 3 << 29),
        ("2GB", 2_000_000_000),
        ("1e9", 10**9),
        ("512", 512),
        ("512B", 512),
        (".5k", 512),
        (123, 123),
    ],
)
def test_bytes(text, size):
    assert parse_budget(text) == Budget(bytes=size)
    assert parse_budget(text).resolve(10**12, None) == size


@pytest.mark.parametrize("text", ["8GiB reserved", "8 GiB  Reserved ", "8589934592 reserved"])
def test_reserved_bytes(text):
    assert parse_budget(text) == Budget(bytes=8 << 30, reserved=True)
    with pytest.raises(PlanError, match=r"give it to lowtide\.fit"):
        parse_budget(text).resolve(1000, 1000)


@pytest.mark.parametrize(
    "text", ["40% reserved", "reserved", "8GiBreserved", "auto reserved", "8GiB reserved reserved"]
)
def test_reserved_bytes_have_a_unit(text):
    with pytest.raises(PlanError, match="8GiB reserved"):
        parse_budget(text)


def test_a_share_is_of_the_plain_peak():
    assert parse_budget("40%").resolve(1000, None) == 400
    assert parse_budget("12.5%").resolve(1000, None) == 125


def test_auto_is_what_the_device_has():
    assert parse_budget("auto").auto
    assert parse_budget(" AUTO ").resolve(1000, 77) == 77
    with pytest.raises(PlanError, match="asks the device"):
        parse_budget("auto").resolve(1000, None)


def test_a_budget_stays_itself():
    assert parse_budget(Budget(share=0.5)) == Budget(share=0.5)


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "8 gigs", "-1", "-5%", "0", "0%", "8GiB please", "1e40GiB", "nan", "%", True, None, 0, -3],
)
def test_what_is_no_budget_is_refused_with_the_way_out(text):
    with pytest.raises(PlanError, match="8GiB"):
        parse_budget(text)
