/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/store/homes_group.h"

#include <stdlib.h>
#include <string.h>

#include "daemon/base/context.h"
#include "daemon/base/text.h"
#include "daemon/store/members.h"

#define TOGETHER_NS (500 * LOOP_NS_PER_MS)

static int by_alphabet(const void *a, const void *b)
{
	return strcmp(a, b);
}

struct homes_found {
	struct text all; /* LINK_ENDPOINT_MAX bytes each */
	size_t count;
};

static void on_home_found(void *arg, const char *endpoint)
{
	struct homes_found *found = arg;
	char padded[LINK_ENDPOINT_MAX] = "";

	memcpy(padded, endpoint, strnlen(endpoint, sizeof(padded) - 1));
	text_put(&found->all, padded, sizeof(padded));
	found->count++;
}

/* Outcome 1: they are not known yet. */
static int homes_words(const struct homes_group *group, struct text *words)
{
	struct homes_found found = {.count = 0};
	int r = group->names->each(&group->user, on_home_found, &found);

	if (r == 0 && found.all.failed)
		r = err_raise(ERR_NOMEM, "out of memory for index nodes");
	if (r == 0 && found.count)
		qsort(found.all.data, found.count, LINK_ENDPOINT_MAX, by_alphabet);
	for (size_t i = 0; r == 0 && i < found.count && i < MEMBERS_MAX; i++) {
		text_puts(words, i ? " " : "");
		text_puts(words, found.all.data + i * LINK_ENDPOINT_MAX);
	}
	text_fini(&found.all);
	if (r == 0 && words->failed)
		r = err_raise(ERR_NOMEM, "out of memory for index nodes");
	return r < 0 ? err_pass(r) : r;
}

static void on_homes_timer(struct loop_timer *timer)
{
	struct homes_group *group = container_of(timer, struct homes_group, timer);
	struct text words = {0};
	int r = homes_words(group, &words);

	if (r == 0)
		members_set(group->members, words.data ? words.data : "");
	else if (r < 0)
		loop_timer_start(timer, TOGETHER_NS);
	text_fini(&words);
	err_clear();
}

/* While the directory is unavailable the last list is used. */
static void homes_on_change(struct names_user *user)
{
	struct homes_group *group = container_of(user, struct homes_group, user);

	if (!loop_timer_running(&group->timer))
		loop_timer_start(&group->timer, TOGETHER_NS);
}

int homes_group_open(struct homes_group *group, const struct kvd *kvd,
		     struct members *members)
{
	int r;

	group->members = members;
	group->user.on_change = homes_on_change;
	loop_timer_init(&group->timer, kvd->loop, on_homes_timer);
	r = names_get(kvd, &group->names);
	return r < 0 ? err_pass(r)
		     : err_pass(group->names->use(kvd, NAMES_HOMES, &group->user));
}

void homes_group_close(struct homes_group *group)
{
	if (!group->names)
		return;
	group->names->unuse(&group->user);
	loop_timer_stop(&group->timer);
	group->names = NULL;
}
