# SPDX-License-Identifier: Apache-2.0
# The control socket's own targets: the reference page, fuzzing of its JSON.
.PHONY: fuzz-json

$(B)/reference: $(B)/docs/reference.o $(B)/docs/pages.o $(CORE)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -pie $^ -o $@ $(LIBS)

$(B)/unit/test_reference: $(B)/tests/unit/test_reference.o $(B)/docs/pages.o $(CORE)
	@mkdir -p $(@D)
	$(SAY) LD $@
	$(Q)$(CC) $(CFLAGS) $(LDFLAGS) -pie $^ -o $@ -lcmocka $(LIBS)

FUZZ_JSON_SRC := tests/fuzz/fuzz_json.c proto/json.c proto/json_check.c daemon/base/err.c \
	daemon/base/hex.c daemon/base/mem.c

build/fuzz/fuzz_json: $(FUZZ_JSON_SRC)
	@mkdir -p $(@D)
	$(SAY) CC $@
	$(Q)clang $(CPPFLAGS) -U_FORTIFY_SOURCE -std=gnu11 -O1 -g -fno-omit-frame-pointer \
		-fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined \
		$^ -o $@ -lcjson -lm

fuzz-json: build/fuzz/fuzz_json ## fuzz the check before cJSON (FUZZ_SECONDS)
	$(Q)mkdir -p build/fuzz/corpus/json
	$(Q)$< -max_total_time=$${FUZZ_SECONDS:-60} -timeout=20 -max_len=4096 \
		-artifact_prefix=build/fuzz/ build/fuzz/corpus/json tests/fuzz/corpus/json
