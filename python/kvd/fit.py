# SPDX-License-Identifier: Apache-2.0
"""Check that a release of an engine has the interface that kvd uses. A list (needs.py next to
the connectors) names that interface and is used twice: a connector that starts compares it with
the installed engine, and `make engines-fit` compares it with a newer release's sources without
running them.

    vllm.logger                                  a module
        init_logger(name)                        called so; `name=`: by keyword
        Request: status num_tokens               a class, and attributes of its objects
        Request.get_skip_reading_prefix_cache()
        Connector < shutdown()                   a method that kvd overrides, called so by the engine
        Connector <? supports_sleep_mode(config) the same, in some releases

Two readers resolve a name of a module: Live by importing it, the tests' Sources by its syntax
tree."""
import dis
import importlib
import inspect
import logging
import re
from collections import namedtuple

logger = logging.getLogger("kvd.fit")
LINE = re.compile(r"\s+([\w.]+)(?:\s*(<\??)\s*(\w+))?(?:\((.*)\)|:\s*(.+))?$")
ERRORS_MAX = 8  # in a message

Need = namedtuple("Need", "module name kind names")
Need.__doc__ = """kind: "has", "call", "override" or "may override"; names: of attributes, or of
parameters; `name=` is passed by keyword."""

Param = namedtuple("Param", "name optional many")
Param.__doc__ = """many: "*", "**", or "" for one; "key": keyword only."""

Missing = namedtuple("Missing", "name")
Missing.__doc__ = "A module or a name that does not exist."


def parse(text):
    """[Need] of a list."""
    needs, module = [], None
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if not line[0].isspace():
            module = line.strip()
            continue
        match = LINE.match(line)
        if match is None or module is None:
            raise ValueError("needs: %r is not a line of a list" % line)
        name, above, method, params, attributes = match.groups()
        if above:
            kind = "override" if above == "<" else "may override"
            needs.append(Need(module, name + "." + method, kind, split(params)))
        elif params is not None:
            needs.append(Need(module, name, "call", split(params)))
        else:
            needs.append(Need(module, name, "has", tuple((attributes or "").split())))
    return needs


def split(params):
    return tuple(one.strip() for one in (params or "").split(",") if one.strip())


# ---- what does not fit -------------------------------------------------------------------

def misfits(needs, reader):
    """[text], of an engine as a reader sees it. A reader has look(module, name): Missing, a list of
    Param, or None if the parameters are unknown; and has(module, name, attribute)."""
    found = []
    for need in needs:
        there = reader.look(need.module, need.name)
        where = "%s: %s" % (need.module, need.name)
        if isinstance(there, Missing):
            if need.kind != "may override":
                found.append("%s: %s is missing" % (need.module, there.name))
        elif need.kind == "has":
            found += ["%s: %s.%s is missing" % (need.module, need.name, attribute)
                      for attribute in need.names
                      if not reader.has(need.module, need.name, attribute)]
        elif there is not None:
            why = (unlike_call if need.kind == "call" else unlike_override)(there, need.names)
            if why:
                found.append("%s(%s) is called with (%s): %s" % (
                    where, ", ".join(map(shown, there)), ", ".join(need.names), why))
    return list(dict.fromkeys(found))


def shown(param):
    mark = param.many if param.many in ("*", "**") else ""
    return mark + param.name + ("=" if param.optional and not mark else "")


def unlike_call(params, given):
    """Why a call with these parameters fails."""
    by_place = [p for p in params if not p.many]
    places = [name for name in given if not name.endswith("=")]
    names = {name[:-1] for name in given if name.endswith("=")}
    if len(places) > len(by_place) and not any(p.many == "*" for p in params):
        return "it takes %d positional argument(s)" % len(by_place)
    for place, param in zip(places, by_place):
        if place != param.name:
            return "its parameter %s is not %s" % (param.name, place)
    taken = {p.name for p in params if p.many in ("", "key")}
    for name in sorted(names - taken):
        if not any(p.many == "**" for p in params):
            return "it has no parameter %s" % name
    for param in params:
        if not param.optional and param.many in ("", "key") and \
                param.name not in names | set(places):
            return "it also needs %s" % param.name
    return None


