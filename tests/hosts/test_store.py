# SPDX-License-Identifier: Apache-2.0
"""A piece is in a store whole or not at all, whatever the store or its writer does."""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import msgspec
import pytest

from kvtax.cli import main
from kvtax.hosts import store as module
from kvtax.hosts.errors import StoreError
from kvtax.hosts.results import unpack
from kvtax.hosts.store import Piece, Store, store_of_run
from kvtax.proc.ports import reserve
from tests.hosts.s3_server import BUCKET, S3Server

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="to mount needs root")


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3"), "127.0.0.1", reserve(1)[0].http)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        fsspec.config.set_conf_env(fsspec.config.conf)
        server.start()
        try:
            fsspec.filesystem("s3").mkdir(BUCKET)
            yield server
        finally:
            server.stop()
            fsspec.config.conf.pop("s3", None)


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return f"file://{tmp_path}/store"
    request.getfixturevalue("s3")
    return f"s3://{BUCKET}/{tmp_path.name}"


def files(folder: Path) -> dict[str, bytes]:
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def made(folder: Path, size: int = 100_000) -> Path:
    """A folder with something in it."""
    (folder / "r0" / "empty").mkdir(parents=True)
    (folder / "arm.json").write_text("{}")
    (folder / "r0" / "steps.jsonl").write_bytes(random.randbytes(size))
    return folder


def put(store: Store, folder: Path, name: str = "plain/r0", host: str = "10.0.0.1"):
    return store.put(name, folder, "what was asked", host)


def tars(url: str) -> list[str]:
    system, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    return [path for path in system.find(root) if path.endswith(".tar")]


@pytest.mark.slow
def test_what_one_host_puts_another_fetches(url: str, tmp_path: Path) -> None:
    result = made(tmp_path / "made", 20_000_000)
    put(Store(url), result)
    other = Store(url)
    ((name, piece),) = other.pieces().items()
    assert (name, piece.host) == ("plain/r0", "10.0.0.1")
    other.fetch(name, piece, tmp_path / "fetched")
    assert files(tmp_path / "fetched") == files(result)
    assert (tmp_path / "fetched" / "r0" / "empty").is_dir()


def test_a_store_that_nobody_wrote_to_is_empty(url: str) -> None:
    assert Store(url).pieces() == {}


def test_bytes_that_were_changed_are_refused(url: str, tmp_path: Path) -> None:
    store = Store(url)
    piece = put(store, made(tmp_path / "made"))
    system, _ = fsspec.core.url_to_fs(url)
    (path,) = tars(url)
    whole = system.cat_file(path)
    for changed in (whole[:-1], whole[:50_000] + b"x" + whole[50_001:], b""):
        system.pipe_file(path, changed)
        with pytest.raises(StoreError, match=r"plain/r0 is not what .* put there"):
            store.fetch("plain/r0", piece, tmp_path / "fetched")
        assert not (tmp_path / "fetched").exists()
    system.rm_file(path)
    with pytest.raises(StoreError, match="FileNotFoundError"):
        store.fetch("plain/r0", piece, tmp_path / "fetched")


