"""An output is absent, old and complete, or new and complete; what an earlier run left is continued or refused."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from xmac_cli.checkpoint import staging
from xmac_cli.checkpoint.journal import JobHeader, Journal, intact_length, job_of, parse_lines
from xmac_cli.checkpoint.output import StagedOutput, check_destination, check_free_space
from xmac_cli.checkpoint.writer import ShardRecord
from xmac_cli.cli.errors import ResumeMismatchError, UsageError, XmacError


def stage(destination: Path, key: str = "k", *, resume: bool = False, overwrite: bool = False) -> StagedOutput:
    return StagedOutput(destination, overwrite=overwrite, resume=resume, job_key=key)


def leave_unfinished(destination: Path, key: str = "k", content: str = "half") -> None:
    """What a run that failed after its first file leaves behind."""
    with pytest.raises(RuntimeError), stage(destination, key) as staged:
        (staged.path / "a").write_text(content)
        staged.record(ShardRecord("a", len(content), "digest"))
        (staged.scratch / "state").write_text("scores")
        raise RuntimeError


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "out"


def test_the_output_appears_at_commit_and_nothing_else_stays(out: Path) -> None:
    with stage(out) as staged:
        (staged.path / "a").write_text("x")
        (staged.path / "sub").mkdir()
        (staged.path / "sub" / "b").write_text("y")
        (staged.scratch / "c").write_text("z")
        assert not out.exists()
        assert staged.commit()
        assert (out / "sub" / "b").read_text() == "y"
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert {path.name for path in out.iterdir()} == {"a", "sub"}


def test_without_commit_there_is_no_output(out: Path) -> None:
    with stage(out) as staged:
        (staged.path / "a").write_text("x")
    assert not out.exists()
    assert (out.parent / "out.partial").is_dir()


def test_a_run_that_made_nothing_leaves_nothing(out: Path) -> None:
    with pytest.raises(ValueError), stage(out) as staged:
        (staged.path / ".scratch").mkdir()
        raise ValueError
    assert not list(out.parent.iterdir())


def test_unfinished_work_is_resumed_with_its_records_and_scratch(out: Path) -> None:
    leave_unfinished(out)
    with stage(out, resume=True) as staged:
        assert staged.done == {"a": ShardRecord("a", 4, "digest")}
        assert (staged.scratch / "state").read_text() == "scores"
        staged.commit()
    assert (out / "a").read_text() == "half"


def test_a_record_counts_only_while_its_file_has_the_recorded_size(out: Path) -> None:
    leave_unfinished(out)
    (out.parent / "out.partial" / "tree" / "a").write_text("longer")
    with stage(out, resume=True) as staged:
        assert not staged.done


def test_a_fresh_run_starts_from_nothing(out: Path) -> None:
    leave_unfinished(out)
    with stage(out) as staged:
        assert not staged.done
        assert not any(staged.path.iterdir())
        assert not any(staged.scratch.iterdir())


def test_work_of_another_job_is_not_continued(out: Path) -> None:
    leave_unfinished(out, "one")
    with pytest.raises(ResumeMismatchError, match="other inputs or options"), stage(out, "two", resume=True):
        pass
    assert (out.parent / "out.partial" / "tree" / "a").exists(), "a refused resume destroys nothing"


def test_resume_without_anything_to_resume_just_starts(out: Path) -> None:
    with stage(out, resume=True) as staged:
        (staged.path / "a").write_text("x")
        staged.commit()
    assert (out / "a").exists()


@pytest.mark.parametrize("journal", [None, "", "not ours\n", '{"schema": "other"}\n'])
def test_a_partial_directory_that_is_not_ours_is_not_touched(out: Path, journal: str | None) -> None:
    partial = out.parent / "out.partial"
    partial.mkdir(parents=True)
    (partial / "precious").write_text("x")
    if journal is not None:
        (partial / "journal.jsonl").write_text(journal)
    for resume in (False, True):
        with pytest.raises(UsageError, match="holds no journal of xmac"), stage(out, resume=resume):
            pass
    assert (partial / "precious").read_text() == "x"


@pytest.mark.parametrize("torn", [None, b"", b'{"schema": "xmac-jour'])
def test_a_run_killed_before_its_first_line_is_taken_over(out: Path, torn: bytes | None) -> None:
    partial = out.parent / "out.partial"
    partial.mkdir(parents=True)
    if torn is not None:
        (partial / "journal.jsonl").write_bytes(torn)
    with stage(out, resume=True) as staged:
        (staged.path / "a").write_text("x")
        staged.commit()
    assert (out / "a").exists()


def test_a_lone_journal_of_somebody_else_is_not_touched(out: Path) -> None:
    partial = out.parent / "out.partial"
    partial.mkdir(parents=True)
    (partial / "journal.jsonl").write_text("dear diary\n")
    with pytest.raises(UsageError, match="holds no journal of xmac"), stage(out):
        pass
    assert (partial / "journal.jsonl").read_text() == "dear diary\n"


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for destination in (tmp_path / "file" / "out", tmp_path / ("n" * 250), Path("/proc/out")):
        with pytest.raises(UsageError, match="cannot write"), stage(destination):
            pass


def test_a_file_or_link_in_place_of_the_partial_directory_is_refused(out: Path, tmp_path: Path) -> None:
    out.parent.mkdir()
    (out.parent / "out.partial").write_text("x")
    with pytest.raises(UsageError, match="in the way"), stage(out):
        pass
    (out.parent / "out.partial").unlink()
    (out.parent / "out.partial").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="in the way"), stage(out):
        pass


def test_two_processes_cannot_write_the_same_output(out: Path) -> None:
    with stage(out) as first:
        (first.path / "a").write_text("x")
        for resume in (False, True):
            with pytest.raises(UsageError, match="another process is writing"), stage(out, resume=resume):
                pass
        first.commit()
    assert (out / "a").exists()


def test_an_existing_output_is_refused_or_replaced_at_once(out: Path) -> None:
    out.mkdir(parents=True)
    (out / "old").write_text("old")
    with pytest.raises(UsageError, match="not empty") as caught, stage(out):
        pass
    assert caught.value.hint is not None
    assert "--overwrite" in caught.value.hint
    with stage(out, overwrite=True) as staged:
        (staged.path / "new").write_text("new")
        assert (out / "old").exists(), "the old one stays until the new one is complete"
        staged.commit()
    assert [path.name for path in out.iterdir()] == ["new"]
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_replacing_works_where_directories_cannot_be_exchanged(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "exchange", lambda first, second: False)
    out.mkdir(parents=True)
    (out / "old").write_text("old")
    with stage(out, overwrite=True) as staged:
        (staged.path / "new").write_text("new")
        staged.commit()
    assert [path.name for path in out.iterdir()] == ["new"]
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_half_a_replacement_is_undone_by_a_fresh_run(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process died between moving the old output away and moving the new one in."""
    out.mkdir(parents=True)
    (out / "old").write_text("old")
    leave_unfinished_over(out)
    out.rename(out.parent / "out.partial" / "replaced")
    with pytest.raises(UsageError, match="not empty"), stage(out):
        pass
    assert (out / "old").read_text() == "old"


