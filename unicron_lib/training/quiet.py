"""Imports torch with the warnings of its C++ part off, unless the user wants them.

A rank whose peers are lost would log a screenful of C++ frames for each connection. torch looks at the variable once, when it
is imported; nobody inherits it.
"""

import os

LEVEL = "TORCH_CPP_LOG_LEVEL"
_is_ours = LEVEL not in os.environ
os.environ.setdefault(LEVEL, "ERROR")

import torch  # noqa: E402, F401

if _is_ours:
    del os.environ[LEVEL]
