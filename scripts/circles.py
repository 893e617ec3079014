#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Circles among the sources of a folder: sets of .c files each of which uses, over any
number of others, symbols of each other. Includes do not show them where several sources
share a header.

    scripts/circles.py             the largest circle of each folder against its limit
    scripts/circles.py FOLDER...   every circle of these folders, and by which symbols

A symbol is a function or variable that one source of the folder defines, not static. The
code is read as the compiler's preprocessor would not: all branches of an #if count.
"""
import collections
import os
import re
import subprocess
import sys

# The largest circle that a folder may have. These numbers only fall.
LIMITS = {"daemon/room": 3, "daemon/store": 4, "daemon/attend": 5, "daemon/cluster": 7,
          "gpu": 4, "daemon/memory": 0}

WORD = re.compile(r"[A-Za-z_]\w*")
NOISE = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'', re.S)
DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.M)
VARIABLE = re.compile(r"(\w+)\s*(?:\[[^\]]*\]\s*)*(?:=|;|$)")
KEYWORDS = {"if", "for", "while", "switch", "return", "sizeof", "else", "do"}


def code_of(path):
    with open(path, encoding="utf-8", errors="replace") as f:
        return NOISE.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), f.read())


def pieces(code):
    """What stands at file level, one piece after the other: its head and its body."""
    depth, head, body = 0, "", ""
    for line in DIRECTIVE.sub("", code).split("\n"):
        if depth == 0 and not line.strip():
            continue
        before, depth = depth, depth + line.count("{") - line.count("}")
        if before == 0 and "{" not in line:
            head += line + "\n"
        elif before == 0:
            at = line.index("{")
            head, body = head + line[:at], body + line[at:] + "\n"
        else:
            body += line + "\n"
        if depth == 0 and (body or line.rstrip().endswith(";")):
            yield head, body
            head = body = ""


def defined(head, body):
    """The name that the piece defines, and whether others see it."""
    flat = " ".join(head.split())
    if not flat or flat.startswith(("typedef", "extern")):
        return None, False
    seen = not re.match(r"(static|_Static_assert)\b", flat)
    call = re.search(r"(\w+)\s*\(", flat)
    if call and "=" not in flat[:call.start()] and call.group(1) not in KEYWORDS:
        return (call.group(1), seen) if body else (None, False)
    if re.match(r"(static |const )*(struct|union|enum)( \w+)?$", flat):
        return None, False
    name = VARIABLE.search(flat.split(" = ")[0] if " = " in flat else flat)
    return (name.group(1), seen) if name else (None, False)


def uses(folder):
    """{source: {source: symbols}} of a folder."""
    home, words = {}, {}
    names = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard",
                            folder + "/*.c"], capture_output=True, text=True, check=True)
    for path in names.stdout.split():
        if os.path.dirname(path) != folder or not os.path.exists(path):
            continue
        source = os.path.basename(path)[:-2]
        own = set()
        code = code_of(path)
        words[source] = set(WORD.findall(code))
        for head, body in pieces(code):
            name, seen = defined(head, body)
            if name and seen:
                home[name] = source
            elif name:
                own.add(name)
        words[source] -= own
    graph = {source: collections.defaultdict(set) for source in words}
    for source, used in words.items():
        for name in used:
            if home.get(name, source) != source:
                graph[source][home[name]].add(name)
    return graph


def circles(graph):
    """Tarjan's strongly connected components of more than one source, the largest first."""
    number, low, stack, found = {}, {}, [], []

    def visit(node):
        number[node] = low[node] = len(number)
        stack.append(node)
        for other in graph[node]:
            if other not in number:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], number[other])
        if low[node] == number[node]:
            at = stack.index(node)
            found.append(sorted(stack[at:]))
            del stack[at:]

    for node in graph:
        if node not in number:
            visit(node)
    return sorted((c for c in found if len(c) > 1), key=len, reverse=True)


def main():
    if len(sys.argv) > 1:
        for folder in sys.argv[1:]:
            graph = uses(folder.rstrip("/"))
            for circle in circles(graph):
                print("%s: %d: %s" % (folder, len(circle), " ".join(circle)))
                for source in circle:
                    for other in circle:
                        if graph[source].get(other):
                            print("    %s -> %s: %s" % (source, other, " ".join(
                                sorted(graph[source][other]))))
        return 0
    faults = 0
    for folder, limit in LIMITS.items():
        found = circles(uses(folder))
        if found and len(found[0]) > limit:
            faults += 1
            print("%s:1: a circle of %d sources, at most %d: %s (scripts/circles.py %s)" % (
                folder, len(found[0]), limit, " ".join(found[0]), folder))
    return faults != 0


if __name__ == "__main__":
    sys.exit(main())
