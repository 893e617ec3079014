#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# What kvd needs to build and to run its tests and checks, from Debian.
#   install-deps.sh              install everything (root)
#   install-deps.sh --if-needed  only when something is missing; without root
#                                print the one command, and fail unless the build
#                                and the tests can go without (the third column)
#   install-deps.sh --for-check  the same, but nothing can be gone without
#   install-deps.sh --list       print the packages
#   install-deps.sh --bench      what `make bench` compares with and draws by,
#                   --metrics    what reads and draws metrics in tests,
#                   --packages   what `make deb` and `make rpm` need; these only when
#                                missing, and without root only told
set -eu

# package, and how to see that it is there: a header, a program, a module of Python, or a
# compiler that has libFuzzer;
# "less": without it tests are skipped by name, or `make check` alone wants it
needs='
gcc		program:gcc
make		program:make
pkg-config	program:pkg-config
libc6-dev	header:stdio.h
libev-dev	header:ev.h
libzmq3-dev	header:zmq.h
libucx-dev	header:ucp/api/ucp.h
libibverbs-dev	header:infiniband/verbs.h
librdmacm-dev	header:rdma/rdma_cma.h
libmicrohttpd-dev	header:microhttpd.h
libcurl4-openssl-dev	header:curl/curl.h
libcjson-dev	header:cjson/cJSON.h
libinih-dev	header:ini.h
libssl-dev	header:openssl/kdf.h
libxxhash-dev	header:xxhash.h
libseccomp-dev	header:seccomp.h
uthash-dev	header:uthash.h
libcmocka-dev	header:cmocka.h
python3		program:python3
python3-dev	program:python3-config	less
python3-venv	python:ensurepip	less
systemd		program:systemd-analyze	less
mmdebstrap	program:mmdebstrap	less
iproute2	program:ip	less
etcd-server	program:etcd	less
etcd-client	program:etcdctl	less
openssl		program:openssl	less
procps		file:/bin/kill	less
man-db		program:man	less
zsh		program:zsh	less
fish		program:fish	less
clang-tidy	program:clang-tidy	less
cppcheck	program:cppcheck	less
gcc-aarch64-linux-gnu	program:aarch64-linux-gnu-gcc	less
libc6-dev-arm64-cross	file:/usr/aarch64-linux-gnu/include/stdio.h	less
clang		fuzzer:clang	less
libclang-rt-dev	fuzzer:clang	less
'

bench_needs='
iperf3		program:iperf3
ucx-utils	program:ucx_perftest
gnuplot-nox	program:gnuplot
'
metrics_needs='
prometheus	program:promtool
'
packages_needs='
build-essential	file:/usr/share/build-essential
debhelper	program:dh
dh-python	program:dh_python3
python3-setuptools	file:/usr/lib/python3/dist-packages/setuptools
python3-wheel	file:/usr/lib/python3/dist-packages/wheel
lintian		program:lintian
git		program:git
rpm		program:rpmbuild
'
case ${1-} in
--bench)
	needs=$bench_needs
	;;
--metrics)
	needs=$metrics_needs
	;;
--packages)
	needs=$packages_needs
	;;
esac

is_there()
{
	case $1 in
	program:*)
		command -v "${1#program:}" >/dev/null 2>&1
		;;
	file:*)
		[ -e "${1#file:}" ]
		;;
	fuzzer:*)
		printf 'int LLVMFuzzerTestOneInput(void) { return 0; }\n' |
			"${1#fuzzer:}" -fsanitize=fuzzer,address -x c -o /dev/null - \
				>/dev/null 2>&1
		;;
	python:*)
		python3 -c "import ${1#python:}" >/dev/null 2>&1
		;;
	header:cmocka.h)
		printf '#include <stdarg.h>\n#include <stddef.h>\n#include <stdint.h>\n#include <setjmp.h>\n#include <cmocka.h>\n' |
			gcc -E -x c - >/dev/null 2>&1
		;;
	header:*)
		printf '#include <%s>\n' "${1#header:}" | gcc -E -x c - >/dev/null 2>&1
		;;
	esac
}

packages=
missing=
fatal=no
while read -r package need less; do
	[ -n "$package" ] || continue
	packages="$packages $package"
	is_there "$need" && continue
	missing="$missing $package"
	[ "$less" ] && [ "${1-}" = --if-needed ] || fatal=yes
done <<END
$needs
END

install()
{
	export DEBIAN_FRONTEND=noninteractive
	apt-get -o Acquire::Retries=3 update -q
	# shellcheck disable=SC2086
	apt-get -o Acquire::Retries=3 install -q -y --no-install-recommends "$@"
}

case ${1-} in
--list)
	# shellcheck disable=SC2086
	printf '%s\n' $packages
	;;
--if-needed | --for-check)
	[ -n "$missing" ] || exit 0
	if [ "$(id -u)" -ne 0 ]; then
		echo "kvd: missing:$missing" >&2
		echo "kvd: run this as root: apt-get update && apt-get install -y$missing" >&2
		[ $fatal = no ]
		exit
	fi
	# shellcheck disable=SC2086
	install $missing
	;;
--bench | --metrics | --packages)
	[ -n "$missing" ] || exit 0
	if [ "$(id -u)" -ne 0 ]; then
		echo "kvd: for ${1#--} missing:$missing" >&2
		exit 0
	fi
	# shellcheck disable=SC2086
	install $missing
	;;
'')
	# shellcheck disable=SC2086
	install $packages
	;;
*)
	echo "usage: $0 [--if-needed|--for-check|--list|--bench|--metrics|--packages]" >&2
	exit 2
	;;
esac
