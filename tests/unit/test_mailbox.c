/* SPDX-License-Identifier: Apache-2.0 */
/* Items from other threads: each comes once for a put, in order, on the loop. */
#include "daemon/loop/mailbox.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "daemon/base/mem.h"
#include "daemon/base/thread.h"

#define ITEMS 10000u

struct item {
	struct list link;
	unsigned int number;
};

static struct loop *loop;
static struct mailbox box;
static struct item items[ITEMS];
static unsigned int came, again;

static void on_item(struct mailbox *b, struct list *link)
{
	struct item *item = list_entry(link, struct item, link);

	assert_ptr_equal(b, &box);
	assert_int_equal(item->number, came % ITEMS);
	came++;
	if (again > 0) {
		again--;
		came--;
		mailbox_post(b, link);
	}
}

static int begin(void **state)
{
	(void)state;
	came = again = 0;
	for (unsigned int i = 0; i < ITEMS; i++) {
		items[i].number = i;
		list_init(&items[i].link);
	}
	assert_int_equal(loop_new(&loop), 0);
	assert_int_equal(mailbox_init(&box, loop, on_item), 0);
	return 0;
}

static int end(void **state)
{
	(void)state;
	mailbox_fini(&box);
	mailbox_fini(&box); /* a zeroed one, too */
	loop_free(loop);
	return 0;
}

static void *put_all(void *arg)
{
	for (unsigned int i = 0; i < ITEMS; i++)
		mailbox_put(&box, &items[i].link);
	return arg;
}

static void items_of_a_thread_arrive_in_order(void **state)
{
	pthread_t thread;

	(void)state;
	for (unsigned int round = 1; round <= 3; round++) {
		assert_int_equal(thread_start("putter", put_all, NULL, &thread), 0);
		while (came < round * ITEMS)
			loop_turn(loop, LOOP_NS_PER_S);
		pthread_join(thread, NULL);
	}
	assert_int_equal(came, 3 * ITEMS);
}

static void item_present_is_put_once(void **state)
{
	(void)state;
	mailbox_put(&box, &items[0].link);
	mailbox_put(&box, &items[0].link);
	mailbox_post(&box, &items[0].link);
	mailbox_deliver(&box);
	mailbox_deliver(&box);
	assert_int_equal(came, 1);
}

static void item_put_by_its_own_call_is_called_again(void **state)
{
	(void)state;
	again = 2;
	mailbox_put(&box, &items[0].link);
	while (came < 1)
		loop_turn(loop, LOOP_NS_PER_S);
	assert_int_equal(again, 0);
}

static void item_removed_is_not_called(void **state)
{
	(void)state;
	mailbox_put(&box, &items[1].link);
	mailbox_put(&box, &items[0].link);
	mailbox_forget(&box, &items[1].link);
	mailbox_forget(&box, &items[1].link);
	mailbox_deliver(&box);
	assert_int_equal(came, 1);
	mailbox_put(&box, &items[1].link); /* left there: dropped by the end */
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(items_of_a_thread_arrive_in_order, begin,
						end),
		cmocka_unit_test_setup_teardown(item_present_is_put_once, begin, end),
		cmocka_unit_test_setup_teardown(item_put_by_its_own_call_is_called_again,
						begin, end),
		cmocka_unit_test_setup_teardown(item_removed_is_not_called, begin, end),
	};

	return cmocka_run_group_tests_name("mailbox", tests, NULL, NULL);
}
