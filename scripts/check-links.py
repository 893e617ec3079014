#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""check-links.py [FILE ...]: do the links of Markdown files lead somewhere?

Looks at the named files, else at all *.md that git tracks or would. A relative link must
name a file or folder of the tree, and its #anchor a heading of that file; a name in
backticks that begins with a folder of the tree must exist, too (a pattern: match). Links
with a scheme (https:, mailto:) are not followed: there is no network here. Each fault is
a line FILE:LINE: words; exit status 1."""
import glob
import os
import re
import subprocess
import sys
import urllib.parse

FENCE = re.compile(r"^\s*(```|~~~)")
HEADING = re.compile(r"^(#{1,6})\s+(.*?)\s*#*$")
CODE = re.compile(r"(`+)(.+?)\1")
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^()<>\s]+)>?(?:\s+\"[^\"]*\")?\s*\)")
REFERENCE = re.compile(r"^\s{0,3}\[[^\]]+\]:\s+<?(\S+?)>?(?:\s|$)")
SCHEME = re.compile(r"^[a-z][a-z0-9+.-]*:", re.I)
# folders that `name/…` in backticks may begin with; others are names of something else
PATH = re.compile(r"^(?:daemon|lib|proto|python|gpu|ctl|docs|scripts|mk|tests|man|config|systemd)/[\w./*@-]+$")


def tracked():
    out = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard",
                          "*.md"], capture_output=True, text=True, check=True).stdout
    return [path for path in sorted(set(out.splitlines())) if os.path.exists(path)]


def lines_of(path):
    """(number, line) outside fenced and indented code."""
    fence, blank = None, True
    with open(path, encoding="utf-8") as text:
        for number, line in enumerate(text, 1):
            line = line.rstrip("\n")
            mark = FENCE.match(line)
            if mark and fence is None:
                fence = mark.group(1)
            elif mark and mark.group(1) == fence:
                fence = None
            elif fence is None and not (blank and line.startswith("    ")):
                yield number, line
            blank = not line.strip()


def slug(heading):
    """The anchor that GitHub gives a heading."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    text = re.sub(r"[^\w\- ]", "", text.lower())
    return text.replace(" ", "-")


def anchors(path, known={}):
    if path not in known:
        found = {}
        for _, line in lines_of(path):
            heading = HEADING.match(line)
            if heading:
                name = slug(heading.group(2))
                count = found.get(name, 0)
                found[name] = count + 1
                if count:
                    found["%s-%d" % (name, count)] = 1
            for name in re.findall(r"<a (?:id|name)=\"([^\"]+)\"", line):
                found[name] = 1
        known[path] = set(found)
    return known[path]


def fault_of(path, target):
    """Why a link leads nowhere; None: it does not."""
    if SCHEME.match(target):
        return None
    name, _, anchor = target.partition("#")
    name, anchor = urllib.parse.unquote(name), urllib.parse.unquote(anchor)
    if name.startswith("/"):
        return "%s: a path of one machine" % target
    goal = os.path.normpath(os.path.join(os.path.dirname(path), name)) if name else path
    if not os.path.exists(goal):
        return "%s: no such file" % target
    if anchor and goal.endswith(".md") and anchor not in anchors(goal):
        return "%s: no such heading in %s" % (target, goal)
    return None


def faults(path):
    for number, line in lines_of(path):
        bare = CODE.sub(lambda m: "`" + "x" * len(m.group(2)) + "`", line)
        for target in LINK.findall(bare) + REFERENCE.findall(bare):
            why = fault_of(path, target)
            if why:
                yield number, why
        for _, code in CODE.findall(line):
            if PATH.match(code) and not code.endswith("…") and not glob.glob(code):
                yield number, "`%s`: no such file" % code


def main():
    bad = 0
    for path in sys.argv[1:] or tracked():
        for number, why in faults(path):
            print("%s:%d: %s" % (path, number, why))
            bad += 1
    if bad:
        print("check-links: %d links lead nowhere" % bad, file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
