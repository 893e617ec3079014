# SPDX-License-Identifier: Apache-2.0
USAGE: str

def main(argv: list[str]) -> int: ...
