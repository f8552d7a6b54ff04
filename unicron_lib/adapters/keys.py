"""Which keys an object store takes: those that mean the same on S3 and in a directory."""

import re

KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=-]*(/[A-Za-z0-9_][A-Za-z0-9_.=-]*)*")
LONGEST_KEY = 900
"""S3 takes 1,024 bytes, with the store's prefix; file systems 255 a segment."""


def check_key(key: str) -> str:
    """Return `key`; raise ValueError when it could leave the store or would be read differently by another store."""
    if len(key) > LONGEST_KEY or any(len(part) > 200 for part in key.split("/")) or not KEY.fullmatch(key):
        raise ValueError(
            f"{key[:80]!r} is no key: segments of letters, digits and _ . = - that do not begin with a dot, joined by '/'"
        )
    return key


def check_prefix(prefix: str) -> str:
    """Return `prefix`, the beginning of keys (may be empty or end within a segment); raise ValueError as `check_key` does."""
    if prefix:
        check_key(prefix.removesuffix("/"))
    return prefix
