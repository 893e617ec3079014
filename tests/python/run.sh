#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Run the Python tests in the virtual environment that mk/python.mk made, and print the
# counts that mk/test.mk wants. Arguments go to pytest.
cd "$(dirname "$0")/../.." || exit 1
dir=build/python
if [ ! -e $dir/installed ]; then
	cat $dir/why 2>/dev/null || echo "build/python/installed"
	exit 77
fi
# a summary's line that is not cut
export COLUMNS=300
exec $dir/venv/bin/python -m pytest -q -p no:cacheprovider -p tests.python.counts -p tests.python.shard \
	-W error::pytest.PytestUnraisableExceptionWarning tests/python "$@"
