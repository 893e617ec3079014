# SPDX-License-Identifier: Apache-2.0
"""python -m kvd.router [OPTIONS] | members … | flip … | publish … | pick … | scale …"""
import asyncio
import logging
import sys

NEEDS = "kvd.router needs aiohttp 3.10 or later%s: pip install 'aiohttp>=3.10'"
FORMAT = "%(asctime)s %(levelname)s %(message)s"


def _of_loads(argv):
    """The commands that need no aiohttp."""
    from . import pick_command, scale_command, sides
    command = {"pick": pick_command, "scale": scale_command}[argv[0]]
    return sides.run(command.main, argv[1:])


def _needs_aiohttp():
    try:
        import aiohttp
    except ImportError:
        sys.exit(NEEDS % "")
    if tuple(map(int, aiohttp.__version__.split(".")[:2])) < (3, 10):
        sys.exit(NEEDS % (", this is " + aiohttp.__version__))


async def _run(options):
    from .app import Router
    await Router(options).run()


def main(argv):
    """Exit status of `python -m kvd.router ARGV`."""
    command = argv[0] if argv else None
    if command in ("pick", "scale"):
        return _of_loads(argv)
    _needs_aiohttp()
    from . import admin, config, publish
    if command in ("members", "flip"):
        return getattr(admin, command)(argv[1:])
    logging.basicConfig(format=FORMAT, level=logging.INFO, stream=sys.stderr)
    if command == "publish":
        return publish.main(argv[1:])
    options = config.read(argv)
    try:
        asyncio.run(_run(options))
    except OSError as why:
        sys.exit("kvd.router: %s" % why)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