def leave_unfinished_over(out: Path) -> None:
    with pytest.raises(RuntimeError), stage(out, overwrite=True) as staged:
        (staged.path / "a").write_text("x")
        raise RuntimeError


def test_an_empty_directory_is_a_fine_destination(out: Path) -> None:
    out.mkdir(parents=True)
    with stage(out) as staged:
        (staged.path / "a").write_text("x")
        staged.commit()
    assert (out / "a").exists()


def test_a_destination_that_fills_up_meanwhile_is_not_overwritten(out: Path) -> None:
    with stage(out) as staged:
        (staged.path / "a").write_text("x")
        out.mkdir()
        (out / "other").write_text("theirs")
        with pytest.raises(UsageError, match="not empty"):
            staged.commit()
    assert (out / "other").read_text() == "theirs"
    with stage(out, resume=True, overwrite=True) as staged:
        staged.commit()
    assert (out / "a").exists()


def test_a_linked_destination_is_followed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "alias").symlink_to(tmp_path / "disk")
    with stage(tmp_path / "alias" / "out") as staged:
        assert staged.partial == tmp_path / "disk" / "out.partial"
        (staged.path / "a").write_text("x")
        staged.commit()
    assert (tmp_path / "disk" / "out" / "a").exists()


def test_half_written_files_of_a_killed_run_are_gone_after_resume(out: Path) -> None:
    leave_unfinished(out)
    (out.parent / "out.partial" / "tree" / "b.safetensors.tmp").write_text("half")
    with stage(out, resume=True) as staged:
        assert [path.name for path in staged.path.iterdir()] == ["a"]


