"""The standard-library corpus: real text, whole files on one side of the split, the same every time."""

from __future__ import annotations

import hashlib
import json
import shutil
import sysconfig
import unicodedata
from pathlib import Path

import pytest

from xmac_cli.cli.errors import InputError, UsageError
from xmac_cli.data.documents import read_documents
from xmac_cli.data.stdlib_corpus import (
    DOMAINS,
    OPTIONAL_DOMAINS,
    SIZES,
    Corpus,
    cut,
    load_stdlib_corpus,
    write_corpus_files,
)

LIBRARY = Path(sysconfig.get_paths()["stdlib"])


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_stdlib_corpus("tiny")


def test_every_required_domain_has_training_and_heldout_text(corpus: Corpus) -> None:
    required = [domain for domain in DOMAINS if domain not in OPTIONAL_DOMAINS]
    assert set(required) <= set(corpus.domains)
    for domain in corpus.domains:
        assert len(corpus.train[domain]) >= 2
        assert len(corpus.heldout[domain]) >= 2


def test_no_file_is_on_both_sides(corpus: Corpus) -> None:
    sides: dict[str, set[str]] = {}
    for source in corpus.sources:
        sides.setdefault(source.name, set()).add(source.split)
    assert all(len(split) == 1 for split in sides.values())


def test_code_and_its_index_never_straddle_the_split() -> None:
    whole = load_stdlib_corpus("demo")
    split = {source.name: source.split for source in whole.sources if source.domain == "code"}
    for source in whole.sources:
        if source.domain == "json" and source.name in split:
            assert source.split == split[source.name]


def test_listed_hashes_are_those_of_the_files(corpus: Corpus) -> None:
    checked = 0
    for source in corpus.sources:
        if source.domain in ("code", "tables", "changelog"):
            data = (LIBRARY / source.name).read_text(encoding="utf-8", errors="replace").encode()
            assert source.sha256 == hashlib.sha256(data).hexdigest()
            assert source.bytes == len(data)
            checked += 1
    assert checked > 10


def test_heldout_text_is_found_in_its_file_and_not_in_training_text(corpus: Corpus) -> None:
    files = [s.name for s in corpus.sources if s.domain == "code" and s.split == "heldout"]
    heldout = "".join((LIBRARY / name).read_text(encoding="utf-8", errors="replace") for name in files)
    training = "".join(corpus.train["code"])
    for document in corpus.heldout["code"]:
        assert document in heldout
        assert document not in training


def test_character_rows_say_what_unicodedata_says(corpus: Corpus) -> None:
    lines = [line for document in corpus.train["names"] for line in document.splitlines()]
    assert len(lines) > 500
    for line in lines[:500]:
        code, name, category, combining, bidirectional, _ = line.split(";", 5)
        character = chr(int(code, 16))
        assert unicodedata.lookup(name) == character
        assert (unicodedata.category(character), str(unicodedata.combining(character))) == (category, combining)
        assert unicodedata.bidirectional(character) == bidirectional


def test_json_lines_parse_and_point_at_the_definition(corpus: Corpus) -> None:
    records = [json.loads(line) for document in corpus.train["json"] for line in document.splitlines()]
    sources = {source.name for source in corpus.sources if source.domain == "json"}
    checked = 0
    for record in records[:200]:
        base = record["module"].replace(".", "/")
        name = next(n for n in (f"{base}.py", f"{base}/__init__.py") if n in sources)
        line = (LIBRARY / name).read_text(encoding="utf-8", errors="replace").splitlines()[record["line"] - 1]
        assert record["name"].split(".")[-1] in line
        checked += 1
    assert checked == 200


def test_the_same_installation_gives_the_same_corpus(corpus: Corpus) -> None:
    again = load_stdlib_corpus("tiny")
    assert again == corpus
    assert again.fingerprint == corpus.fingerprint
    assert load_stdlib_corpus(SIZES["tiny"]).fingerprint == corpus.fingerprint


def test_the_fingerprint_depends_on_every_document(corpus: Corpus) -> None:
    changed = dict(corpus.heldout)
    changed["docs"] = (*changed["docs"][:-1], changed["docs"][-1] + ".")
    other = Corpus(corpus.python, corpus.unicode, corpus.train, changed, corpus.sources, corpus.absent)
    assert other.fingerprint != corpus.fingerprint


def test_an_installation_without_news_files_only_lacks_that_domain(tmp_path: Path, corpus: Corpus) -> None:
    for name in ("encodings", "pydoc_data", "email", "json", "logging"):
        shutil.copytree(LIBRARY / name, tmp_path / name, ignore=shutil.ignore_patterns("*.rst", "__pycache__"))
    bare = load_stdlib_corpus("tiny", library=tmp_path)
    assert bare.absent == ("changelog",)
    assert bare.domains == tuple(domain for domain in DOMAINS if domain != "changelog")


def test_an_installation_without_sources_is_refused_with_the_missing_domains(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"code, docs, json, tables"):
        load_stdlib_corpus("tiny", library=tmp_path)


def test_an_unknown_size_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="huge"):
        load_stdlib_corpus("huge")


def test_cutting_loses_nothing_and_respects_the_limit() -> None:
    text = "".join(f"line {i} " + "é" * (i % 40) + "\n" for i in range(300))
    pieces = list(cut(text, 256))
    assert "".join(pieces) == text
    assert all(len(piece.encode()) <= 256 for piece in pieces)
    assert list(cut("x" * 999, 10)) == ["x" * 999]


def test_written_files_read_back_as_the_documents(tmp_path: Path, corpus: Corpus) -> None:
    for domain, path in write_corpus_files(corpus.heldout, tmp_path / "heldout").items():
        documents = read_documents(path)
        assert documents.name == domain
        assert documents.texts == corpus.heldout[domain]
