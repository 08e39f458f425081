"""What `make test` draws of the cases of a test."""

import itertools

from tests.drawing import LONG, TAKE_TURNS, TURNS, covering, in_turn, is_long, turn_asked_for


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
    assert is_long("benchmarks/test_on_gpu.py", "test_the_report_holds_every_table")
    assert not is_long("benchmarks/test_on_gpu.py", "test_a_report_of_nothing_says_what_to_run")
    room = "test_no_step_holds_more_than_is_counted_for_temporaries"
    assert is_long("sizing/test_sizing.py", f"{room}[kinds2-settings2]")
    assert not is_long("sizing/test_sizing.py", f"{room}[kinds20-settings20]")


def test_every_test_has_one_turn_and_groups_stay_together():
    numbers = range(3 * 2 * TURNS)
    tests = [(file, f"model {n // 3}") for file in ("a.py", "b.py", "c.py") for n in numbers]
    turns = [in_turn(tests, turn) for turn in range(TURNS)]
    assert sorted(itertools.chain(*turns)) == list(range(len(tests)))
    for taken in turns:
        assert len(taken) == len(tests) / TURNS
        groups = {tests[place] for place in taken}
        assert taken == [place for place, test in enumerate(tests) if test in groups]


def test_files_with_one_test_are_spread_over_the_turns():
    tests = [(f"test_{number}.py", "alone") for number in range(1000)]
    assert all(0.8 < len(in_turn(tests, turn)) / 1000 * TURNS < 1.2 for turn in range(TURNS))


def test_a_turn_is_that_of_the_commit_or_the_one_asked_for(root, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.drawing.EVERYTHING", False)
    for given, turn in (("all", None), ("6", 6 % TURNS)):
        monkeypatch.setenv("HYBRID_JAX_TURN", given)
        assert turn_asked_for(root) == turn
    monkeypatch.setenv("HYBRID_JAX_TURN", "commit")
    assert turn_asked_for(tmp_path) == 0  # no repository
    monkeypatch.delenv("HYBRID_JAX_TURN")
    assert turn_asked_for(root) is None


def test_what_takes_turns_is_there(root):
    assert all((root / "tests" / name).exists() for name in TAKE_TURNS)
