/* SPDX-License-Identifier: Apache-2.0 */
/* How busy a GPU is, over a library of the tests' own. */
#include "gpu/nvml.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "tests/lib/gpu_owner.h"

#define FIRST "GPU-00000000-0000-0000-0000-000000000001"
#define PART "GPU-00000000-0000-0000-0000-000000000002"

static char driver[256];

static void library_is_found_next_to_the_driver(void **state)
{
	struct nvml nvml;

	(void)state;
	assert_true(nvml_load("/nowhere/libcuda.so.1", &nvml) < 0);
	assert_int_equal(err_last()->code, ERR_REQUIRE);
	assert_non_null(strstr(err_last()->text, "/nowhere/" NVML_LIBRARY));
	err_clear();
	nvml_unload(&nvml);
	assert_int_equal(nvml_load(driver, &nvml), 0);
	nvml_unload(&nvml);
	nvml_unload(&nvml);
}

static void use_is_read_by_uuid(void **state)
{
	struct nvml_use use = {0};
	struct nvml nvml;

	(void)state;
	assert_int_equal(nvml_load(driver, &nvml), 0);
	assert_int_equal(nvml_read(&nvml, FIRST, &use), 0);
	assert_true(use.busy > 0.929 && use.busy < 0.931);
	assert_true(use.used == 71000000000 && use.total == 80000000000);
	/* a part of a GPU tells no rates, and its memory all the same */
	assert_int_equal(nvml_read(&nvml, PART, &use), 0);
	assert_true(use.busy < 0 && use.used == 71000000000);
	assert_true(nvml_read(&nvml, "GPU-none", &use) < 0);
	assert_int_equal(err_last()->code, ERR_IO);
	assert_non_null(strstr(err_last()->text, "Not Found (6)"));
	err_clear();
	nvml_unload(&nvml);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(library_is_found_next_to_the_driver),
		cmocka_unit_test(use_is_read_by_uuid),
	};

	gpu_fake_path("", driver);
	return cmocka_run_group_tests(tests, NULL, NULL);
}
