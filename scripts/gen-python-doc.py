#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""gen-python-doc.py: docs/python.md on standard output: names and types of the type stubs
(python/kvd/*.pyi), with the defaults and docstrings of the modules."""
import ast
import os
import re
import textwrap

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "python", "kvd")
MODULES = ["client", "rooms", "memory", "layout", "timeline", "aio", "chunks", "attend", "cost",
           "math", "place", "errors", "shards", "router/pick", "router/scale"]
HEAD = """# Python API

Written by `make docs` from the type stubs and docstrings of the package `kvd`; do not edit. `kvd` itself exports the names
that its modules have in `kvd/__init__.pyi`. Examples: [clients](clients.md). Errors: [clients](clients.md#errors).
"""


def source(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        text = file.read()
    return text, ast.parse(text)


def public(name):
    return not name.startswith("_") or name == "__init__"


def members(tree):
    """name: node of the functions and classes of a module or class."""
    return {n.name: n for n in tree.body
            if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))} if tree else {}


def doc_of(node):
    return ast.get_docstring(node) or "" if node else ""


def defaults(node, text):
    """{argument: text of its default}"""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return {}
    args, given = node.args.posonlyargs + node.args.args, node.args.defaults
    pairs = list(zip(args[len(args) - len(given):], given)) + \
        [(a, d) for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults) if d]
    return {a.arg: re.sub(r"\s+", " ", ast.get_source_segment(text, d)) for a, d in pairs}


def signature(stub, stub_text, known, name):
    """A declaration, `self` left out, with its real defaults."""
    text = ast.get_source_segment(stub_text, stub)
    text = re.sub(r"\s+", " ", text[text.index("("):]).rstrip(". ").rstrip(":")
    text = re.sub(r"^\((self|cls)(, |(?=\)))", "(", text)
    for argument, value in known.items():
        text = re.sub(r"(\b%s: (?:[^=,()\[\]]|\[(?:[^\[\]]|\[(?:[^\[\]]|\[[^\[\]]*\])*\])*\])*= )\.\.\."
                      % argument, lambda m, v=value: m[1] + v, text)
    kind = "async " if isinstance(stub, ast.AsyncFunctionDef) else ""
    text = re.sub(r"(?<!,) ", "\0", kind + name + text.replace(" -> None", ""))
    return textwrap.fill(text, 100, subsequent_indent="    ", break_long_words=False,
                         break_on_hyphens=False).replace("\0", " ")


def is_a(kind, node):
    """Whether it has this decorator."""
    return any(isinstance(d, ast.Name) and d.id in kind.split() for d in node.decorator_list)


def function(stub, stub_text, real, real_text, owner=""):
    name = owner + (stub.name if stub.name != "__init__" else "")
    if is_a("property", stub):
        lines = ["%s: %s" % (name, ast.get_source_segment(stub_text, stub.returns))]
    else:
        lines = [signature(stub, stub_text, defaults(real, real_text), name.rstrip("."))]
    doc = doc_of(real)
    return ["```python", *lines, "```", ""] + ([doc, ""] if doc else [])


def fields(stub, stub_text):
    return [ast.get_source_segment(stub_text, n) for n in stub.body
            if isinstance(n, ast.AnnAssign) and public(n.target.id)]


def one_class(stub, stub_text, real, real_text):
    out = ["### %s" % stub.name, ""]
    doc = doc_of(real)
    out += [doc, ""] if doc else []
    if fields(stub, stub_text):
        out += ["```python", *fields(stub, stub_text), "```", ""]
    inner = members(real)
    for name, node in members(stub).items():
        if public(name) and not isinstance(node, ast.ClassDef):
            owner = stub.name
            if name != "__init__" and not is_a("classmethod staticmethod", node):
                owner = stub.name[0].lower() + stub.name[1:]
            out += function(node, stub_text, inner.get(name), real_text, owner + ".")
    return out


def module(path):
    stub_text, stub = source(path + ".pyi")
    real_text, real = source(path + ".py")
    out = ["## kvd.%s" % path.replace("/", "."), ""]
    doc = doc_of(real)
    out += [doc, ""] if doc else []
    constants = [t for t in fields(stub, stub_text)]
    out += ["```python", *constants, "```", ""] if constants else []
    inner = members(real)
    for name, node in members(stub).items():
        if public(name) and isinstance(node, ast.ClassDef):
            out += one_class(node, stub_text, inner.get(name), real_text)
        elif public(name):
            out += function(node, stub_text, inner.get(name), real_text)
    return out


def main():
    lines = [HEAD]
    lines += ["- [kvd.%s](#kvd%s)" % (m.replace("/", "."), m.replace("/", "")) for m in MODULES]
    lines.append("")
    for name in MODULES:
        lines += module(name)
    print("\n".join(lines).rstrip("\n"))


main()
