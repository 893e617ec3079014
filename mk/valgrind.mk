# SPDX-License-Identifier: Apache-2.0
# Unit tests under valgrind's memcheck: it sees what is read before it was written, which
# no sanitizer of gcc does. Without those that it cannot run, each with its reason:
#   rules that judge times or have threads that spin   test_copy* loop* shm_fence ...
VALGRIND_SKIP ?=
VALGRIND_TESTS = $(filter-out $(VALGRIND_SKIP:%=$(B)/unit/test_%),$(UNIT_BIN))
.PHONY: valgrind
