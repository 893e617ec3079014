# SPDX-License-Identifier: Apache-2.0
"""A package `nixl` that uses kvd. It is not on the path by default, so it never shadows a real
NIXL by accident:

    PYTHONPATH=$(python -m kvd.nixl path) vllm serve …   # for one process
    python -m kvd.nixl install                           # for this environment
"""
import os


def path():
    """The folder to put in front of sys.path."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "path")
