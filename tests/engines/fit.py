#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""fit.py FOLDER: whether the newest vLLM, SGLang and NIXL of PyPI have the interface that kvd
uses. Their wheels are downloaded without what they need, unpacked into FOLDER, and compared with
kvd's lists (kvd.fit) by their syntax trees: nothing of them is run.

NIXL is compared the other way about: what its package offers, kvd's has, by the same parameters.

fit.py --tree vllm|sglang|nixl SITE-PACKAGES compares what is unpacked there."""
import ast
import glob
import os
import re
import subprocess
import sys
import zipfile

from kvd import fit, nixl
from kvd.sglang import needs as sglang_needs
from kvd.vllm import needs as vllm_needs

PARTS = {"vllm": vllm_needs.PARTS, "sglang": sglang_needs.PARTS}
NIXL = "nixl_cu13._api"
DEPTH = 12  # of names that are imported from elsewhere


class Sources:
    """Modules of unpacked wheels, by their syntax trees."""

    def __init__(self, root):
        self.root, self.trees = root, {}

    def tree(self, module):
        """(its top-level names, whether it is a package), or None."""
        if module not in self.trees:
            at, self.trees[module] = os.path.join(self.root, *module.split(".")), None
            for path in (os.path.join(at, "__init__.py"), at + ".py"):
                if os.path.exists(path):
                    with open(path, encoding="utf-8") as text:
                        names = {}
                        collect(ast.parse(text.read()).body, names)
                    self.trees[module] = names, path.endswith("__init__.py")
                    break
        return self.trees[module]

    def find(self, module, name, depth=0):
        """(module, node) of a top-level name, wherever it is imported from."""
        tree = self.tree(module)
        if tree is None or depth > DEPTH:
            return None
        names, package = tree
        node = names.get(name)
        if isinstance(node, tuple):  # (from, level, name there)
            source = self.absolute(module, package, *node[:2])
            found = self.find(source, node[2], depth + 1)
            return found or ((module, node) if self.tree(source) is None else None)
        if node is not None:
            return module, node
        for source, level in names.get("*", ()):
            found = self.find(self.absolute(module, package, source, level), name, depth + 1)
            if found is not None:
                return found
        return (module + "." + name, None) if self.tree(module + "." + name) else None

    @staticmethod
    def absolute(module, package, source, level):
        if not level:
            return source
        above = module.split(".")
        above = above[:len(above) - level + package]
        return ".".join(above + ([source] if source else []))

    def mro(self, module, node, depth=0):
        """(module, class) of a class and what it is made from, as far as that is there."""
        yield module, node
        for base in node.bases if depth < DEPTH else ():
            base = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(base, ast.Name):
                found = self.find(module, base.id)
                if found and isinstance(found[1], ast.ClassDef):
                    yield from self.mro(*found, depth + 1)

    def member(self, module, node, name):
        """(class, node) of a class's own name, or that its objects get."""
        for _, one in self.mro(module, node):
            names = {}
            collect(one.body, names)
            if name in names:
                return one, names[name]
            for made in ast.walk(one):
                if isinstance(made, ast.Attribute) and made.attr == name and \
                        isinstance(made.ctx, ast.Store) and \
                        isinstance(made.value, ast.Name) and made.value.id in ("self", "cls"):
                    return one, made
        return None

    # ---- what kvd.fit asks ----

    def look(self, module, name):
        if self.tree(module) is None:
            return fit.Missing("the module")
        first, *rest = name.split(".")
        found = self.find(module, first)
        if found is None:
            return fit.Missing(name)
        owner = None
        for part in rest:
            if not isinstance(found[1], ast.ClassDef):
                return None  # of what cannot be seen from here
            owner = self.member(*found, part)
            if owner is None:
                return fit.Missing(name)
            found = found[0], owner[1]
        return self.params(*found, owner is not None)

    def params(self, module, node, method):
        if isinstance(node, ast.ClassDef):
            made = self.member(module, node, "__init__")
            if made is not None:
                return params_of(made[1], True)
            fields = [f for _, one in reversed(list(self.mro(module, node))) for f in one.body
                      if isinstance(f, ast.AnnAssign)]
            return [fit.Param(f.target.id, f.value is not None, "") for f in fields] or None
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return params_of(node, method)
        return None

    def has(self, module, name, attribute):
        found = self.find(module, name)
        return found is None or not isinstance(found[1], ast.ClassDef) or \
            self.member(*found, attribute) is not None


