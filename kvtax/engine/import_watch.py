# SPDX-License-Identifier: Apache-2.0
"""Proof, per process, that those below a command import vLLM with its patches.

A process that imports a patched module reports it to a socket that the overlay names,
and the kernel adds the process id. The socket is no file, so nobody can write one. A
process without the overlay reports nothing, but opens the package's own file or its
bytecode, which a patched process does not. Then inotify wakes us, and the culprit is a
Python below the command that does not get the overlay.
"""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import select
import socket
import struct
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from kvtax.patcher import import_finder

_PYTHON = re.compile(r"python(3(\.\d+)?)?t?$")
_IN_OPEN, _IN_NONBLOCK = 0x20, os.O_NONBLOCK
_EVENT = struct.Struct("iIII")
_CREDENTIALS = struct.Struct("3i")
_libc = ctypes.CDLL(None, use_errno=True)
NOT_PATCHED = 3
# File in the overlay that says that a process has imported vLLM without the patches.
UNPATCHED = "unpatched"
# Of marks, whatever the umask.
MARK_MODE = 0o644


class ImportWatch:
    """Watch of the `files` that the overlay in `folder` replaces.

    With `is_strict` a process without the patches ends the command.
    """

    def __init__(self, folder: Path, files: Iterable[Path], is_strict: bool) -> None:
        self._folder = folder
        modules = (folder / import_finder.MODULES).read_text().splitlines()
        self._modules = {line.partition(" ")[0] for line in modules}
        self._is_strict = is_strict
        self._patched: set[int] = set()
        self._reported: set[int] = set()
        self._stems: dict[int, set[str]] = {}
        self._reports = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._reports.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        # No file: the command may become another user, and paths of sockets are short.
        name = f"kvtax-{secrets.token_hex(16)}"
        self._reports.bind(f"\0{name}")
        named = folder / import_finder.REPORTS
        named.touch(MARK_MODE)
        named.write_text(name)
        named.chmod(MARK_MODE)
        self._opens = _libc.inotify_init1(os.O_CLOEXEC | _IN_NONBLOCK)
        for file in files:
            self._add(file, "")
            self._add(file.parent / "__pycache__", file.stem)
        self._all = select.epoll()
        self._all.register(self._reports, select.EPOLLIN)
        if self._opens >= 0:
            self._all.register(self._opens, select.EPOLLIN)

    def _add(self, path: Path, stem: str) -> None:
        watch = _libc.inotify_add_watch(self._opens, os.fsencode(path), _IN_OPEN)
        if watch >= 0:
            self._stems.setdefault(watch, set()).add(stem)

    def fileno(self) -> int:
        """Return the descriptor that is readable when there is something to check."""
        return self._all.fileno()

    def check(self, pids: Sequence[int]) -> int | None:
        """Mark reported modules; return the exit code if an unpatched process ends us.

        `pids` are the processes below the command.
        """
        is_opened = self._is_opened()
        self._take_reports()
        culprits = [pid for pid in pids if self._is_culprit(pid)] if is_opened else []
        for pid in culprits:
            self._reported.add(pid)
            self._mark(UNPATCHED)
            ending = "the command is ended" if self._is_strict else "it is not recorded"
            print(
                f"kvtax: process {pid} ({_command(pid)}) imports vLLM without the "
                f"patches, as it does not get PYTHONPATH; {ending}",
                file=sys.stderr,
                flush=True,
            )
        return NOT_PATCHED if culprits and self._is_strict else None

    def _take_reports(self) -> None:
        with suppress(BlockingIOError):
            while True:
                name, ancillary, _, _ = self._reports.recvmsg(
                    4096, socket.CMSG_SPACE(_CREDENTIALS.size), socket.MSG_DONTWAIT
                )
                self._patched |= {
                    _CREDENTIALS.unpack(data)[0] for *_, data in ancillary
                }
                # Any user can send: only names of the overlay become files.
                if (module := name.decode(errors="replace")) in self._modules:
                    self._mark(import_finder.IMPORTED, module)

    def _mark(self, *names: str) -> None:
        # Where somebody removed the overlay, its run goes on and says so at the end.
        with suppress(FileNotFoundError):
            self._folder.joinpath(*names).touch(MARK_MODE)

    def _is_opened(self) -> bool:
        """Return whether a process has opened a file that the patches replace."""
        try:
            events = os.read(self._opens, 1 << 16)
        except OSError:
            return False
        at, is_opened = 0, False
        while at < len(events):
            watch, _, _, length = _EVENT.unpack_from(events, at)
            at += _EVENT.size
            name = events[at : at + length].rstrip(b"\0").decode(errors="replace")
            at += length
            is_opened |= name.partition(".")[0] in self._stems.get(watch, set())
        return is_opened

    def _is_culprit(self, pid: int) -> bool:
        if pid in self._patched | self._reported:
            return False
        try:
            place = Path(f"/proc/{pid}")
            if not _PYTHON.match((place / "exe").readlink().name):
                return False
            environment = (place / "environ").read_bytes()
            words = (place / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is another user's
            return False
        if environment and not environment.strip(b"\0"):
            return False  # the process wrote its title over it
        path = re.search(rb"(?:^|\0)PYTHONPATH=([^\0]*)", environment)
        folders = path[1].split(os.pathsep.encode()) if path else []
        return os.fsencode(self._folder) not in folders or _is_isolated(words[1:])


def _is_isolated(words: Sequence[bytes]) -> bool:
    """Return whether the first arguments of a Python make it read no PYTHONPATH."""
    for word in words:
        if not word.startswith(b"-") or word[:2] in (b"-c", b"-m", b"--"):
            return False
        if set(word) & set(b"IES") and word[:2] not in (b"-W", b"-X"):
            return True
    return False


def _command(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (OSError, UnicodeDecodeError):
        return "Python"
    return "".join(sign if sign.isprintable() else "?" for sign in text.strip()[:160])
