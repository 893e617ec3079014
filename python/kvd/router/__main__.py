# SPDX-License-Identifier: Apache-2.0
"""python -m kvd.router [OPTIONS] | members … | flip … | publish …"""
import asyncio
import logging
import sys

NEEDS = "kvd.router needs aiohttp 3.10 or later%s: pip install 'aiohttp>=3.10'"
try:
    import aiohttp
except ImportError:
    sys.exit(NEEDS % "")
if tuple(map(int, aiohttp.__version__.split(".")[:2])) < (3, 10):
    sys.exit(NEEDS % (", this is " + aiohttp.__version__))

from . import admin, config, publish  # noqa: E402
from .app import Router  # noqa: E402

FORMAT = "%(asctime)s %(levelname)s %(message)s"
COMMANDS = {"members": admin.members, "flip": admin.flip, "publish": publish.main}


async def _run(options):
    await Router(options).run()


def main(argv):
    """Exit status of `python -m kvd.router ARGV`."""
    if argv and argv[0] in ("members", "flip"):
        return COMMANDS[argv[0]](argv[1:])
    logging.basicConfig(format=FORMAT, level=logging.INFO, stream=sys.stderr)
    if argv and argv[0] in COMMANDS:
        return COMMANDS[argv[0]](argv[1:])
    options = config.read(argv)
    try:
        asyncio.run(_run(options))
    except OSError as why:
        sys.exit("kvd.router: %s" % why)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