def collect(body, names):
    """Names that statements make, with what is inside of if and try."""
    for one in body:
        if isinstance(one, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            names[one.name] = one
        elif isinstance(one, ast.ImportFrom):
            for alias in one.names:
                if alias.name == "*":
                    names.setdefault("*", []).append((one.module or "", one.level))
                else:
                    names[alias.asname or alias.name] = one.module or "", one.level, alias.name
        elif isinstance(one, (ast.Assign, ast.AnnAssign)):
            for target in getattr(one, "targets", None) or [one.target]:
                for made in ast.walk(target):
                    if isinstance(made, ast.Name):
                        names[made.id] = one
        for inner in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(one, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
                collect(getattr(one, inner, ()), names)


def decorators(node):
    return {d.id if isinstance(d, ast.Name) else getattr(d, "attr", "")
            for d in node.decorator_list}


def params_of(node, method):
    """[Param] of a function; None of a property."""
    marks = decorators(node)
    if marks & {"property", "cached_property"}:
        return None
    args = node.args
    plain = args.posonlyargs + args.args
    first = len(plain) - len(args.defaults)
    out = [fit.Param(a.arg, i >= first, "") for i, a in enumerate(plain)]
    if method and "staticmethod" not in marks:
        out = out[1:]
    if args.vararg:
        out.append(fit.Param(args.vararg.arg, True, "*"))
    out += [fit.Param(a.arg, default is not None, "key")
            for a, default in zip(args.kwonlyargs, args.kw_defaults)]
    if args.kwarg:
        out.append(fit.Param(args.kwarg.arg, True, "**"))
    return out


# ---- releases ------------------------------------------------------------------------------

def download(package, folder):
    """(the newest wheel's version, where it is unpacked)"""
    wheels = os.path.join(folder, "wheels", package)
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps",
                    "--only-binary", ":all:", "-d", wheels, package], check=True)
    wheel = max(glob.glob(os.path.join(wheels, "*.whl")), key=os.path.getmtime)
    version = os.path.basename(wheel).split("-")[1]
    site = os.path.join(folder, "%s-%s" % (package, version))
    if not os.path.isdir(site):
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(site, [name for name in packed.namelist()
                                     if re.search(r"\.pyi?$|/METADATA$", name)])
    return version, site


def judge(name, version, site):
    """Print what does not fit; how much."""
    count = 0
    for part, engine in PARTS[name].items():
        found = fit.misfits(fit.parse(engine.needs), Sources(site))
        run = "run with it" if version in engine.tested else "run with %s" % \
            ", ".join(engine.tested)
        print("%s %s, %s: %s (kvd was %s)" % (
            engine.name, version, part, "%d misfits" % len(found) if found else "fits", run))
        for one in found:
            print("    " + one)
        count += len(found)
    return count


def judge_nixl(version, site):
    """Whether kvd's nixl has what the real one has, for its callers."""
    theirs, ours, found = Sources(site), Sources(nixl.path()), []
    names, _ = theirs.tree(NIXL)
    for name, node in sorted(names.items()):
        if not isinstance(node, ast.ClassDef) or name.startswith("_"):
            continue
        own = ours.find("nixl._api", name)
        if own is None:
            found.append("%s is missing" % name)
            continue
        made = {}
        collect(node.body, made)
        for method, there in made.items():
            if method.startswith("_") and method != "__init__" or \
                    not isinstance(there, ast.FunctionDef):
                continue
            want = [p.name for p in params_of(there, True) or ()]
            here = ours.look("nixl._api", name + "." + method)
            if isinstance(here, fit.Missing):
                found.append("%s.%s is missing" % (name, method))
            elif [p.name for p in here or ()] != want:
                found.append("%s.%s(%s) is (%s) here" % (
                    name, method, ", ".join(want), ", ".join(p.name for p in here or ())))
    print("NIXL %s: kvd's nixl %s" % (version, "lacks %d" % len(found) if found else "has all"))
    for one in found:
        print("    " + one)
    return len(found)


def exported(site):
    """Names that nixl._api of the package `nixl` gives on, which kvd's has not."""
    theirs, ours = Sources(site), Sources(nixl.path())
    names, _ = theirs.tree("nixl._api")
    missing = sorted(name for name, node in names.items() if isinstance(node, tuple) and
                     node[0].startswith("nixl") and ours.find("nixl._api", name) is None)
    for name in missing:
        print("    nixl._api: %s is missing" % name)
    return len(missing)


def main(argv):
    if argv[:1] == ["--tree"] and len(argv) == 3:
        check = judge_nixl if argv[1] == "nixl" else lambda *args: judge(argv[1], *args)
        return 1 if check("at %s" % argv[2], argv[2]) else 0
    if len(argv) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    count = sum([judge(name, *download(name, argv[0])) for name in PARTS])
    version, site = download("nixl", argv[0])
    build, parts = download("nixl-cu13", argv[0])
    count += judge_nixl("%s, by nixl-cu13 %s" % (version, build), parts) + exported(site)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
