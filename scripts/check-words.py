#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Words that readers of this field stumble over, counted in comments, strings and documents.

check-words.py [-v] [--rates] [FILE...]

Each row has the words and how often they may occur in 10 000 words of code (comments and
strings of C and Python) and of documents. A rate above its budget is a fault; budgets only
fall. -v prints each place, --rates prints all rates. Without files: the whole tree, without
tests and pages of measurements.
"""
import collections
import re
import subprocess
import sys

BUDGETS = [  # words, code, documents
    ("what", 4, 2),
    ("who whom whoever whose", 9, 3),
    ("nobody somebody whatever", 1, 1),
    ("tell tells told telling", 2, 1),
    ("say says said saying", 1, 1),
    ("hear hears heard", 1, 1),
    ("go goes gone went", 3, 1),
    ("come comes came", 2, 1),
    ("look looks looked looking", 4, 1),
    ("begin begins began begun", 5, 1),
    ("stand stands stood", 1, 1),
    ("anew beside besides beforehand", 1, 1),
    ("still quiesced", 4, 2),
    ("stranger strangers liar kin heir bequeath haunted untold hopeless", 1, 1),
    ("asker askers lend lends lent lender far", 4, 1),
    ("words thing things", 3, 1),
    ("way ways", 2, 1),
]
ROW_OF = {word: i for i, row in enumerate(BUDGETS) for word in row[0].split()}
# tests and measurements; reference.md lists names of fields, messages and columns
LEFT_OUT = re.compile(r"^(tests/|docs/(hardware|runs)/|docs/(reference|performance)\.md)")
C_PROSE = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:[^"\\\n]|\\.)*"', re.S)
PY_PROSE = re.compile(r'""".*?"""|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'|#[^\n]*', re.S)


def prose(path, text):
    """(line, text) of comments, and of strings of several words."""
    if path.endswith(".md"):
        text = re.sub(r"^```.*?^```", lambda m: "\n" * m.group().count("\n"), text,
                      flags=re.S | re.M)
        text = re.sub(r"^    .*$|`[^`\n]*`", "", text, flags=re.M)
        yield from enumerate(text.split("\n"), 1)
        return
    text = re.sub(r"^[ \t]*#[ \t]*include.*$", "", text, flags=re.M)
    for found in (PY_PROSE if path.endswith(".py") else C_PROSE).finditer(text):
        part = found.group()
        if part[0] in "\"'" and " " not in part:
            continue
        first = text.count("\n", 0, found.start()) + 1
        for n, line in enumerate(re.sub(r"`[^`\n]*`", "", part).split("\n")):
            yield first + n, line


def main():
    options = [a for a in sys.argv[1:] if a.startswith("-")]
    paths = [a for a in sys.argv[1:] if not a.startswith("-")] or [
        p for p in subprocess.run(["git", "ls-files", "*.c", "*.h", "*.py", "*.md"], check=True,
                                  capture_output=True, text=True).stdout.split("\n")
        if p and not LEFT_OUT.match(p)]
    words, hits = collections.Counter(), collections.Counter()
    for path in paths:
        kind = "docs" if path.endswith(".md") else "code"
        with open(path, encoding="utf-8") as file:
            text = file.read()
        for line, part in prose(path, text):
            for word in re.findall(r"[a-z]+", part.lower()):
                words[kind] += 1
                if word in ROW_OF:
                    hits[kind, ROW_OF[word]] += 1
                    if "-v" in options:
                        print("%s:%d: %s" % (path, line, word))
    faults = 0
    for kind, column in (("code", 1), ("docs", 2)):
        for i, row in enumerate(BUDGETS):
            rate = 10000 * hits[kind, i] / max(words[kind], 1)
            if rate > row[column] or "--rates" in options:
                faults += rate > row[column]
                print('%s: "%s": %.1f in 10 000 words, at most %d' % (
                    kind, row[0], rate, row[column]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
