/* SPDX-License-Identifier: Apache-2.0 */
/* What top makes of two looks at a daemon with as many rooms as an answer may have. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "ctl/top.h"
#include "daemon/room/commands_room.h"

/* A room of `gen` in which so much has moved; 0: a request, which has no generation. */
static void add_room(cJSON *rooms, unsigned int gen, double bytes)
{
	cJSON *room = cJSON_CreateObject();
	char text[16];

	snprintf(text, sizeof(text), "%u", gen);
	cJSON_AddItemToArray(rooms, room);
	cJSON_AddStringToObject(room, "room", "7");
	cJSON_AddStringToObject(room, "role", "recv");
	if (gen)
		cJSON_AddStringToObject(room, "generation", text);
	cJSON_AddNumberToObject(room, "bytes", bytes);
}

static cJSON *look(struct top *top)
{
	struct top_sample *sample = &top->samples[top->next++];

	sample->at_s = 2.0 * top->next;
	sample->rooms = cJSON_CreateObject();
	top->count = top->next;
	return cJSON_AddArrayToObject(sample->rooms, "rooms");
}

static void rates_of_rooms_are_of_the_room_of_before(void **state)
{
	static struct top top = {.limit = ROOM_LIST_MAX};
	struct top_view view;
	cJSON *before = look(&top), *now = look(&top);
	unsigned int rates = 0;

	(void)state;
	/* one more each time, in another order */
	for (unsigned int gen = 1; gen < ROOM_LIST_MAX; gen++)
		add_room(before, gen, 1000);
	for (unsigned int gen = ROOM_LIST_MAX; gen > 1; gen--)
		add_room(now, gen, 1000 + 2.0 * gen);
	add_room(before, 0, 0);
	add_room(now, 0, 0);
	assert_int_equal(top_view_make(&top, &view), 0);
	assert_int_equal(view.room_count, ROOM_LIST_MAX);
	for (size_t i = 0; i < view.room_count; i++) {
		double gen = ctl_num(view.rooms[i].json, "generation");

		if (gen == 0 || gen == ROOM_LIST_MAX) {
			assert_true(isnan(view.rooms[i].rate));
			continue;
		}
		assert_true(view.rooms[i].rate == gen);
		rates++;
	}
	assert_int_equal(rates, ROOM_LIST_MAX - 2);
	top_view_free(&view);
	top_fini(&top);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(rates_of_rooms_are_of_the_room_of_before),
	};

	cmocka_set_test_filter(getenv("KVD_TEST_FILTER"));
	return cmocka_run_group_tests_name("top_view", tests, NULL, NULL);
}