def unlike_override(params, given):
    """Why an override with these parameters cannot be called as the engine's own."""
    own = {name.rstrip("=").lstrip("*") for name in given}
    theirs = {p.name for p in params}
    for name in sorted(theirs - own):
        return "the engine has a parameter %s" % name
    for name in sorted(own - theirs):
        return "the engine has no parameter %s" % name
    return None


# ---- an engine that is installed -----------------------------------------------------------

class Live:
    """Reads modules that can be imported."""

    def _find(self, module, name):
        """(owner, object); (None, None) if it cannot be imported here."""
        try:
            owner, found = None, importlib.import_module(module)
        except ModuleNotFoundError as error:
            absent = error.name and (module + ".").startswith(error.name + ".")
            return None, Missing("the module") if absent else None
        except Exception:  # of another device: its user finds out
            return None, None
        for part in name.split("."):
            owner = found
            found = inspect.getattr_static(owner, part, None) if inspect.isclass(owner) else \
                getattr(owner, part, None)
            if found is None and not self._has(owner, part):
                return None, Missing(name)
        return owner, found

    def look(self, module, name):
        owner, found = self._find(module, name)
        if isinstance(found, Missing):
            return found
        bound = inspect.isclass(owner) and not isinstance(found, staticmethod)
        call = found.__func__ if isinstance(found, (staticmethod, classmethod)) else found
        if not callable(call) or inspect.isbuiltin(call):
            return None
        try:
            signature = inspect.signature(call)
        except (TypeError, ValueError):
            return None
        params = [param_of(p) for p in signature.parameters.values()]
        return params[1:] if bound and not inspect.isclass(call) else params

    def has(self, module, name, attribute):
        owner = self._find(module, name)[1]
        return owner is None or self._has(owner, attribute)

    @staticmethod
    def _has(owner, attribute):
        if hasattr(owner, attribute) or attribute in getattr(owner, "__dataclass_fields__", ()):
            return True
        for one in getattr(owner, "__mro__", ()):
            if attribute in vars(one).get("__annotations__", ()):
                return True
            for made in vars(one).values():
                code = getattr(inspect.unwrap(made) if inspect.isfunction(made) else None,
                               "__code__", None)
                if code and any(i.opname == "STORE_ATTR" and i.argval == attribute
                                for i in dis.get_instructions(code)):
                    return True
        return False


def param_of(parameter):
    many = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**",
            parameter.KEYWORD_ONLY: "key"}.get(parameter.kind, "")
    return Param(parameter.name, parameter.default is not parameter.empty or many in ("*", "**"),
                 many)


# ---- at start -------------------------------------------------------------------------------

Engine = namedtuple("Engine", "who name tested needs remedy")
Engine.__doc__ = """who: the part of kvd; tested: releases that kvd was tested with; needs: text;
remedy: for a release that does not fit."""

_checked = {}


def check(engine, version):
    """Raise RuntimeError if this release lacks an interface that kvd uses; warn once about a
    release that kvd was not tested with."""
    key = engine.who, version
    if key not in _checked:
        _checked[key] = misfits(parse(engine.needs), Live())
        # without a build's suffix
        if not _checked[key] and version.split("+")[0] not in engine.tested:
            logger.warning("%s: %s %s has all interfaces that kvd uses, but kvd was tested with %s "
                       "only",
                           engine.who, engine.name, version, ", ".join(engine.tested))
    found = _checked[key]
    if found:
        more = len(found) - ERRORS_MAX
        raise RuntimeError("%s: %s %s lacks interfaces that kvd uses: %s%s; %s" % (
            engine.who, engine.name, version, "; ".join(found[:ERRORS_MAX]),
            " and %d more" % more if more > 0 else "", engine.remedy))
