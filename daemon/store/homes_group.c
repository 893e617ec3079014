/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/store/homes_group.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/base/text.h"
#include "daemon/cluster/own_groups.h"
#include "daemon/cluster/record.h"
#include "daemon/store/members.h"

#define TOGETHER_NS (500 * LOOP_NS_PER_MS)

static int by_alphabet(const void *a, const void *b)
{
	return strcmp(a, b);
}

/* False: no memory. */
static bool homes_words(const struct homes_group *group, struct text *words)
{
	const struct roster *roster = groups_roster(&group->user);
	cleanup_free struct record *record = mem_alloc(sizeof(*record));
	char(*endpoints)[LINK_ENDPOINT_MAX] =
		mem_calloc(roster->count, LINK_ENDPOINT_MAX);
	const struct roster_entry *entry;
	unsigned int count = 0;

	if (!record || !endpoints) {
		mem_free(endpoints);
		return false;
	}
	list_foreach(entry, &roster->order, link) {
		if (!entry->record || record_read(entry->record, record) < 0 ||
		    record->draining)
			continue;
		groups_dial(group->groups, record, endpoints[count++]);
	}
	err_clear();
	qsort(endpoints, count, LINK_ENDPOINT_MAX, by_alphabet);
	for (unsigned int i = 0; i < count && i < MEMBERS_MAX; i++) {
		text_puts(words, i ? " " : "");
		text_puts(words, endpoints[i]);
	}
	mem_free(endpoints);
	return !words->failed;
}

static void on_homes_timer(struct loop_timer *timer)
{
	struct homes_group *group = container_of(timer, struct homes_group, timer);
	struct text words = {0};

	if (homes_words(group, &words))
		members_set(group->members, words.data ? words.data : "");
	else
		loop_timer_start(timer, TOGETHER_NS);
	text_fini(&words);
	err_clear();
}

/* While the directory is away its last word stands. */
static void homes_on_change(struct groups_user *user)
{
	struct homes_group *group = container_of(user, struct homes_group, user);

	if (groups_known(user) && !loop_timer_running(&group->timer))
		loop_timer_start(&group->timer, TOGETHER_NS);
}

int homes_group_open(struct homes_group *group, struct groups *groups, struct loop *loop,
		     struct members *members)
{
	group->members = members;
	group->user.on_change = homes_on_change;
	loop_timer_init(&group->timer, loop, on_homes_timer);
	group->groups = groups;
	return err_pass(groups_use(groups, OWN_GROUP_HOMES, false, &group->user));
}

void homes_group_close(struct homes_group *group)
{
	if (!group->groups)
		return;
	groups_unuse(&group->user);
	loop_timer_stop(&group->timer);
	group->groups = NULL;
}
