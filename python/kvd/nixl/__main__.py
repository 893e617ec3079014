# SPDX-License-Identifier: Apache-2.0
"""python -m kvd.nixl path | install | uninstall"""
import importlib.util
import os
import sys
import sysconfig

from . import path

USAGE = """usage: python -m kvd.nixl path | install | uninstall
  path       print the folder that holds the package nixl, for PYTHONPATH
  install    make it importable in this environment; refused if another nixl is installed
  uninstall  undo that"""


def main(argv):
    link = os.path.join(sysconfig.get_path("purelib"), "nixl")
    target = os.path.join(path(), "nixl")
    ours = os.path.islink(link) and os.readlink(link) == target
    if argv == ["path"]:
        print(path())
        return 0
    if argv == ["install"]:
        found = importlib.util.find_spec("nixl")
        if found is not None and not ours:
            print("another nixl is installed: %s" % found.origin, file=sys.stderr)
            return 1
        if not ours:
            os.symlink(target, link)
        print(link)
        return 0
    if argv == ["uninstall"]:
        if ours:
            os.unlink(link)
        return 0
    print(USAGE, file=sys.stderr)
    return 2


sys.exit(main(sys.argv[1:]))