def test_half_a_manifest_is_none(url: str, tmp_path: Path) -> None:
    store = Store(url)
    put(store, made(tmp_path / "made"))
    system, root = fsspec.core.url_to_fs(url)
    path = f"{root}/plain/r0{module.MANIFEST}"
    whole = system.cat_file(path)
    for size in range(0, len(whole) - 2, 20):
        system.pipe_file(path, whole[:size])
        assert store.pieces() == {}


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_a_whole_piece_or_none(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    result = made(tmp_path / "made", 10_000_000)
    seen = 0
    for number in itertools.count():
        # It was killed while it wrote, or this would be no test.
        if number >= 10 and seen > len(store.pieces()):
            break
        if (pid := os.fork()) == 0:
            put(store, result, f"r{number}")
            os._exit(0)
        time.sleep(random.random() * 0.5)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        seen += len(tars(store.url))
        for name, piece in store.pieces().items():
            if int(name[1:]) == number:
                store.fetch(name, piece, tmp_path / name)
                assert files(tmp_path / name) == files(result)


def test_hosts_that_put_the_same_piece_do_not_disturb_its_readers(
    url: str, tmp_path: Path
) -> None:
    results = [made(tmp_path / f"made{number}") for number in range(4)]
    whole = [files(result) for result in results]
    done = threading.Event()

    def write(result: Path) -> None:
        for _ in range(3):
            put(Store(url), result, host=result.name)

    def read() -> int:
        count = 0
        while not (done.is_set() and count):
            store = Store(url)
            for name, piece in store.pieces().items():
                into = tmp_path / f"fetched{count}"
                store.fetch(name, piece, into)
                assert files(into) == whole[int(piece.host[-1])]
                count += 1
        return count

    with ThreadPoolExecutor(5) as threads:
        reader = threads.submit(read)
        try:
            list(threads.map(write, results))
        finally:
            done.set()
        reader.result()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("begin", "end"),
    [(S3Server.refuse, S3Server.accept), (S3Server.hang, S3Server.go_on)],
)
def test_a_store_that_refuses_for_a_while_gets_the_piece_then(
    begin, end, s3: S3Server, tmp_path: Path
) -> None:
    store = Store(f"s3://{BUCKET}/{tmp_path.name}")
    result = made(tmp_path / "made")
    with ThreadPoolExecutor(1) as threads:
        begin(s3)
        try:
            putting = threads.submit(put, store, result)
            time.sleep(2)
            assert not putting.done()
        finally:
            end(s3)
        piece = putting.result()
    assert store.pieces() == {"plain/r0": piece}
    store.fetch("plain/r0", piece, tmp_path / "fetched")
    assert files(tmp_path / "fetched") == files(result)


@pytest.mark.slow
def test_a_store_that_refuses_on_is_given_up_and_has_nothing(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 3.0)
    store = Store(f"s3://{BUCKET}/{tmp_path.name}")
    s3.refuse()
    try:
        with pytest.raises(StoreError, match=r"refused for 3 s: .*try again"):
            put(store, made(tmp_path / "made"))
    finally:
        s3.accept()
    assert store.pieces() == {}
    assert tars(store.url) == []


@as_root
def test_a_full_disk_has_no_half_piece_and_takes_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 1.0)
    full = tmp_path / "full"
    full.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", full], check=True)
    try:
        store = Store(str(full / "store"))
        with pytest.raises(StoreError, match=r"refused for 1 s: .*No space left"):
            put(store, made(tmp_path / "big", 2_000_000))
        assert (store.pieces(), tars(store.url)) == ({}, [])
        piece = put(store, made(tmp_path / "small"), "r1")
        assert store.pieces() == {"r1": piece}
    finally:
        subprocess.run(["umount", full], check=True)


@pytest.mark.slow
def test_to_wait_for_a_bucket_that_is_not_there_would_not_help(s3: S3Server) -> None:
    began_s = time.monotonic()
    with pytest.raises(StoreError, match="cannot write to s3://nothing/run"):
        store_of_run("s3://nothing", "run", resume=False)
    assert time.monotonic() - began_s < module.PATIENCE_S / 2


def test_without_s3fs_it_is_said_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    known = sys.modules["fsspec.registry"]._registry
    monkeypatch.delitem(known, "s3", raising=False)
    with pytest.raises(StoreError, match="Install s3fs"):
        Store("s3://bucket/run")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://KEY:se/same@bucket/run", r"s3://\*\*\*@bucket/run"),
        ("ftp://user:sesame@host:21/run", r"ftp://\*\*\*@host:21/run"),
        ("abfs://c@acc/x?sas_token=sesame", r"abfs://\*\*\*@acc/x\?sas_token=\*\*\*"),
        ("gist://:sesame@123", r"gist://\*\*\*@123"),
    ],
)
def test_a_url_with_a_password_is_refused_and_not_printed(url: str, shown: str) -> None:
    with pytest.raises(StoreError, match=f"^{shown} has a password.*environment"):
        Store(url)


