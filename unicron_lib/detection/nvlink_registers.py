"""The registers in the text of Xid 74: not each bit is a broken NVLink.

Which bit says what is a fact of NVIDIA's Xid catalog (its workflow for NVLink errors, for Hopper).
"""

import re

from unicron_lib.detection.xid_table import Role

_REGISTERS = re.compile(r"\((0x[0-9a-fA-F]{1,8}(?:,\s*0x[0-9a-fA-F]{1,8}){4,6})\)")
_HARMLESS = {0: (0, 23, 30), 4: (20, 23, 26, 29)}
"""By register, counted from 0: may be ignored, or a threshold of corrected errors."""
_SYMPATHETIC = {0: (1, 20), 3: (16, 17)}
"""By register: follows from another error."""


def _mask(bits: tuple[int, ...]) -> int:
    return sum(1 << bit for bit in bits)


def role_of_nvlink_error(text: str) -> Role:
    """A cause, unless all bits that are set are known to be harmless or another error's."""
    found = _REGISTERS.search(text)
    registers = [int(word, 16) for word in found[1].split(",")] if found else []
    if not any(registers):
        return Role.CAUSE
    grave = [word & ~_mask(_HARMLESS.get(place, ())) for place, word in enumerate(registers)]
    if not any(grave):
        return Role.NOTICE
    own = any(word & ~_mask(_SYMPATHETIC.get(place, ())) for place, word in enumerate(grave))
    return Role.CAUSE if own else Role.SYMPTOM
