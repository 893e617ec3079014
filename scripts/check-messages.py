#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""check-messages.py [DOCUMENT ...]: do docs/configure.md and docs/troubleshoot.md quote kvd?

Each message in the first column of a table below a heading "Messages…" must be in a string of
the sources (… stands for variable text, and messages of errno are libc's); each option in
the first column of a table below "Options" must be in config/kvd.conf, with the default of
the second column, where it has one. Each fault is a line FILE:LINE: words."""
import os
import re
import subprocess
import sys

LITERAL = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
BETWEEN = re.compile(r"^(?:\s|\\\n|PRI\w+)*$")
SHORT = 3  # shorter pieces are in any text


def strings():
    """All literals of the sources, adjacent ones joined."""
    files = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard",
                            "*.c", "*.h"], capture_output=True, text=True,
                           check=True).stdout.split()
    out = []
    for path in files:
        if path.startswith("tests/") or not os.path.exists(path):
            continue
        with open(path, encoding="utf-8") as text:
            text = text.read()
        end = None
        for found in LITERAL.finditer(text):
            if end is not None and BETWEEN.match(text[end:found.start()]):
                out[-1] += found.group(1)
            else:
                out.append(found.group(1))
            end = found.end()
    return "\n".join(out + [os.strerror(n) for n in range(1, 134)])


def defaults():
    with open("config/kvd.conf", encoding="utf-8") as text:
        return dict(re.findall(r"^#(\w+) = ?(.*)$", text.read(), re.M))


def rows(path):
    """(number, section, cells) of tables."""
    section = ""
    with open(path, encoding="utf-8") as text:
        for number, line in enumerate(text, 1):
            if line.startswith("## "):
                section = line[3:].strip()
            if line.startswith("| `"):
                yield number, section, [c.strip() for c in line.strip().strip("|").split("|")]


def message_faults(cell, said):
    for quoted in re.findall(r"`([^`]+)`", cell):
        for piece in quoted.split("…"):
            if len(piece.strip()) >= SHORT and piece.strip() not in said:
                yield "no source says '%s'" % piece.strip()


def option_faults(cells, known):
    names = re.findall(r"`([^`]+)`", cells[0])
    for name in names:
        if name not in known:
            yield "no option %s" % name
    told = [value.strip("` ") for value in cells[1].split(",")]
    if len(told) == len(names):
        for name, value in zip(names, told):
            preset = known.get(name, "")
            if re.match(r"^[\d/a-z]+(?: (?:ms|s|[KMG]iB))?$", value) and preset[:1].isdigit() \
                    and value != preset:
                yield "%s: the default is %s, not %s" % (name, preset, value)


def faults(path, said, known):
    bad, seen = 0, 0
    for number, section, cells in rows(path):
        found = ()
        if section.startswith("Messages"):
            found = message_faults(cells[0], said)
        elif section.startswith("Options"):
            found = option_faults(cells, known)
        else:
            continue
        seen += 1
        for words in found:
            print("%s:%d: %s" % (path, number, words))
            bad += 1
    if not seen:
        print("%s: no tables of options and messages" % path)
    return bad or not seen


def main():
    said, known = strings(), defaults()
    bad = [faults(path, said, known)
           for path in sys.argv[1:] or ["docs/configure.md", "docs/troubleshoot.md"]]
    return 1 if any(bad) else 0


if __name__ == "__main__":
    sys.exit(main())