@pytest.mark.parametrize("url", ["memory://a@b/run", "memory://host:80/user@x"])
def test_a_url_without_a_password_is_none(url: str) -> None:
    assert Store(url).pieces() == {}


def test_a_url_that_nobody_knows_is_named() -> None:
    with pytest.raises(StoreError, match="gopher://x: Protocol not known"):
        Store("gopher://x")


@pytest.mark.parametrize("url", ["no-such-folder", "gopher://x"])
def test_a_url_at_which_no_store_is_is_bad_input(url: str, capsys) -> None:
    assert main(["store", "list", url]) == 2
    assert url in capsys.readouterr().err


def test_a_run_is_not_mixed_with_the_one_that_is_there(
    url: str, tmp_path: Path
) -> None:
    put(store_of_run(url, "mine", resume=False), made(tmp_path / "made"))
    with pytest.raises(StoreError, match="add --resume, or another --out"):
        store_of_run(url, "mine", resume=False)
    assert list(store_of_run(url, "mine", resume=True).pieces()) == ["plain/r0"]
    assert store_of_run(url, "other", resume=False).pieces() == {}


def test_a_host_sees_whether_it_is_the_same_store(url: str, tmp_path: Path) -> None:
    ours = store_of_run(url, "mine", resume=False)
    Store(ours.url).require_mark(ours.word)
    with pytest.raises(StoreError, match="FileNotFoundError"):
        Store(f"{tmp_path}/elsewhere").require_mark(ours.word)
    store_of_run(url, "mine", resume=False)
    with pytest.raises(StoreError, match="another command"):
        Store(ours.url).require_mark(ours.word)


def test_the_command_lists_and_fetches_what_is_there_by_now(
    url: str, tmp_path: Path, capsys
) -> None:
    result = made(tmp_path / "made")
    put(store_of_run(url, "run", resume=False), result)
    assert main(["store", "list", url]) == 0
    told = capsys.readouterr().out
    assert "10.0.0.1" in told and "run/plain/r0" in told and "1 pieces" in told
    into = tmp_path / "into"
    for _ in range(2):
        assert main(["store", "fetch", url, str(into)]) == 0
        assert files(into / "run" / "plain" / "r0") == files(result)


# Name, type, target of a link.
Member = tuple[str, bytes, str]
PLAIN, FOLDER = tarfile.REGTYPE, tarfile.DIRTYPE


def tar_of(*members: Member) -> bytes:
    """A tar of members of a name, a type and what they link to."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, kind, link in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, link
            member.size = 5 if kind == PLAIN else 0
            tar.addfile(member, io.BytesIO(b"mine\n"))
    return packed.getvalue()


def long_links(victim: Path) -> bytes:
    """A tar that leaves its folder in spite of extractall's filters (CVE-2025-4517)."""
    folder, path, members = "d" * 247, "", []
    for step in "abcdefghijklmnop":
        members.append((os.path.join(path, folder), FOLDER, ""))
        members.append((os.path.join(path, step), tarfile.SYMTYPE, folder))
        path = os.path.join(path, folder)
    link = "/".join("abcdefghijklmnop") + "/" + "l" * 254
    members.append((link, tarfile.SYMTYPE, "../" * 16))
    members.append(("escape", tarfile.SYMTYPE, f"{link}{'/..' * 12}{victim.parent}"))
    members.append(("flag", tarfile.LNKTYPE, f"escape/{victim.name}"))
    members.append(("flag", PLAIN, ""))
    return tar_of(*members)


HOSTILE_MEMBERS = [
    ("../outside", PLAIN, ""),
    ("a/../../outside", PLAIN, ""),
    ("/tmp/outside", PLAIN, ""),
    ("../outside", FOLDER, ""),
    ("link", tarfile.SYMTYPE, "../outside"),
    ("link", tarfile.SYMTYPE, "inside"),
    ("link", tarfile.LNKTYPE, "inside"),
    ("pipe", tarfile.FIFOTYPE, ""),
    ("null", tarfile.CHRTYPE, ""),
    ("disk", tarfile.BLKTYPE, ""),
    ("holes", tarfile.GNUTYPE_SPARSE, ""),
    ("numpy/__init__.py", PLAIN, ""),
    ("fast.cpython-311-x86_64-linux-gnu.so", PLAIN, ""),
    ("startup.pth", PLAIN, ""),
    ("\x1b[2Jlog", PLAIN, ""),
]


