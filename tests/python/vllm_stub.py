# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for what kvd.vllm's connectors import from vLLM, in an interpreter without it: any
name of any module of vLLM's is an empty class."""
import enum
import importlib
import importlib.abc
import importlib.machinery
import logging
import sys
import types

OURS = ("kvd.vllm.connector", "kvd.vllm.store", "kvd.vllm.stats", "kvd.vllm.worker")
Status = enum.IntEnum("Status", "WAITING FINISHED_STOPPED FINISHED_LENGTH_CAPPED FINISHED_ABORTED")
GIVEN = {"init_logger": logging.getLogger, "RequestStatus": Status}


class Module(types.ModuleType):
    __path__, __version__ = [], "0.32.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = GIVEN.get(name) or type(name, (), {
            "__init__": lambda self, *args, **kw: None, "register_connector": lambda *args: None,
            "SCHEDULER": 0, "WORKER": 1, "HOST": 2})
        setattr(self, name, made)
        return made


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) \
            if name.split(".")[0] == "vllm" else None

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module):
        pass


class Vllm:
    """with Vllm() as v: v.load("kvd.vllm.connector")"""

    def __enter__(self):
        self._finder, self._before = Finder(), self._ours()
        sys.meta_path.insert(0, self._finder)
        return self

    @staticmethod
    def _ours():
        """Taken out of sys.modules."""
        names = [n for n in sys.modules if n.split(".")[0] == "vllm" or n in OURS]
        return {name: sys.modules.pop(name) for name in names}

    @staticmethod
    def load(name):
        return importlib.import_module(name)

    def __exit__(self, *exc):
        sys.meta_path.remove(self._finder)
        self._ours()
        sys.modules.update(self._before)
