# SPDX-License-Identifier: Apache-2.0
# The release tarball, and packages built of it.
.PHONY: dist deb rpm deps-packages test-packages
dist: ## the release tarball of what is committed, in build/dist
	@scripts/dist.sh build/dist

deb: ## Debian packages of what is committed, in build/deb (DEB_BUILD_OPTIONS=nocheck)
	@scripts/deb.sh build/deb

rpm: ## RPM packages of what is committed, in build/rpm
	@scripts/rpm.sh build/rpm

deps-packages: ## install what building, deb and rpm need (as root)
	@scripts/install-deps.sh --if-needed
	@scripts/install-deps.sh --packages

PACKAGE_TESTS := tests/packages/test_rpm.sh tests/packages/test_deb.py
test-packages: ## build packages; install, upgrade, remove and purge them under systemd
	@TEST_TIMEOUT=1800 scripts/run-tests.sh $(B) $(PACKAGE_TESTS)
