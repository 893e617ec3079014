#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# dist.sh FOLDER: the release tarball in FOLDER, of what is committed. The same commit
#   gives the same bytes, for files have its time.
# dist.sh --check: only whether all that tell a version tell mk/flags.mk's
set -eu
version=$(sed -n 's/^VERSION := //p' mk/flags.mk)

# tells FILE PATTERN: its first match is the version; a Debian revision may follow
tells()
{
	told=$(sed -n "s/$2/\1/p" "$1" | head -n 1)
	[ "${told%%-*}" = "$version" ] || {
		echo "$1: version ${told:-nowhere}; mk/flags.mk: $version" >&2
		return 1
	}
}

tells CHANGELOG.md '^## \([0-9][^ ]*\).*'
tells python/pyproject.toml '^version = "\(.*\)"'
tells python/setup.py '.*KVD_VERSION.*"\([0-9][^"]*\)".*'
tells debian/changelog '^kvd (\(.*\)).*'
tells contrib/rpm/kvd.spec '^Version: *\(.*\)'
[ "${1:?usage: dist.sh FOLDER | --check}" != --check ] || exit 0

git rev-parse --git-dir > /dev/null 2>&1 || {
	echo "dist.sh: not a git checkout" >&2
	exit 1
}
[ -z "$(git status --porcelain)" ] || echo "dist.sh: what is not committed is left out" >&2
mkdir -p "$1"
tarball=$1/kvd-$version.tar.gz
git -c tar.umask=0022 archive --format=tar --prefix="kvd-$version/" HEAD > "$tarball.tar"
gzip -9n < "$tarball.tar" > "$tarball.part"
rm "$tarball.tar"
mv "$tarball.part" "$tarball"
echo "$tarball"
