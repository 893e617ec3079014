# SPDX-License-Identifier: Apache-2.0
"""kvd.fit: whether an engine has the interface that kvd uses, as it is installed and by its
sources, over small engines that are made here; and kvd's own lists."""
import ast
import glob
import importlib.util
import itertools
import os
import sys

import pytest

from conftest import ROOT
from kvd import fit
from kvd.sglang import needs as sglang_needs
from kvd.vllm import needs as vllm_needs

NEEDS = """
# what a connector uses
{0}
    __version__
    start(name)
    put(key, value, wait=)
{0}.base
    Status: DONE FAILED
    Request: number tokens late
    Request.skip()
    Result(sent=, received=)
    Connector(config, role)
    Connector: _config
    Connector < begin(step)
    Connector < load(context, **kwargs)
    Connector <? doze(config)
{0}.group
    rank()
"""
ENGINE = {
    "__init__": "from .version import __version__\nfrom .base import *\n"
                "def start(name, level=0): ...\ndef put(key, value, *, wait=None): ...\n",
    "version": "__version__ = '1.2.3'\n",
    "group": "try:\n    from .impl import rank\nexcept ImportError:\n    rank = None\n",
    "impl": "def rank(): ...\n",
    "base": """
import enum
from dataclasses import dataclass
class Status(enum.IntEnum):
    DONE = 1
    FAILED = 2
class Base:
    def __init__(self, number):
        self.number = number
    def finish(self):
        self.late = 1
class Request(Base):
    tokens: int
    def skip(self): ...
@dataclass
class Result:
    sent: set = None
    received: set = None
class Connector:
    def __init__(self, config, role, cache=None):
        self._config = config
    def begin(self, step): ...
    def load(self, context, **kwargs): ...
"""}
names = itertools.count()


