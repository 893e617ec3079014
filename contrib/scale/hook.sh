#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# hook.sh: an example for `python -m kvd.router scale --hook` with systemd units of this host:
# prefill@0 to prefill@N-1 and decode@0 to decode@N-1 run. A worker must drain before it stops: its
# unit's ExecStop (kvd-ctl drain --wait) and TimeoutStopSec ensure that; --no-block does not wait.
set -eu
systemctl=${SYSTEMCTL:-systemctl}

follow() {
	unit=$1 wanted=$2 n=0
	while [ "$n" -lt "$wanted" ]; do
		"$systemctl" --no-block start "$unit@$n"
		n=$((n + 1))
	done
	# stop running units from number `wanted` on
	while "$systemctl" --quiet is-active "$unit@$n"; do
		"$systemctl" --no-block stop "$unit@$n"
		n=$((n + 1))
	done
}

follow prefill "$KVD_SCALE_PREFILL"
follow decode "$KVD_SCALE_DECODE"
