"""Long texts cut down to what is worth sending."""

TEXT_LIMIT = 32 << 10
"""Characters of a message or traceback that are passed on; the rank's log has all of it."""
SHORT_LIMIT = 2 << 10
"""The same of what only names something."""
MARK_LENGTH = 64
"""Room for what tells how much is left out."""


def excerpt(text: str, limit: int = TEXT_LIMIT) -> str:
    """At most `limit` characters: the head and the tail of a longer text. What UTF-8 cannot say becomes a question mark."""
    if len(text) > limit:
        half = (limit - MARK_LENGTH) // 2
        text = f"{text[:half]}\n [... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
    return text.encode(errors="replace").decode()
