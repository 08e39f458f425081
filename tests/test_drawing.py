"""What `make test` draws of the cases of a test."""

import itertools
import os
import subprocess
import sys
from types import SimpleNamespace

from tests.drawing import begins, covering, idle_words, left_to_all, spine
from tests.imports import ROOT


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


def test_a_mark_with_words_is_for_the_cases_that_begin_so():
    assert begins("kinds2-settings2]", "kinds2") and not begins("kinds20-settings20]", "kinds2")
    assert begins("decode_cut]", "decode_cut]") and not begins("decode_cut_shared]", "decode_cut]")


def test_a_word_that_begins_no_case_is_named():
    marks = [spine("jam").mark, left_to_all("bamba", "bam-fp8").mark]
    names = ("t.py::test_a[bamba-exact]", "t.py::test_a[jamba]", "t.py::test_b[bam-fp8]")
    items = [SimpleNamespace(nodeid=name, own_markers=marks) for name in names]
    assert idle_words(items[:2]) == ["t.py::test_a: 'bam-fp8'"]
    assert idle_words(items[2:]) == ["t.py::test_b: 'bamba'", "t.py::test_b: 'jam'"]


def test_every_word_of_a_mark_begins_a_case():
    asked = {name: value for name, value in os.environ.items() if name[:11] != "HYBRID_JAX_"}
    asked |= {"HYBRID_JAX_TESTS": "all"}
    run = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "tests"]
    done = subprocess.run(run, cwd=ROOT, env=asked, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
