"""Which nodes are checked although nobody asked, and when."""

from typing import Literal

CheckWhen = Literal["rejoined", "launch", "idle"]
"""`rejoined`: a node that failed and is back; `launch`: nodes without ranks, before a job starts for the first time; `idle`:
those that are back, and every idle node once a day."""
NEVER = "never"
DEFAULT_CHECKS: frozenset[CheckWhen] = frozenset({"rejoined"})
LAUNCH_CHECK_S = 180.0
"""So long a first start waits for its check at most."""
