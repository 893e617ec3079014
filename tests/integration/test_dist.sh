#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The release tarball, the versions that the tree tells, and whose flags the build takes.
set -u
. tests/lib/check.sh

versions_agree()
{
	scripts/dist.sh --check
}

# A copy in which FILE tells another version.
other_version_is_refused()
{
	rm -rf "$work/tree"
	for file in scripts/dist.sh mk/flags.mk CHANGELOG.md python/pyproject.toml python/setup.py \
		debian/changelog contrib/rpm/kvd.spec; do
		install -D "$file" "$work/tree/$file" || return 1
	done
	sed -i 's/0\.1\.0/0.9.9/' "$work/tree/$1"
	(cd "$work/tree" && ! scripts/dist.sh --check) >"$work/said" 2>&1 || return 1
	cat "$work/said"
	grep -q "0.9.9" "$work/said"
}

tarball_is_the_same_twice()
{
	first=$(scripts/dist.sh "$work/a") && second=$(TZ=UTC+5 scripts/dist.sh "$work/b") &&
		cmp "$first" "$second"
}

# what git has, in a folder of the version, and nothing of the build
tarball_is_the_tree()
{
	tar -tzf "$work"/a/*.tar.gz | sed -n 's,^[^/]*/\(.*[^/]\)$,\1,p' | sort >"$work/has" &&
		git ls-tree -r --name-only HEAD | sort | diff - "$work/has"
}

# refuses FOLDER COMMAND...: it fails for the folder's sake, and leaves it as it is
refuses()
{
	folder=$1
	shift
	ls -laR "$folder" >"$work/before"
	! "$@" "$folder" >"$work/said" 2>&1 || return 1
	cat "$work/said"
	grep -q "$folder: not " "$work/said" && ls -laR "$folder" | cmp - "$work/before"
}

folders_of_others_are_left_alone()
{
	mkdir -p "$work/mine/deep" "$work/bin" && echo mine >"$work/mine/deep/file" || return 1
	ln -sfn mine "$work/link" && : >"$work/a-file" || return 1
	# they look for their tools first: these do nothing
	for tool in dpkg-buildpackage rpmbuild; do
		printf '#!/bin/sh\nexit 1\n' >"$work/bin/$tool" && chmod 755 "$work/bin/$tool"
	done
	for script in fresh-folder.sh deb.sh rpm.sh; do
		for folder in mine link a-file; do
			refuses "$work/$folder" env PATH="$work/bin:$PATH" scripts/$script || return 1
		done
	done
}

own_folders_are_emptied()
{
	mkdir "$work/own" && scripts/fresh-folder.sh "$work/own" && : >"$work/own/file" &&
		scripts/fresh-folder.sh "$work/own" && [ ! -e "$work/own/file" ] &&
		scripts/fresh-folder.sh "$work/new/deep" && [ -d "$work/new/deep" ]
}

# In a mount namespace, whose /etc and /run are its own.
purge_leaves_mounts_alone()
{
	mkdir "$work/far" && echo mine >"$work/far/file" || return 1
	unshare -rm sh -eu -c '
		mount -t tmpfs none /etc
		mount -t tmpfs none /run
		[ -z "$(ls -A /etc /run | grep -v :)" ]
		mkdir -p /etc/kvd/keys /run/kvd
		: > /etc/kvd/kvd.conf
		sh "$2" purge
		[ ! -e /etc/kvd ]
		[ ! -e /run/kvd ]
		mkdir -p /etc/kvd/keys /run/kvd /run/kvd2
		mount --bind "$1" /etc/kvd/keys
		mount --bind "$1" /run/kvd
		sh "$2" purge
		umount /run/kvd
		mount --bind "$1" /run/kvd2
		sh "$2" purge
		[ ! -e /run/kvd ]
	' sh "$work/far" "$PWD/debian/kvd.postrm" && [ "$(cat "$work/far/file")" = mine ]
}

# flags [SUBMAKE]: the environment's come once, behind ours
flags_of_the_environment()
{
	env -u CALLER_FLAGS -u MAKEFLAGS -u MAKELEVEL -u SAN CPPFLAGS=-DMARK_CPP CFLAGS=-DMARK_C \
		LDFLAGS=-Wl,--mark make -nB NVCC= V=1 build/rel/kvd >"$work/plan" || return 1
	compile=$(grep -- '-c daemon/main.c' "$work/plan")
	link=$(grep -- '-o build/rel/kvd ' "$work/plan")
	echo "$compile; $link"
	[ "$(echo "$compile" | grep -o MARK_ | wc -l)" -eq 2 ] || return 1
	echo "$compile" | grep -q -- '-std=gnu11.*-DMARK_C ' || return 1
	echo "$link" | grep -q -- '-z,now.*-Wl,--mark '
}

flags_reach_a_make_inside()
{
	printf 'include Makefile\ninside:\n\t@$(MAKE) -f Makefile -nB V=1 build/rel/kvd\n' \
		>"$work/outer.mk"
	env -u CALLER_FLAGS -u MAKEFLAGS -u MAKELEVEL -u SAN CFLAGS=-DMARK_C make -s -f "$work/outer.mk" \
		NVCC= inside >"$work/plan" || return 1
	[ "$(grep -- '-c daemon/main.c' "$work/plan" | grep -o MARK_ | wc -l)" -eq 1 ]
}

check "versions agree" versions_agree
for file in CHANGELOG.md python/pyproject.toml python/setup.py debian/changelog \
	contrib/rpm/kvd.spec mk/flags.mk; do
	check "another version in $file" other_version_is_refused "$file"
done
if git rev-parse HEAD >/dev/null 2>&1; then
	check "the tarball is the same twice" tarball_is_the_same_twice
	check "the tarball is the tree" tarball_is_the_tree
else
	skip "the tarball" "a git checkout"
fi
check "flags of the environment" flags_of_the_environment
check "they reach a make inside" flags_reach_a_make_inside
check "folders of others are left alone" folders_of_others_are_left_alone
check "own folders are emptied" own_folders_are_emptied
if unshare -rm mount -t tmpfs none /run 2>/dev/null; then
	check "a purge leaves mounts alone" purge_leaves_mounts_alone
else
	skip "a purge leaves mounts alone" "a user and mount namespace (unshare -rm)"
fi
checks_end
