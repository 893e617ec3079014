#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# contrib/rpm/kvd.spec, parsed and built. Nothing is installed: that needs a distribution
# that has RPM.
set -u
. tests/lib/check.sh

for program in rpmbuild rpmspec; do
	command -v $program >/dev/null || { echo "skipped: $program (make deps-packages)"; exit 77; }
done
out=build/rpm

# has NAME FILE...: the package has them
has()
{
	name=$1
	shift
	rpm -qpl "$(find $out -name "$name-[0-9]*.rpm")" >"$work/list" || return 1
	for file in "$@"; do
		grep -qx ".*$file" "$work/list" || { echo "$name has no $file"; return 1; }
	done
}

# removal asks for every instance
scripts_name_instances()
{
	rpm -qp --scripts "$(find $out -name 'kvd-[0-9]*.rpm')" >"$work/scripts" || return 1
	grep -q "systemctl stop .*kvd@\*.service" "$work/scripts" &&
		grep -q "systemctl try-restart 'kvd@\*.service'" "$work/scripts"
}

check "the specification parses" rpmspec -P contrib/rpm/kvd.spec
check "it builds" scripts/rpm.sh $out
check "the daemon" has kvd /usr/bin/kvd /usr/bin/kvd-ctl 'kvd@.service' /etc/kvd/kvd.conf.sample
check "the library" has libkvd 'libkvd.so.0'
check "its headers" has libkvd-devel /usr/include/kvd.h libkvd.a libkvd.pc
check "Python's clients" has python3-kvd kvd/__init__.py '_kvd.abi3.so'
check "the scripts" scripts_name_instances
checks_end
