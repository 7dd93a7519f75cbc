from lowtide.report.curve import draw, thin


def test_thinning_keeps_the_peak_and_says_so():
    values = [*range(1000), 5000, *range(1000)]
    view = thin(values, points=100)
    assert len(view["bytes"]) <= 100
    assert max(view["bytes"]) == 5000
    assert view["thinned"]
    assert thin([1, 2, 3]) == {"bytes": [1, 2, 3], "ops_per_point": 1, "thinned": False}


def test_the_drawing_is_full_at_the_peak_and_starts_at_zero():
    lines = draw([0, 5, 10], width=3, height=2)
    assert [line[2] for line in lines] == ["█", "█"]
    assert [line[0] for line in lines] == [" ", " "]
    assert [line[1] for line in lines] == [" ", "█"]
    assert draw([], width=10) == []
    assert all(len(line) == 10 for line in draw(list(range(777)), width=10))