def put_tar(store: Store, name: str, packed: bytes, file: str = "x.tar") -> None:
    """Write a tar and its manifest as somebody else who may write there would."""
    digest = hashlib.sha256(packed).hexdigest()
    piece = Piece("work", "10.0.0.9", "2026-01-01", file, len(packed), digest)
    for path, content in (
        (f"{Path(name).parent}/x.tar", packed),
        (f"{name}{module.MANIFEST}", msgspec.json.encode(piece)),
    ):
        store._write_whole(f"{store._root}/{path}", content)


@pytest.mark.parametrize("member", HOSTILE_MEMBERS, ids=lambda member: member[0])
def test_a_hostile_member_is_named_and_nothing_of_its_tar_is_unpacked(
    member: Member, tmp_path: Path
) -> None:
    packed = tar_of(("good", PLAIN, ""), member)
    store = Store(str(tmp_path / "store"))
    put_tar(store, "plain/r0", packed)
    into = tmp_path / "into"
    into.mkdir()
    named = re.escape(repr(member[0]))
    with pytest.raises(StoreError, match=rf"plain/r0: member {named} .*delete it"):
        store.fetch("plain/r0", store.pieces()["plain/r0"], into / "r0")
    with pytest.raises(StoreError, match=rf"r0 of 10\.0\.0\.9: member {named}"):
        unpack(packed, into, "r0 of 10.0.0.9")
    assert files(tmp_path).keys() == {"store/plain/x.tar", "store/plain/r0.piece.json"}


def test_links_of_links_overwrite_nothing_on_any_python(tmp_path: Path) -> None:
    victim = tmp_path / "authorized_keys"
    victim.write_text("theirs\n")
    with pytest.raises(StoreError, match="neither a plain file nor a folder"):
        unpack(long_links(victim), tmp_path, "r0")
    assert victim.read_text() == "theirs\n"


@pytest.mark.parametrize(
    "packed",
    [
        b"no tar at all",
        gzip.compress(tar_of(("file", PLAIN, ""))),
        tar_of(("file", PLAIN, ""), ("file", PLAIN, "")),
        tar_of(("file", PLAIN, ""), ("file/below", PLAIN, "")),
        tar_of(("n" * 300, PLAIN, "")),
    ],
)
def test_a_tar_that_no_host_of_ours_packed_is_refused(
    packed: bytes, tmp_path: Path
) -> None:
    with pytest.raises(StoreError, match=r"r0: its tar cannot be unpacked"):
        unpack(packed, tmp_path, "r0")


@pytest.mark.parametrize(
    "name", ["../../escaped/package", "plain/../../escaped/r0", "/absolute/r0", ""]
)
def test_keys_that_leave_the_folder_are_refused(
    name: str, s3: S3Server, tmp_path: Path, capsys
) -> None:
    url = f"s3://{BUCKET}/{tmp_path.name}-{len(name)}"
    put_tar(Store(url), name, tar_of(("file", PLAIN, "")))
    into = tmp_path / "a" / "b" / "into"
    assert main(["store", "fetch", url, str(into)]) == 3
    told = capsys.readouterr().err
    assert f"'{name}{module.MANIFEST}' is refused" in told and "delete it" in told
    assert files(tmp_path) == {}


@pytest.mark.parametrize("file", ["../x.tar", "/etc/x.tar", "..", ""])
def test_a_manifest_names_a_tar_beside_it(file: str, tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    put_tar(store, "plain/r0", tar_of(("file", PLAIN, "")), file)
    with pytest.raises(StoreError, match="not a file beside it"):
        store.pieces()
