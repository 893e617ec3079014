#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# fresh-folder.sh FOLDER: makes it, or empties the one that it made before. Any other that
# has something in it is refused: it is somebody's.
set -eu
folder=${1:?usage: fresh-folder.sh FOLDER}
mark=$folder/.made-by-fresh-folder
if [ -e "$folder" ] || [ -L "$folder" ]; then
	if [ -L "$folder" ] || [ ! -d "$folder" ]; then
		echo "$folder: not a folder: name another" >&2
		exit 1
	fi
	if [ ! -f "$mark" ] && [ -n "$(ls -A "$folder")" ]; then
		echo "$folder: not empty, and not made by an earlier run: name another, or remove it" >&2
		exit 1
	fi
	rm -rf --one-file-system "$folder"
fi
mkdir -p "$folder"
: > "$mark"
