/* SPDX-License-Identifier: Apache-2.0 */
/* How long a breaker stays open. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "daemon/base/breaker.h"

#define S UINT64_C(1000000000)

static void breaker_reopened_stays_open_twice_as_long(void **state)
{
	struct breaker breaker = {0};
	uint64_t now_ns = 5 * S, open_ns = BREAKER_FIRST_NS;

	(void)state;
	assert_int_equal(breaker_state(&breaker, now_ns), BREAKER_CLOSED);
	for (unsigned int i = 0; i < 100; i++) {
		breaker_trip(&breaker, now_ns);
		breaker_trip(&breaker, now_ns + 1); /* it is open: of the same trouble */
		assert_int_equal(breaker_state(&breaker, now_ns + open_ns - 1),
				 BREAKER_OPEN);
		now_ns += open_ns;
		assert_int_equal(breaker_state(&breaker, now_ns), BREAKER_TRIAL);
		if (i % 2) {
			breaker_close(&breaker); /* an answer; the bytes are late again */
			assert_int_equal(breaker_state(&breaker, now_ns), BREAKER_CLOSED);
		}
		open_ns = 2 * open_ns < BREAKER_MOST_NS ? 2 * open_ns : BREAKER_MOST_NS;
	}
}

int main(void)
{
	static const struct CMUnitTest tests[] = {
		cmocka_unit_test(breaker_reopened_stays_open_twice_as_long),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