def sources():
    spec = importlib.util.spec_from_file_location(
        "engines_fit", os.path.join(ROOT, "tests", "engines", "fit.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Sources


@pytest.fixture(params=["live", "sources"])
def judge(request, tmp_path, monkeypatch):
    """judge(changed): what does not fit of an engine with other text."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made = []

    def judge(changes=()):
        name = "engine%d" % next(names)
        (tmp_path / name).mkdir()
        for file, text in ENGINE.items():
            for old, new in changes:
                text = text.replace(old, new)
            (tmp_path / name / (file + ".py")).write_text(text)
        importlib.invalidate_caches()
        made.append(name)
        reader = fit.Live() if request.param == "live" else sources()(str(tmp_path))
        return [words.replace(name, "engine")
                for words in fit.misfits(fit.parse(NEEDS.format(name)), reader)]
    yield judge
    for module in [m for m in sys.modules if m.split(".")[0] in made]:
        del sys.modules[module]


def test_engine_with_all_used_names_fits(judge):
    assert judge() == []


@pytest.mark.parametrize("old, new, words", [
    ("FAILED = 2", "", "engine.base: Status.FAILED is missing"),
    ("class Request(Base)", "class Request", "engine.base: Request.number is missing"),
    ("def start(name", "def begin(name", "engine: start is missing"),
    ("    def skip(self): ...", "", "engine.base: Request.skip is missing"),
    ("__version__ = '1.2.3'", "", "engine"), ("self._config", "self.config", "Connector._config"),
    ("    def begin(self, step): ...", "", "engine.base: Connector.begin is missing")])
def test_missing_name_is_reported(judge, old, new, words):
    found = judge([(old, new)]) if old != "__version__ = '1.2.3'" else \
        judge([(old, ""), ("from .version import __version__\n", "")])
    assert found and words in found[0], found


@pytest.mark.parametrize("old, new, words", [
    ("start(name, level", "start(level, name", "its parameter level is not name"),
    ("start(name, level=0)", "start(name, level)", "it also needs level"),
    ("put(key, value, *, wait=None)", "put(key, value)", "it has no parameter wait"),
    ("put(key, value, *, wait=None)", "put(key)", "it takes 1 positional"),
    ("role, cache=None", "role, cache", "it also needs cache"),
    ("received: set", "got: set", "it has no parameter received"),
    ("def begin(self, step)", "def begin(self, step, late=0)", "the engine has a parameter late"),
    ("def load(self, context, **kwargs)", "def load(self, context)",
     "the engine has no parameter kwargs"),
    ("def begin(self", "def doze(self): ...\n    def begin(self", "no parameter config")])
def test_changed_signature_is_reported(judge, old, new, words):
    (found,) = judge([(old, new)])
    assert words in found, found


@pytest.mark.parametrize("old, new", [
    ("start(name, level=0)", "start(name, *rest, **more)"),
    ("put(key, value, *, wait=None)", "put(key, value, wait=None, more=())"),
    ("def begin(self", "def doze(self, config): ...\n    def begin(self"),
    ("    def skip(self): ...", "    @staticmethod\n    def skip(): ...")])
def test_signature_with_more_parameters_fits(judge, old, new):
    assert judge([(old, new)]) == []


def test_missing_module_is_reported(judge):
    assert judge() == []
    missing = fit.parse("nowhere.at.all\n    name\n")
    assert fit.misfits(missing, fit.Live()) == ["nowhere.at.all: the module is missing"]


def test_module_not_importable_here_is_skipped(tmp_path, monkeypatch):
    """Those of other devices: some fail for a library, some for a device."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for text in ("import no_such_library\n", "from os import no_such_name\n", "1 / 0\n"):
        name = "engine%d" % next(names)
        (tmp_path / (name + ".py")).write_text(text)
        importlib.invalidate_caches()
        assert fit.misfits(fit.parse(name + "\n    call(key)\n    Kind: one\n"), fit.Live()) == []


def engine(tested=("1.2.3",), needs="os\n    getpid()\n"):
    return fit.Engine("kvd.one%d" % next(names), "One", tested, needs, "install One 1.2.3")


def test_release_without_a_name_is_refused_by_name():
    one = engine(needs="os\n    no_such_name\n    getpid(process)\n")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"One 1\.2\.3 lacks interfaces that kvd uses: os: "
                           r"no_such_name is missing.*install One 1\.2\.3"):
            fit.check(one, "1.2.3")
    many = engine(needs="os\n" + "".join("    none%d\n" % i for i in range(20)))
    with pytest.raises(RuntimeError, match="none7 is missing and 12 more;"):
        fit.check(many, "1.2.3")


def test_unknown_release_starts_with_a_warning(caplog):
    one = engine()
    fit.check(one, "1.2.3+cpu")
    assert not caplog.records
    for _ in range(2):
        fit.check(one, "9.9.9")
    assert caplog.text.count("One 9.9.9 has all interfaces that kvd uses") == 1
    assert "was tested with 1.2.3 only" in caplog.text


def test_invalid_line_is_refused():
    for text in ("    name without a module\n", "os\n    a b c\n"):
        with pytest.raises(ValueError, match="is not a line of a list"):
            fit.parse(text)


# ---- kvd's own lists ---------------------------------------------------------------------------

def imported(package):
    """{(module, name)} that a part of kvd imports of its engine."""
    for path in glob.glob(os.path.join(ROOT, "python", "kvd", package, "*.py")):
        with open(path, encoding="utf-8") as text:
            for node in ast.walk(ast.parse(text.read())):
                if isinstance(node, ast.ImportFrom) and not node.level and \
                        node.module.split(".")[0] == package:
                    for alias in node.names:
                        yield node.module, alias.name


@pytest.mark.parametrize("package, parts, apart", [
    # of some releases alone; a type; objects whose class is in the list
    ("vllm", vllm_needs.PARTS, {"CacheHitSource", "current_platform"}),
    ("sglang", sglang_needs.PARTS, {"envs"})])
def test_all_imports_are_in_the_lists(package, parts, apart):
    listed = {(need.module, need.name.split(".")[0])
              for one in parts.values() for need in fit.parse(one.needs)}
    missing = {(module, name) for module, name in imported(package)
               if (module, name) not in listed and name not in apart}
    assert not missing
