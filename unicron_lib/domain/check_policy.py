"""Which idle nodes are checked although nobody asked."""

from typing import Literal

CheckPolicy = Literal["never", "rejoined", "idle"]
"""`rejoined`: a node that failed and is back; `idle`: those, and every idle node once a day."""
