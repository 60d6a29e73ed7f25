"""API keys: who may ask, and whose KV its requests share.

A file with one key a line, as a secret is mounted; `#` begins a comment. The word after a key names its tenant: keys
of one tenant share KV. A key without one is a tenant of its own, named by a digest, so that the key itself is in no
name, log or metric. The file is read again when it has changed; one that cannot be read any more changes nothing.
"""

import hashlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0


class KeyFileError(Exception):
    """The file cannot be used; the message names it and says why."""


class ApiKeys:
    """The keys of one file. Raises KeyFileError when it cannot be used to begin with."""

    def __init__(self, path: Path, now: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._now = now
        self._read_at = self._modified()
        self._looked_s = now()
        self._tenants = read_keys(path)

    def tenant(self, authorization: str | None) -> str | None:
        """The tenant of an `Authorization: Bearer KEY` header; None for anything else."""
        self._follow()
        scheme, _, key = (authorization or "").partition(" ")
        return self._tenants.get(_digest(key.strip())) if scheme.lower() == "bearer" else None

    def _follow(self) -> None:
        if self._now() - self._looked_s < _LOOK_EVERY_S:
            return
        self._looked_s = self._now()
        try:
            modified = self._modified()
            if modified != self._read_at:
                self._tenants, self._read_at = read_keys(self._path), modified
        except KeyFileError as error:
            logger.warning("the keys stay as they were: %s", error)

    def _modified(self) -> int:
        try:
            return self._path.stat().st_mtime_ns
        except OSError as error:
            raise KeyFileError(f"API keys {self._path}: {error.strerror}") from error


def read_keys(path: Path) -> dict[bytes, str]:
    """Tenant by digest of the key. Looking up a digest tells nothing of a key by the time it takes.

    Raises KeyFileError, which names the line but never a key.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFileError(f"API keys {path}: {error}") from error
    tenants: dict[bytes, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) > 2:
            raise KeyFileError(f"API keys {path}, line {number}: a key and a tenant, not {len(words)} words")
        digest = _digest(words[0])
        if digest in tenants:
            raise KeyFileError(f"API keys {path}, line {number}: the key is there already")
        tenants[digest] = words[1] if len(words) > 1 else f"key-{digest.hex()[:16]}"
    if not tenants:
        raise KeyFileError(f"API keys {path}: there is no key in it, so nobody could ask")
    return tenants


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
