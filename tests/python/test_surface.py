# SPDX-License-Identifier: Apache-2.0
"""docs/engines/nixl.md against the package and the tests; the type stubs against the modules."""
import ast
import copy
import glob
import importlib
import inspect
import os
import pickle
import re
import subprocess
import sys

import pytest

import kvd
from conftest import ROOT

HERE = os.path.dirname(os.path.abspath(__file__))


def rows():
    """(names, mark, state, tests) of each row."""
    with open(os.path.join(ROOT, "docs", "engines", "nixl.md")) as text:
        for line in text:
            cells = [c.strip() for c in line.strip().strip("|").split("|")]
            if line.startswith("| `") and len(cells) == 4:
                yield (re.findall("`([^`]+)`", cells[0]), cells[1], cells[2],
                       re.findall("`([^`]+)`", cells[3]))


def known_tests():
    found = set()
    for path in glob.glob(os.path.join(HERE, "test_*.py")):
        with open(path) as text:
            found |= {node.name for node in ast.parse(text.read()).body
                      if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
    return found


def test_rows_are_green_or_have_a_reason():
    known = known_tests()
    assert len(list(rows())) > 40
    for names, mark, state, shown in rows():
        assert mark in ("must", "should", "never"), names
        assert not set(shown) - known, "%s: no such test: %s" % (names, set(shown) - known)
        if mark != "never":
            assert state.startswith("green") and shown, names


def test_every_public_name_has_a_row():
    import nixl._api as api
    import nixl._bindings as bindings
    told = {name for names, _, _, _ in rows() for name in names}
    methods = {n for n, _ in inspect.getmembers(api.nixl_agent, inspect.isfunction)
               if not n.startswith("_")}
    classes = {n for n, c in vars(api).items() if inspect.isclass(c)
               and c.__module__ == api.__name__ and not n.startswith("_")}
    lower = {n for n in bindings.__all__ if re.match("nixl[A-Z]", n)
             and not n.endswith("Error")}
    assert methods | classes | lower <= told
    assert not {n for n in told if re.fullmatch("[a-z_]+", n) and n not in methods | {
        "nixl", "nixl_ep", "nixl_agent", "nixl_agent_config", "nixl_xfer_handle",
        "nixl_prepped_dlist_handle", "nixl_backend_handle", "nixl_thread_sync_t"}}


def test_logging_uses_nixls_logger():
    """To stdout; the level is the environment's."""
    import kvd.nixl
    text = ("from nixl.logging import LOGGING_CONFIG, get_logger, setup_logging\n"
            "setup_logging()\nlog = get_logger('mine')\n"
            "log.debug('a debug'); log.info('an info'); log.error('an error')\n"
            "import logging; print(logging.raiseExceptions, LOGGING_CONFIG['version'])\n")
    for level, wanted in (("", ["an info", "an error"]), ("ERROR", ["an error"]),
                          ("TRACE", ["a debug", "an info", "an error"])):
        env = dict(os.environ, PYTHONPATH=kvd.nixl.path(), NIXL_LOG_LEVEL=level,
                   NIXL_DEBUG_LOGGING="yes" if level else "no")
        done = subprocess.run([sys.executable, "-c", text], env=env, capture_output=True,
                              text=True, check=True)
        lines = done.stdout.splitlines()
        said = [line.rsplit(" ", 2)[-2] + " " + line.rsplit(" ", 1)[-1]
                for line in lines[:-1] if "NIXL" in line and "mine" not in line
                and "Log level" not in line]
        assert [w for w in ("a debug", "an info", "an error") if w in said] == wanted, lines
        assert lines[-1] == "%s 1" % bool(level) and done.stderr == ""


# ---- type stubs --------------------------------------------------------------------------

STUBS = ["kvd", "kvd.__main__", "kvd._kvd", "kvd.aio", "kvd.attend", "kvd.client", "kvd.cost",
         "kvd.cuda", "kvd.daemon", "kvd.engine", "kvd.errors", "kvd.layout", "kvd.math", "kvd.memory", "kvd.nixl",
         "kvd.records",
         "kvd.place", "kvd.rooms", "kvd.route", "kvd.router", "kvd.router.__main__", "kvd.router.pick",
         "kvd.router.policy", "kvd.router.scale",
         "kvd.sglang", "kvd.sglang.pools", "kvd.sglang.slots",
         "kvd.timeline", "kvd.vllm", "kvd.vllm.bootstrap", "kvd.vllm.params",
         "kvd.vllm.pools", "nixl", "nixl._api", "nixl._bindings", "nixl._utils",
         "nixl.logging"]


def declared(body):
    """{name: node} of a stub's or a class's body."""
    out = {}
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            out.setdefault(node.name, node)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            out[node.target.id] = node
        elif isinstance(node, ast.Assign):
            out.update((t.id, node) for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.ImportFrom):
            out.update((a.asname or a.name, node) for a in node.names
                       if a.asname == a.name)
    return {n: v for n, v in out.items() if n.startswith("__") or not n.startswith("_")}


def parameters(node):
    args = node.args
    names = [a.arg for a in args.posonlyargs + args.args]
    return names + [a.arg for a in args.kwonlyargs]


def same_parameters(what, node, thing):
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return  # the extension's
    have = [p.name for p in signature.parameters.values()
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    assert [n for n in parameters(node) if n != "self"] == \
        [n for n in have if n != "self"], what


@pytest.mark.parametrize("name", STUBS)
def test_stub_matches_module(name):
    module = importlib.import_module(name)
    path = os.path.splitext(module.__file__)[0]
    if not os.path.exists(path + ".pyi"):
        path = os.path.join(os.path.dirname(module.__file__), name.split(".")[-1])
    with open(path + ".pyi") as text:
        body = ast.parse(text.read()).body
    stub = declared(body)
    for node in body:  # what a star brings
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            with open(os.path.join(os.path.dirname(path), node.module + ".pyi")) as text:
                stub = {**declared(ast.parse(text.read()).body), **stub}
    for word, node in stub.items():
        assert hasattr(module, word), "%s.%s is not there" % (name, word)
        thing = getattr(module, word)
        if isinstance(node, ast.ClassDef):
            for member, inner in declared(node.body).items():
                if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    there = inspect.getattr_static(thing, member, None)
                    assert there is not None, "%s.%s.%s" % (name, word, member)
                    if inspect.isfunction(there):
                        same_parameters((name, word, member), inner, there)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            same_parameters((name, word), node, thing)
    public = getattr(module, "__all__", None) or [
        n for n, v in vars(module).items() if not n.startswith("_")
        and getattr(v, "__module__", None) == module.__name__]
    if name != "kvd._kvd":  # of the extension, what others hand out
        public = {n for n in public if not n.startswith("_")}
        assert not public - set(stub), "%s: the stub lacks these" % name
    for word, thing in vars(module).items():
        if inspect.isclass(thing) and thing.__module__ == module.__name__ and \
                isinstance(stub.get(word), ast.ClassDef) and not issubclass(thing, int):
            members = {n for n, v in vars(thing).items() if not n.startswith("_")
                       and (inspect.isfunction(v) or isinstance(v, property))}
            assert not members - set(declared(stub[word].body)), (name, word)


# ---- values that engines pass between their processes ----

def named_tuples():
    for path in sorted(glob.glob(os.path.join(os.path.dirname(kvd.__file__), "*.py"))):
        module = importlib.import_module("kvd." + os.path.basename(path)[:-3]) \
            if not path.endswith("__init__.py") else kvd
        for name, cls in vars(module).items():
            if inspect.isclass(cls) and issubclass(cls, tuple) and hasattr(cls, "_fields") and \
                    cls.__module__ == module.__name__:
                yield pytest.param(cls, id="%s.%s" % (module.__name__, name))


@pytest.mark.parametrize("cls", list(named_tuples()))
def test_values_survive_pickle_and_copy(cls):
    value = cls._make((name,) for name in cls._fields)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(value, protocol))
        assert type(again) is cls and again == value
    assert copy.copy(value) == copy.deepcopy(value) == value
