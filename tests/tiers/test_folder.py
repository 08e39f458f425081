"""Folders of parts: what is there, what goes when they are full, and folders that cannot be used."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from hybrid_jax.tiers import folder as module
from hybrid_jax.tiers.chain import RUN_TOKENS, Chain, root_of, run_begin, runs_to
from hybrid_jax.tiers.folder import (
    ABOUT,
    CacheFolderError,
    Folder,
    default_limit,
    files_of,
    prune,
)
from hybrid_jax.tiers.part_file import Damaged
from tests.tiers.prefixes import whole
from tests.tiers.read_only import refuse_writing

ROOT, OTHER = root_of("a"), root_of("b")
NUMBERS = np.arange(1000, dtype=np.uint32)
PART = whole({"pages.0": NUMBERS})
SIZE = 5000  # more than a part's file has


def name_of(number: int, kind: str = "checkpoint-") -> str:
    return f"{kind}{number:032x}.safetensors"


def open_folder(path, root: str = ROOT, limit: int | None = 1 << 20) -> Folder:
    return Folder(path, root, limit=limit, about={"model": "tiny"})


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""
    now = [time.time()]
    monkeypatch.setattr(module.time, "time", lambda: now[0])
    return now


class TestNames:
    def test_a_name_is_of_all_tokens_before_and_of_the_root(self):
        tokens = np.arange(1000, dtype=np.int32)
        names = {Chain(ROOT, tokens).name(p) for p in range(1, 1001)}
        assert len(names) == 1000
        assert Chain(OTHER, tokens).name(300) not in names
        for place in (0, 255, 256, 511, 599):
            changed = tokens.copy()
            changed[place] += 1
            for position in (256, 512, 600):
                differs = Chain(ROOT, changed).name(position) not in names
                assert differs == (place < position)

    def test_a_name_does_not_depend_on_what_was_asked_before(self):
        tokens = np.arange(1000, dtype=np.int32)
        one, other = Chain(ROOT, tokens), Chain(ROOT, tokens[:700].astype(np.int64))
        forwards = [one.name(p) for p in range(1, 700)]
        assert forwards == [other.name(p) for p in reversed(range(1, 700))][::-1]

    def test_runs(self):
        assert [run_begin(p) for p in (1, 256, 257, 512)] == [0, 0, 256, 256]
        assert runs_to(0) == [] and runs_to(256) == [256] and runs_to(257) == [256, 257]
        assert all(RUN_TOKENS % grain == 0 for grain in (8, 16, 32, 64))

    def test_roots_differ_by_where_marks_end(self):
        assert root_of("ab", "c") != root_of("a", "bc") != root_of("abc")


class TestFiles:
    def test_what_is_written_is_there_for_others_too(self, tmp_path):
        one = open_folder(tmp_path / "deep" / "cache")
        assert name_of(1) not in one
        assert one.write(name_of(1), {"kind": "x"}, PART) == one.num_bytes > 4000
        assert name_of(1) in one and one.num_files == 1
        assert one.write(name_of(1), {"kind": "x"}, PART) == 0
        two = open_folder(tmp_path / "deep" / "cache")
        part = two.read(name_of(1), {"kind": "x"})
        assert np.array_equal(part.arrays["pages.0"], NUMBERS)
        assert name_of(1) not in open_folder(tmp_path / "deep" / "cache", OTHER)

    def test_a_folder_is_scanned_again_when_it_has_changed(self, tmp_path, monkeypatch):
        one, two = open_folder(tmp_path), open_folder(tmp_path)
        one.write(name_of(1), {}, PART)
        two.look_again()
        assert name_of(1) not in two
        monkeypatch.setattr(two, "_next_look", 0.0)
        two.look_again()
        assert name_of(1) in two

    def test_many_may_make_one_folder_at_once(self, tmp_path):
        begin = threading.Barrier(8)

        def use(number: int) -> int:
            begin.wait(30)
            for turn in range(10):
                folder = open_folder(tmp_path / f"{turn}", (ROOT, OTHER)[number % 2])
                folder.write(name_of(number), {}, PART)
            return folder.num_files

        with ThreadPoolExecutor(8) as pool:
            assert min(pool.map(use, range(8))) > 0
        for turn in range(10):
            assert len(list(files_of(tmp_path / f"{turn}"))) == 8
            assert not [*(tmp_path / f"{turn}").rglob("*.new")]

    def test_a_folder_that_another_one_is_making_is_no_strangers(self, tmp_path, monkeypatch):
        """Nor is one of a process that was killed while it made it."""
        path, replace, looks = tmp_path / "cache", os.replace, []

        def look_and_replace(source, target) -> None:
            looks.append([file.name for file in path.iterdir()])
            module.check_form(path)
            replace(source, target)
            module.check_form(path)

        monkeypatch.setattr(module.os, "replace", look_and_replace)
        open_folder(path)
        assert len(looks) == 2 and looks[0][0].startswith(".") and len(looks[0]) == 1

    @pytest.mark.parametrize("what", ["damaged", "renamed", "other root", "other mark", "gone"])
    def test_a_part_that_is_not_what_it_should_be_is_a_miss(self, tmp_path, what):
        folder = open_folder(tmp_path)
        folder.write(name_of(1), {"position": "64"}, PART)
        file, wanted, error = tmp_path / ROOT / name_of(1), {"position": "64"}, Damaged
        if what == "damaged":
            file.write_bytes(file.read_bytes()[:-1])
        elif what == "renamed":
            file = file.rename(file.with_name(name_of(2)))
        elif what == "other root":
            other = open_folder(tmp_path, OTHER)
            other.write(name_of(1), wanted, PART)
            os.replace(tmp_path / OTHER / name_of(1), file)
        elif what == "other mark":
            wanted = {"position": "32"}
        else:
            file.unlink()
            error = FileNotFoundError
        folder.scan()
        name = name_of(2 if what == "renamed" else 1)
        with pytest.raises(error):
            folder.read(name, wanted)
        assert name not in folder and not (tmp_path / ROOT / name).exists()

    @pytest.mark.parametrize("rights", [None, 0o755, 0o770])
    def test_a_new_folder_is_its_makers_alone_and_another_keeps_its_rights(self, tmp_path, rights):
        path = tmp_path / "above" / "cache"
        if rights is not None:
            path.mkdir(parents=True)
            path.chmod(rights)
        before = os.umask(0o022)
        try:
            open_folder(path)
            open_folder(path, OTHER)
        finally:
            os.umask(before)
        assert path.stat().st_mode & 0o777 == (0o700 if rights is None else rights)
        assert (path / ROOT).stat().st_mode & 0o777 == 0o755

    @pytest.mark.parametrize("root", [ROOT, OTHER])
    def test_a_folder_that_cannot_be_written_is_read(self, tmp_path, monkeypatch, caplog, root):
        open_folder(tmp_path).write(name_of(1), {}, PART)
        with monkeypatch.context() as patch:
            refuse_writing(patch)
            folder = open_folder(tmp_path, root)
            assert folder.limit is None and folder.num_bytes > 4000
            [record] = caplog.records
            assert f"{tmp_path} is read, and nothing is kept in it" in record.message
            assert "Read-only file system" in record.message
            assert folder.write(name_of(2), {}, PART) == 0
            if root == ROOT:
                part = folder.read(name_of(1), {})
                folder.touch(name_of(1), [])
                assert np.array_equal(part.arrays["pages.0"], NUMBERS)
            else:
                assert name_of(1) not in folder and folder.num_files == 0
            folder.make_room(1 << 40)
            assert len(caplog.records) == 1
        assert len(list(files_of(tmp_path))) == 1

    def test_without_a_limit_nothing_is_written(self, tmp_path):
        folder = open_folder(tmp_path, limit=None)
        assert folder.write(name_of(1), {}, PART) == 0 and folder.num_files == 0


class TestRoom:
    def test_what_was_used_longest_ago_goes_first(self, tmp_path, clock):
        folder = open_folder(tmp_path, limit=10 * SIZE)
        for number in range(10):
            clock[0] += 1
            folder.write(name_of(number), {}, PART)
            folder.touch(name_of(number), [])
        for number in (0, 3):
            clock[0] += 1
            folder.touch(name_of(number), [])
        for number in range(10, 15):
            clock[0] += 1
            folder.write(name_of(number), {}, PART)
            folder.touch(name_of(number), [])
            assert folder.num_bytes <= 10 * SIZE
            assert sum(f.num_bytes for f in files_of(tmp_path)) == folder.num_bytes
        kept = {number for number in range(15) if name_of(number) in folder}
        assert {0, 3, *range(10, 15)} <= kept and not {1, 2} & kept

    def test_all_bytes_of_a_file_count_not_those_of_its_arrays_alone(self, tmp_path, clock):
        small = whole({"pages.0": NUMBERS[:8]})
        folder = open_folder(tmp_path, limit=2000)
        for number in range(30):
            clock[0] += 1
            assert folder.write(name_of(number), {}, small) > 200
            folder.touch(name_of(number), [])
            assert sum(f.num_bytes for f in files_of(tmp_path)) == folder.num_bytes <= 2000
        assert folder.num_files > 4

    def test_other_roots_give_way_too(self, tmp_path, clock, monkeypatch):
        monkeypatch.setattr(module, "LOOK_S", 0.0)
        monkeypatch.setattr(module, "LOOKS", 0)
        old, new = open_folder(tmp_path, OTHER), open_folder(tmp_path, limit=4 * SIZE)
        for number in range(4):
            old.write(name_of(number), {}, PART)
        clock[0] += 5
        for number in range(3):
            new.write(name_of(number), {}, PART)
            new.touch(name_of(number), [])
            assert sum(f.num_bytes for f in files_of(tmp_path)) <= 4 * SIZE
        assert new.num_files == 3

    def test_a_checkpoint_goes_before_its_pages(self, tmp_path, clock):
        folder = open_folder(tmp_path)
        pages = [name_of(number, "pages-") for number in range(3)]
        for name in (*pages, name_of(9)):
            folder.write(name, {}, PART)
        folder.touch(name_of(9), pages)
        prune(tmp_path, 3 * SIZE)
        folder.scan()
        assert name_of(9) not in folder and all(name in folder for name in pages)

    def test_a_clock_that_was_set_back_makes_nothing_old(self, tmp_path, clock):
        folder = open_folder(tmp_path, limit=3 * SIZE)
        for number in range(3):
            folder.write(name_of(number), {}, PART)
            folder.touch(name_of(number), [])
            clock[0] -= 86_400
        folder.write(name_of(3), {}, PART)
        folder.touch(name_of(3), [])
        folder.write(name_of(4), {}, PART)
        assert name_of(0) not in folder and name_of(3) in folder

    def test_what_cannot_be_removed_makes_no_room(self, tmp_path, clock, monkeypatch):
        """Such as the files of another user, in a folder where only owners may remove theirs."""
        folder = open_folder(tmp_path, limit=2 * SIZE)
        for number in range(2):
            folder.write(name_of(number), {}, PART)

        def refuse(path, missing_ok=False):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", refuse)
            with pytest.raises(OSError, match="it is full, and files in it cannot be removed"):
                folder.write(name_of(2), {}, PART)
            found = prune(tmp_path, 0)
            assert found.num_files == 0 and len(found.failed) == 2
        assert sum(file.num_bytes for file in files_of(tmp_path)) <= 2 * SIZE

    def test_what_was_left_half_written_goes_when_it_is_old(self, tmp_path, clock):
        open_folder(tmp_path)
        new = tmp_path / ROOT / ".checkpoint-1.safetensors.77.new"
        new.write_bytes(b"half")
        clock[0] = time.time()
        assert list(files_of(tmp_path)) == [] and new.exists()
        clock[0] += 2 * module.OLD_S
        assert list(files_of(tmp_path)) == [] and not new.exists()

    def test_the_usual_limit_is_half_of_what_is_free(self, tmp_path, monkeypatch):
        free = [1 << 40]
        monkeypatch.setattr(
            module.shutil, "disk_usage", lambda path: type("U", (), {"free": free[0]})
        )
        assert default_limit(tmp_path / "not" / "there") == 20 << 30
        free[0] = 10 << 20
        assert default_limit(tmp_path) == 5 << 20
        folder = open_folder(tmp_path)
        folder.write(name_of(1), {}, PART)
        assert default_limit(tmp_path) == (free[0] + folder.num_bytes) // 2


class TestRefusals:
    def test_a_file_in_its_place(self, tmp_path):
        (tmp_path / "file").write_text("x")
        with pytest.raises(CacheFolderError, match=r"file is a file; give a folder"):
            open_folder(tmp_path / "file")
        with pytest.raises(CacheFolderError, match="cannot be used"):
            open_folder(tmp_path / "file" / "below")

    def test_a_folder_with_something_else_in_it(self, tmp_path):
        (tmp_path / "thesis.tex").write_text("x")
        with pytest.raises(CacheFolderError, match="has other files in it"):
            open_folder(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]

    def test_a_newer_form(self, tmp_path):
        open_folder(tmp_path)
        (tmp_path / ABOUT).write_text(json.dumps({"version": 2}))
        with pytest.raises(CacheFolderError, match="has version 2 of the form, and .* reads 1"):
            open_folder(tmp_path)

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": "x"}', "\x00"])
    def test_a_damaged_mark(self, tmp_path, text):
        open_folder(tmp_path)
        (tmp_path / ABOUT).write_text(text)
        with pytest.raises(CacheFolderError, match="cannot be read|has version"):
            open_folder(tmp_path)

    def test_an_empty_folder_that_cannot_be_written(self, tmp_path, monkeypatch):
        refuse_writing(monkeypatch)
        with pytest.raises(CacheFolderError, match="cannot be used .Read-only file system.; give"):
            open_folder(tmp_path)

    def test_no_rights(self, tmp_path, monkeypatch):
        def refused(*args, **options):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(module.Path, "mkdir", refused)
        with pytest.raises(CacheFolderError, match="cannot be used .Permission denied."):
            open_folder(tmp_path / "new")
