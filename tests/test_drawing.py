"""What `make test` draws of the cases of a test."""

import itertools

from tests.drawing import LONG, covering, is_long


def test_every_value_occurs_in_few_cases():
    cases = list(itertools.product(range(7), "ab", range(3)))
    picked = [cases[place] for place in covering(cases)]
    assert len(picked) == 7
    assert all({case[i] for case in picked} == {case[i] for case in cases} for i in range(3))
    assert (
        len({case[1:] for case in picked}) == 6
    )  # the others pair in as many ways as there is room for


def test_of_one_parameter_every_case_is_taken():
    assert covering([("a",), ("b",), ("c",)]) == [0, 1, 2]


def test_the_same_value_at_another_place_is_another_value():
    assert covering([(1, 2), (2, 1), (1, 1), (2, 2)]) == [0, 1]


def test_what_is_left_out_is_there(root):
    for file, tests in LONG.items():
        text = (root / "tests" / file).read_text(encoding="utf-8")
        assert all(f"def {test.partition('[')[0]}(" in text for test in tests), file
    assert is_long("test_on_gpu.py", "test_the_report_holds_every_table")
    assert not is_long("test_on_gpu.py", "test_a_report_of_nothing_says_what_to_run")
