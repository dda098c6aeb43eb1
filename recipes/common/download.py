"""Fetches a corpus: goes on where a download was interrupted, and lets nothing pass whose checksum is not what it should be.

    FOLDER/NAME        a complete file, checked each time that it is about to be used
    FOLDER/NAME.part   what has come so far
    FOLDER/SHA256SUMS  the checksums of files for which none is published, as they came first (sha256sum -c reads it)

A file that was brought here by other means counts as downloaded. Nothing is ever deleted: a wrong file is named, with what to
do about it.
"""

import dataclasses
import hashlib
import http.client
import re
import shutil
import tarfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path

from common.errors import RecipeError

CHUNK_BYTES = 1 << 20
TRIES, TIMEOUT_S = 5, 60.0  # connections in a row that bring nothing, and the silence after which one counts as dead
PAUSE_S = 2.0  # before the next connection, doubled each time
SPARE_MIB = 100

Show = Callable[[float, str], None]


@dataclasses.dataclass(frozen=True)
class Archive:
    """A tar archive of a corpus.

    ``size`` (bytes) and ``sha256`` are what somebody else has published; None where nobody has.
    """

    url: str
    size: int | None = None
    sha256: str | None = None

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]


def fetch(archive: Archive, folder: Path, say=print, show: Show = lambda fraction, note: None) -> Path:
    """The archive's path in ``folder``, downloaded if it is not there, and checked.

    Raises:
        RecipeError: the download stopped, the disk is full, or the file is not what it should be.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, part = folder / archive.name, folder / f"{archive.name}.part"
    if not path.exists():
        say(f"downloading {archive.url}" + (f" from {part.stat().st_size >> 20} MiB on" if part.exists() else ""))
        _download(archive, part, show)
        _check(archive, part, folder, show)
        part.rename(path)
    else:
        _check(archive, path, folder, show)
    return path


# ---- The transfer ----


def _download(archive: Archive, part: Path, show: Show) -> None:
    failures = 0
    while True:
        had = part.stat().st_size if part.exists() else 0
        if archive.size is not None and had >= archive.size:
            return
        try:
            _receive(archive, part, had, show)
            return
        except urllib.error.HTTPError as error:
            if error.code == 416 and _total(error.headers) == had:  # nothing is left to send
                return
            if error.code < 500:
                raise RecipeError(
                    f"{archive.url}: the server answers {error.code} {error.reason}; {_elsewhere(archive, part)}"
                ) from error
            reason = f"the server answers {error.code} {error.reason}"
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
            reason = str(getattr(error, "reason", error))
        now = part.stat().st_size if part.exists() else 0
        failures = 1 if now > had else failures + 1
        if failures == TRIES:
            raise RecipeError(
                f"the download of {archive.url} stopped at {now >> 20} MiB ({reason}); run the same command again, it goes on from "
                f"there; or {_elsewhere(archive, part)}"
            )
        time.sleep(PAUSE_S * 2 ** (failures - 1))


def _receive(archive: Archive, part: Path, had: int, show: Show) -> None:
    """One connection: appends to ``part`` until the file ends."""
    headers = {"User-Agent": "ls_plugin-recipes"} | ({"Range": f"bytes={had}-"} if had else {})
    with urllib.request.urlopen(urllib.request.Request(archive.url, headers=headers), timeout=TIMEOUT_S) as response:
        if response.status != 206:  # the whole file: this server cannot go on in the middle
            had = 0
        total = _total(response.headers) if response.status == 206 else int(response.headers.get("Content-Length") or 0)
        need_mib = (max(total, had) - had >> 20) + SPARE_MIB
        check_disk(part.parent, need_mib, archive.name)
        began, start = time.monotonic(), had
        with part.open("ab" if had else "wb") as file:
            while chunk := response.read(CHUNK_BYTES):
                file.write(chunk)
                had += len(chunk)
                rate = (had - start) / 2**20 / max(time.monotonic() - began, 1e-3)
                of = f" of {total >> 20:,}" if total else ""
                show(had / total if total else 0.0, f"{had >> 20:,}{of} MiB, {rate:.1f} MiB/s")
    if total and had < total:
        raise http.client.HTTPException(f"the connection ended {total - had:,} bytes early")


def _total(headers) -> int | None:
    """Of ``Content-Range: bytes 5-9/10`` or ``bytes */10``."""
    match = re.fullmatch(r"bytes .*/(\d+)", headers.get("Content-Range") or "")
    return int(match[1]) if match else None


def _elsewhere(archive: Archive, part: Path) -> str:
    return f"bring the file here by other means, as {part.with_suffix('')}"


# ---- The check ----


def _check(archive: Archive, path: Path, folder: Path, show: Show) -> None:
    size = path.stat().st_size
    if archive.size is not None and size != archive.size:
        raise RecipeError(f"{path} must have {archive.size:,} bytes, got {size:,}; {_remedy(path)}")
    show(1.0, "checking")
    found, recorded = digest(path), _recorded(folder).get(archive.name)
    for expected, source in ((archive.sha256, "published"), (recorded, f"recorded in {folder / 'SHA256SUMS'}")):
        if expected and found != expected:
            raise RecipeError(f"{path}: its SHA-256 must be the {source} one, {expected}, got {found}; {_remedy(path)}")
    if not (archive.sha256 or recorded):
        _check_whole(path)
        with (folder / "SHA256SUMS").open("a", encoding="utf-8") as sums:
            sums.write(f"{found}  {archive.name}\n")


def _check_whole(path: Path) -> None:
    """Reads an archive to its end, which checks gzip's own sums."""
    try:
        with tarfile.open(path) as archive:
            for _ in archive:
                pass
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise RecipeError(f"{path} is no whole tar archive ({error}); {_remedy(path)}") from error


def _remedy(path: Path) -> str:
    return f"nothing was deleted: move {path.name} away to fetch it again"


def _recorded(folder: Path) -> dict[str, str]:
    sums = folder / "SHA256SUMS"
    lines = sums.read_text(encoding="utf-8").splitlines() if sums.exists() else []
    return {name: hexadecimal for hexadecimal, name in (line.split(maxsplit=1) for line in lines)}


def digest(path: Path) -> str:
    """SHA-256, in hexadecimal."""
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            sha.update(chunk)
    return sha.hexdigest()


def check_disk(folder: Path, need_mib: int, what: str) -> None:
    """Raises RecipeError unless so many MiB are free where ``folder`` lies or will lie."""
    folder = next(path for path in (folder, *folder.parents) if path.exists())
    free_mib = shutil.disk_usage(folder).free >> 20
    if free_mib < need_mib:
        raise RecipeError(
            f"{what}: {need_mib:,} MiB of free disk are needed at {folder}, got {free_mib:,} MiB; free some, or give --out DIR on another disk"
        )