def test_a_full_disk_is_explained(out: Path) -> None:
    with pytest.raises(XmacError, match="No space left") as caught, stage(out) as staged:
        (staged.path / "a").write_text("x")
        with Path("/dev/full").open("w", buffering=1) as full:
            full.write("x\n")
    assert caught.value.hint is not None
    assert "--resume" in caught.value.hint


def test_destinations_that_would_harm_the_input_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "work" / "in"
    source.mkdir(parents=True)
    (source / "config.json").write_text("{}")
    (tmp_path / "alias").symlink_to(source)
    for destination, reason in (
        (source, "same directory"),
        (tmp_path / "alias", "same directory"),
        (source / "out", "inside the input"),
        (tmp_path / "alias" / "out", "inside the input"),
        (tmp_path / "work" / ".." / "work" / "in" / "out", "inside the input"),
        (tmp_path / "work", "inside the output"),
    ):
        for overwrite in (False, True):
            with pytest.raises(UsageError, match=reason):
                check_destination(source, destination, overwrite)
    check_destination(source, tmp_path / "work" / "in2", False)


def test_a_file_or_the_working_directory_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="not a directory"):
        check_destination(None, tmp_path / "file", True)
    (tmp_path / "project" / "sub").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "project" / "sub")
    for destination in (tmp_path, tmp_path / "project", Path("/")):
        with pytest.raises(UsageError, match=r"contains|not empty"):
            check_destination(None, destination, True)
    with pytest.raises(UsageError, match="contains"):
        check_destination(None, Path.home().parent, True)


def test_free_space_is_compared_with_the_need(tmp_path: Path) -> None:
    check_free_space(tmp_path / "not" / "yet", 1)
    with pytest.raises(XmacError, match=re.escape("GiB are needed")):
        check_free_space(tmp_path / "not" / "yet", 1 << 60)


def test_a_torn_journal_line_is_ignored_and_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.restart(JobHeader("k", None))
    journal.append({"file": "a"})
    with path.open("ab") as file:
        file.write(b'{"file": "b", "byt')
    assert [entry.get("file") for entry in journal.entries()] == [None, "a"]
    journal.append({"file": "c"})
    assert [entry.get("file") for entry in journal.entries()] == [None, "a", "c"]
    assert job_of(journal.entries()) == JobHeader("k", None)
    journal.close()


@pytest.mark.parametrize("tail", [b"garbage\n", b"[1]\n", b"\0\0\0\0\n", b"\xff\n", b"{}"])
def test_nothing_behind_a_damaged_line_is_believed(tail: bytes) -> None:
    good = b'{"a": 1}\n'
    assert intact_length(good + tail + good) == len(good)
    assert parse_lines(good + tail + good) == [{"a": 1}]


def test_shares_are_counted_from_one(out: Path) -> None:
    for shares in ((0, 2), (3, 2), (1, 0)):
        with pytest.raises(UsageError, match="does not exist"):
            StagedOutput(out, overwrite=False, resume=False, job_key="k", shares=shares)


def test_the_directory_mode_follows_the_umask(out: Path) -> None:
    previous = os.umask(0o027)
    try:
        with stage(out) as staged:
            (staged.path / "a").write_text("x")
            staged.commit()
    finally:
        os.umask(previous)
    assert out.stat().st_mode & 0o777 == 0o750
