"""What leaves a divided arena and comes back: host, disk and files, read by engines of other numbers of devices."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid_jax import CacheConfig, SamplingParams
from hybrid_jax.tiers.part_file import read_part
from tests.drawing import left_to_all
from tests.mesh.models import DIVIDED
from tests.mesh.running import PROMPTS, answers, make, of_one_device

ALL = CacheConfig(loads="always")
INT8 = CacheConfig(loads="always", checkpoints="int8")
KINDS = [name for name in DIVIDED if name != "mtp"]
SOME = ("two_kv", "experts", "mamba1")


@left_to_all(*(name for name in KINDS if name not in SOME))
@pytest.mark.parametrize("name", KINDS)
def test_files_are_those_of_one_device(name, tmp_path):
    """One device and two write the same parts, and each reads what the other has written."""
    stats = {}
    for writer, reader in ((1, 2), (2, 1)):
        folder = tmp_path / str(writer)
        with make(name, writer, cache=ALL, cache_dir=folder) as llm:
            assert answers(llm) == of_one_device(name)[0]
        files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*.safetensors"))
        stats[writer] = files
        with make(name, reader, cache=ALL, cache_dir=folder, page_tokens=64) as llm:
            found, cached = answers(llm)
            assert found == of_one_device(name)[0][0] and min(cached) > 0
            assert llm.stats()["disk_loads"] == 4
    assert stats[1] == stats[2]


def test_parts_have_the_same_bytes(tmp_path):
    """Of pages, a state and its columns, where sums over devices have not changed a bit: of the first layer."""
    saved = {}
    for count in (1, 2, 8):
        with make("two_kv", count) as llm:
            answers(llm)
            llm.cache.save(PROMPTS[3], tmp_path / str(count))
        saved[count] = read_part(tmp_path / str(count))
    for count in (2, 8):
        marks = [{**part.marks, "crc32": ""} for part in (saved[count], saved[1])]
        assert marks[0] == marks[1]
        assert saved[count].arrays.keys() == saved[1].arrays.keys()
        for name, array in saved[1].arrays.items():
            other = saved[count].arrays[name]
            assert (other.shape, other.dtype) == (array.shape, array.dtype), name
            if array.dtype == "uint32":
                array, other = (x.view("float32") for x in (array, other))
            assert np.allclose(array, other, atol=1e-4), name


@pytest.mark.parametrize(
    ("settings", "counts"),
    [({"cache": INT8}, (2, 4)), ({"cache": ALL, "kv_cache_dtype": "fp8"}, (2, 8))],
    ids=["int8", "fp8"],
)
def test_other_forms(settings, counts, tmp_path):
    first, second = counts
    with make("two_kv", first, cache_dir=tmp_path, **settings) as llm:
        found, hits = answers(llm)[0], answers(llm)[0]
    with make("two_kv", second, cache_dir=tmp_path, **settings) as llm:
        assert answers(llm)[0] == hits and llm.stats()["disk_loads"] == 4
    with make("two_kv", 1, cache_dir=tmp_path, **settings) as llm:
        assert answers(llm)[0] == hits and llm.stats()["disk_loads"] == 4
    with make("two_kv", first, **settings) as llm:
        assert answers(llm)[0] == found


@left_to_all(*(name for name in KINDS if name not in SOME))
@pytest.mark.parametrize("name", KINDS)
def test_the_hosts_memory_gives_back_what_it_took(name):
    with make(name, 2, cache=ALL, host_memory="16MB") as llm:
        assert answers(llm) == of_one_device(name)[0]
        memory = llm._engine.scheduler.memory
        memory.make_room(memory.frames.num_frames - 1)  # all of it goes down
        llm.generate([{"prompt_token_ids": [1] * 8}], SamplingParams(max_tokens=1))
        found, cached = answers(llm)
        assert found == of_one_device(name)[1][0] and min(cached) > 0
        assert llm.stats()["host_loads"] == 4
        memory.tree.check_invariants()
