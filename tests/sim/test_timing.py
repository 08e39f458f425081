"""Time to first token: the stated model, tables that were measured, and tables that say something wrong."""

from __future__ import annotations

import pytest

from hybrid_jax.costs import Costs
from hybrid_jax.sim.prefix_cache.timing import CostModel, DeviceModel, MeasuredTable

COSTS = Costs(flops_per_token=100, flops_per_key=2, kv_bytes=1, checkpoint_bytes=1)


def test_the_model_adds_an_overhead_to_the_flops_left_over_the_rate():
    model = CostModel(flops_per_second=1000, overhead_s=0.5)
    # 10 tokens: 1000 FLOPs and 2 * 55 for keys; the first 6: 600 and 2 * 21
    assert model.seconds(COSTS, 10, 0) == pytest.approx(0.5 + 1.110)
    assert model.seconds(COSTS, 10, 6) == pytest.approx(0.5 + 1.110 - 0.642)


def test_the_model_describes_itself_by_its_numbers():
    assert CostModel().describe() == "17.8 ms + FLOPs / 395.6 TFLOP/s"


def test_a_plan_takes_a_dispatch_its_flops_and_the_bytes_of_every_step():
    device = DeviceModel(flops_per_second=1000, bytes_per_second=10, dispatch_s=0.5)
    # A step reads two bytes for every two FLOPs of a token, 100, and what is cached.
    taken = device.seconds(COSTS, flops=2000, num_steps=3, bytes_per_step=900)
    assert taken == pytest.approx(0.5 + 2 + 3 * (100 + 900) / 10)
    assert device.seconds(COSTS, flops=0, num_steps=0, bytes_per_step=900) == 0.5


@pytest.fixture
def table(tmp_path):
    def make(text):
        path = tmp_path / "a100.csv"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return MeasuredTable(path)

    return make


@pytest.mark.parametrize(
    ("num_tokens", "hit_len", "milliseconds"),
    [
        (100, 0, 10),
        (300, 0, 50),
        (300, 200, 10),  # what is cached takes no time
        (150, 0, 20),  # half way between rows
        (325, 100, 30),
        (320, 0, 58),  # the last slope, 0.4 ms a token, goes on
        (1300, 0, 450),
        (50, 0, 10),  # fewer than the first row's take as long
    ],
)
def test_a_table_goes_straight_between_rows_and_on_behind_the_last(
    table, num_tokens, hit_len, milliseconds
):
    times = table("tokens,ms\n100,10\n200,30\n250,30\n300,50\n")
    assert times.seconds(COSTS, num_tokens, hit_len) == pytest.approx(milliseconds / 1000)


def test_behind_a_last_row_that_took_less_than_the_one_before_times_stay(table):
    times = table("tokens,ms\n100,30\n200,20\n")
    assert times.seconds(COSTS, 1000, 0) == pytest.approx(0.020)


def test_a_table_may_have_other_columns_and_spaces(table):
    times = table("device, ms, tokens\nx, 10, 0\ny, 20, 100\n")
    assert times.seconds(COSTS, 50, 0) == pytest.approx(0.015)


def test_a_table_describes_itself_by_its_name(table):
    assert table("tokens,ms\n1,1\n2,2\n").describe() == "table a100.csv"


COLUMN = "must be a number of at least 0, got"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", ": needs two rows at least, got 0"),
        ("tokens,ms\n1,2\n", ": needs two rows at least, got 1"),
        ("length,ms\n1,2\n", ", line 2: must have the columns tokens and ms, got ['length', 'ms']"),
        ("tokens\n1\n2\n", ", line 2: must have the columns tokens and ms, got ['tokens']"),
        ("tokens,ms\n1,2\nx,3\n", f", line 3: tokens {COLUMN} 'x'"),
        ("tokens,ms\n1,2\n2\n", f", line 3: ms {COLUMN} None"),
        ("tokens,ms\n1,-2\n2,3\n", f", line 2: ms {COLUMN} '-2'"),
        ("tokens,ms\n1,2\n2,nan\n", f", line 3: ms {COLUMN} 'nan'"),
        ("tokens,ms\n1,2\ninf,3\n", f", line 3: tokens {COLUMN} 'inf'"),
        ("tokens,ms\n5,2\n\n5,3\n", ", line 4: tokens must ascend, got 5 after 5"),
        ("tokens,ms\n7,2\n5,3\n", ", line 3: tokens must ascend, got 5 after 7"),
    ],
)
def test_a_bad_table_is_named_with_its_line_and_value(table, text, reason):
    with pytest.raises(ValueError) as error:
        table(text)
    assert str(error.value) == f"a100.csv{reason}"


def test_a_table_that_is_no_text_is_an_error_that_names_it(table):
    with pytest.raises(ValueError, match=r"^a100\.csv: cannot be read as CSV: .*byte 0xff"):
        table(b"tokens,ms\n\xff,1\n")


def test_a_missing_table_is_an_error_that_names_it(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        MeasuredTable(tmp_path / "none.csv")
    assert error.value.filename == str(tmp_path / "none.csv")
