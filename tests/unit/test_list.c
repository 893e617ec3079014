/* SPDX-License-Identifier: Apache-2.0 */
/* The intrusive ring, against an array as model. */
#include "daemon/base/list.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

struct item {
	struct list link;
	char name;
};

/* The ring's names from front to back; the way back must be the mirror. */
static const char *names(struct list *head)
{
	static char text[64];
	struct item *it;
	size_t n = 0;

	list_foreach(it, head, link)
		text[n++] = it->name;
	text[n] = '\0';
	for (struct list *l = head->prev; l != head; l = l->prev)
		assert_int_equal(list_entry(l, struct item, link)->name, text[--n]);
	assert_int_equal(n, 0);
	return text;
}

static void list_push_pop_keep_order(void **state)
{
	struct item a = {.name = 'a'}, b = {.name = 'b'}, c = {.name = 'c'};
	struct list head = LIST_INIT(head);

	(void)state;
	assert_true(list_empty(&head));
	assert_null(list_pop_front(&head));
	assert_null(list_first(&head, struct item, link));
	list_push_back(&head, &b.link);
	list_push_back(&head, &c.link);
	list_push_front(&head, &a.link);
	assert_string_equal(names(&head), "abc");
	assert_ptr_equal(list_first(&head, struct item, link), &a);
	assert_ptr_equal(list_pop_front(&head), &a.link);
	assert_true(list_empty(&a.link)); /* alone again, usable at once */
	list_push_back(&head, &a.link);
	assert_string_equal(names(&head), "bca");
}

static void list_remove_twice_is_harmless(void **state)
{
	struct item a = {.name = 'a'}, b = {.name = 'b'};
	struct list head = LIST_INIT(head);

	(void)state;
	list_push_back(&head, &a.link);
	list_push_back(&head, &b.link);
	list_remove(&a.link);
	list_remove(&a.link);
	assert_string_equal(names(&head), "b");
	list_remove(&b.link);
	assert_true(list_empty(&head));
}

/* Every subset of eight is removed during a walk that must see all eight. */
static void foreach_safe_survives_removal_of_any_subset(void **state)
{
	(void)state;
	for (unsigned int subset = 0; subset < 256; subset++) {
		struct list head = LIST_INIT(head);
		char kept[9] = "", seen[9] = "";
		struct item items[8], *it;
		unsigned int i = 0;

		for (i = 0; i < 8; i++) {
			items[i].name = (char)('a' + i);
			list_push_back(&head, &items[i].link);
		}
		i = 0;
		list_foreach_safe(it, &head, link) {
			seen[strlen(seen)] = it->name;
			if (subset & (1u << i++))
				list_remove(&it->link);
			else
				kept[strlen(kept)] = it->name;
		}
		assert_string_equal(seen, "abcdefgh");
		assert_string_equal(names(&head), kept);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(list_push_pop_keep_order),
		cmocka_unit_test(list_remove_twice_is_harmless),
		cmocka_unit_test(foreach_safe_survives_removal_of_any_subset),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
