"""The shared secret of agents, controller and its clients."""

import hmac
from pathlib import Path

from unicron_lib.errors import UserError


def read_token(path: Path) -> str:
    """The token in the file; raises UserError if there is none."""
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UserError(f"cannot read the token file {path}: {reason}; name the file that the controller uses") from None
    if not token or not token.isascii() or any(character.isspace() for character in token):
        raise UserError(f"the token file {path} must hold one word of ASCII characters; write a random one into it")
    return token


def bearer(token: str) -> dict[str, str]:
    """The header that carries the token."""
    return {"Authorization": f"Bearer {token}"}


def is_admitted(header: str | None, token: str) -> bool:
    """Whether an Authorization header carries the token, found out in a time that tells nothing about it."""
    return hmac.compare_digest((header or "").encode("latin-1", "replace"), f"Bearer {token}".encode())
