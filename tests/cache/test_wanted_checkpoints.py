"""Which checkpoint positions a prompt wants."""

import pytest

from hybrid_jax.cache.policy.value import same_prompt_checkpoint, wanted_checkpoints


@pytest.mark.parametrize(
    ("length", "expected"), [(1, 0), (32, 0), (33, 32), (64, 32), (65, 64), (200, 192)]
)
def test_the_same_prompt_checkpoint_leaves_one_token(length, expected):
    assert same_prompt_checkpoint(length, 32) == expected


def test_branch_points_align_down_and_lie_beyond_the_hit():
    wanted = wanted_checkpoints(
        prompt_len=200, after=64, grain=32, branch_points=[40, 70, 100, 131, 200]
    )
    assert wanted == [96, 128, 192]


def test_the_end_of_another_prompt_wants_its_own_last_boundary():
    assert wanted_checkpoints(prompt_len=200, after=0, grain=32, prompt_ends=[64, 65]) == [
        32,
        64,
        192,
    ]


def test_nothing_is_wanted_where_the_hit_reaches_the_last_boundary():
    assert wanted_checkpoints(prompt_len=97, after=96, grain=32, branch_points=[96]) == []
    assert wanted_checkpoints(prompt_len=20, after=0, grain=32, branch_points=[10]) == []
