/* SPDX-License-Identifier: Apache-2.0 */
/* fuzz: what every target has. */
#ifndef KVD_TESTS_FUZZ_LIB_FUZZ_H
#define KVD_TESTS_FUZZ_LIB_FUZZ_H

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#endif
