/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who watches a group, and what it is told.
 *
 * A group that changes is due; a timer later its watchers are in `telling`, and each in
 * turn gets a message of what changed after the revision that it was told up to. With
 * more to tell it goes to the end of the line, so a long group does not hold up the
 * others. A line that is full leaves its watcher in `blocked` until the timer's next end.
 * Nothing is queued, so what changed twice meanwhile is told once.
 *
 * A watcher that is further back than the group remembers what has gone begins anew: it
 * is told all, and takes what is not among that for gone. So is one that comes with a
 * revision of another board or another time.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/cluster/board_impl.h"

#define TOLD_BYTES (12u << 10) /* of entries in one message, about: 200 us to read */
#define TOLD_FIXED 512u	       /* of the message besides: no text goes with entries */
#define ENTRY_FIXED (2u + 1u + 2u + 4u * PLACE_AXES + 8u)
#define ENTRY_MAX \
	(ENTRY_FIXED + PLACE_WORKER_MAX + DIRECTORY_RECORD_MAX + DIRECTORY_LOAD_MAX)
#define BLOCKED_TURNS 5u /* a full line is tried again after so many tell_after */

enum { TOLD_GONE = 0, TOLD_RECORD = 1, TOLD_LOAD = 2 };
enum { TOLD_ALL = 1, TOLD_LAST = 2 };

/* ---- watchers ---- */

static struct board_watcher *board_watcher_find(const struct board_owner *owner,
						uint64_t cookie)
{
	struct board_watcher *watcher;

	list_foreach(watcher, &owner->watchers, of_owner) {
		if (watcher->cookie == cookie)
			return watcher;
	}
	return NULL;
}

void board_watcher_free(struct board *board, struct board_watcher *watcher)
{
	list_remove(&watcher->of_owner);
	list_remove(&watcher->of_group);
	list_remove(&watcher->link);
	watcher->owner->watch_count--;
	board->watch_count--;
	board_group_idle(board, watcher->group);
	mem_free(watcher);
}

static int board_watcher_new(struct board *board, struct board_owner *owner,
			     const struct wire_board_watch *m,
			     struct board_watcher **watcher_p)
{
	struct board_group *group;
	struct board_watcher *watcher;

	if (!*m->group || strlen(m->group) >= PLACE_GROUP_MAX)
		return err_raise(ERR_INVAL, "group: 1 to %u bytes", PLACE_GROUP_MAX - 1);
	if ((!owner->local && owner->watch_count >= board->options.owner_watches_max) ||
	    board->watch_count >= board->options.watches_max)
		return err_raise(ERR_LIMIT, "group '%s': %u groups are watched, the cap",
				 m->group, owner->watch_count);
	watcher = mem_zalloc(sizeof(*watcher));
	group = watcher ? board_group_get(board, m->group) : NULL;
	if (!group) {
		mem_free(watcher);
		return err_pass(-ENOMEM);
	}
	watcher->owner = owner;
	watcher->group = group;
	watcher->cookie = m->cookie;
	list_init(&watcher->link);
	list_push_back(&owner->watchers, &watcher->of_owner);
	list_push_back(&group->watchers, &watcher->of_group);
	owner->watch_count++;
	board->watch_count++;
	*watcher_p = watcher;
	return 0;
}

static void tell_soon(struct board *board, struct board_watcher *watcher)
{
	list_remove(&watcher->link);
	list_push_back(&board->telling, &watcher->link);
	loop_defer(board->loop, &board->tell);
}

static void tell_refused(struct board_owner *owner, uint64_t cookie)
{
	struct wire_board_told m = {.cookie = cookie};
	uint8_t buf[TOLD_FIXED];
	struct cursor c;

	m.code = (uint32_t)err_last()->code;
	snprintf(m.text, sizeof(m.text), "%s", err_last()->text);
	err_clear();
	cursor_write(&c, buf, sizeof(buf));
	if (wire_board_told_put(&c, &m) < 0 ||
	    board_say(owner, WIRE_T_BOARD_TOLD, buf, c.pos) < 0)
		err_clear(); /* it asks again */
}

int board_on_watch(struct board *board, struct board_owner *owner, struct cursor *body)
{
	struct board_watcher *watcher;
	struct wire_board_watch m;
	int r = wire_board_watch_get(body, &m);

	if (r < 0)
		return err_pass(r);
	watcher = board_watcher_find(owner, m.cookie);
	if (watcher && strcmp(watcher->group->name, m.group) != 0) {
		board_watcher_free(board, watcher);
		watcher = NULL;
	}
	if (!watcher && board_watcher_new(board, owner, &m, &watcher) < 0) {
		tell_refused(owner, m.cookie);
		return 0;
	}
	watcher->loads = m.loads;
	watcher->sent = watcher->base = m.since;
	watcher->fresh = !roster_knows(&watcher->group->roster, m.since);
	watcher->begun = watcher->synced = false;
	tell_soon(board, watcher);
	return 0;
}

int board_on_unwatch(struct board *board, struct board_owner *owner, struct cursor *body)
{
	struct wire_board_unwatch m;
	struct board_watcher *watcher;
	int r = wire_board_unwatch_get(body, &m);

	if (r < 0)
		return err_pass(r);
	watcher = board_watcher_find(owner, m.cookie);
	if (watcher)
		board_watcher_free(board, watcher);
	return 0;
}

/* ---- telling ---- */

static void entry_put(struct cursor *out, const struct roster_entry *entry,
		      unsigned int what)
{
	size_t record = what & TOLD_RECORD ? strlen(entry->record) : 0;
	size_t load = what & TOLD_LOAD && entry->load ? strlen(entry->load) : 0;

	cursor_put_u16(out, (uint16_t)(ENTRY_FIXED - 2 + strlen(entry->place.worker) +
				       record + load));
	cursor_put_u8(out, (uint8_t)what);
	cursor_put_str(out, entry->place.worker);
	for (unsigned int i = 0; i < PLACE_AXES; i++)
		cursor_put_u32(out, entry->place.rank[i]);
	cursor_put_blob(out, entry->record, record);
	cursor_put_blob(out, entry->load, load);
}

/* What of the entry is new to the watcher; -1: nothing. */
static int what_of(const struct board_watcher *watcher, const struct roster_entry *entry)
{
	bool record = watcher->fresh || entry->record_rev > watcher->base;
	bool load = watcher->loads && entry->load &&
		    (record || entry->load_rev > watcher->base);

	/* of one that is told all: what has gone since that began */
	if (!entry->record)
		return entry->record_rev > watcher->base ? TOLD_GONE : -1;
	if (!record && !load)
		return -1;
	return (record ? TOLD_RECORD : 0) | (load ? TOLD_LOAD : 0);
}

struct telling {
	struct cursor out; /* entries */
	uint32_t count;
	uint64_t reached;
	const struct roster_entry *at; /* the last one; NULL: none */
	bool last;
};

/* As many as go into one message. */
static void told_fill(const struct board_watcher *watcher, struct telling *t)
{
	const struct roster *roster = &watcher->group->roster;
	const struct roster_entry *entry =
		watcher->fresh && !watcher->begun
			? roster_after(roster, 0)
			: roster_behind(roster, watcher->sent, &watcher->last);

	cursor_put_u32(&t->out, 0);
	t->reached = watcher->sent;
	for (; entry && t->out.pos < TOLD_BYTES; entry = roster_next(roster, entry)) {
		int what = what_of(watcher, entry);

		t->reached = entry->changed;
		t->at = entry;
		if (what < 0)
			continue;
		entry_put(&t->out, entry, (unsigned int)what);
		t->count++;
	}
	t->last = !entry;
	if (t->last)
		t->reached = roster->rev;
}

static int told_send(const struct board *board, const struct board_watcher *watcher,
		     struct telling *t)
{
	static uint8_t body[TOLD_BYTES + ENTRY_MAX + TOLD_FIXED];
	uint64_t now_ns = loop_now_ns(board->loop);
	struct wire_board_told m = {.cookie = watcher->cookie, .revision = t->reached};
	struct cursor c;
	int r;

	if (board->young_until_ns > now_ns)
		m.young_ms = (board->young_until_ns - now_ns) / LOOP_NS_PER_MS;
	m.flags = (uint8_t)((watcher->fresh && !watcher->begun ? TOLD_ALL : 0) |
			    (t->last ? TOLD_LAST : 0));
	cursor_write(&c, t->out.base, sizeof(uint32_t));
	cursor_put_u32(&c, t->count);
	m.entries = (struct wire_blob){t->out.base, t->out.pos};
	cursor_write(&c, body, sizeof(body));
	r = wire_board_told_put(&c, &m);
	if (r == 0)
		r = board_say(watcher->owner, WIRE_T_BOARD_TOLD, body, c.pos);
	return err_pass(r);
}

/* Is all remembered that has gone and that it is still to be told? */
static bool watcher_keeps_up(const struct board_watcher *watcher)
{
	uint64_t from = watcher->sent;

	if (watcher->fresh && !watcher->begun)
		return true; /* it is told what is there */
	if (watcher->fresh && watcher->base > from)
		from = watcher->base;
	return roster_knows(&watcher->group->roster, from);
}

/* One message. False: its line has no room now. */
static bool watcher_tell(struct board *board, struct board_watcher *watcher)
{
	static uint8_t entries[TOLD_BYTES + ENTRY_MAX];
	const struct roster *roster = &watcher->group->roster;
	struct telling t = {.count = 0};

	if (!watcher_keeps_up(watcher)) {
		watcher->fresh = true;
		watcher->begun = false;
	}
	if (watcher->fresh && !watcher->begun)
		watcher->base = roster->rev;
	cursor_write(&t.out, entries, sizeof(entries));
	told_fill(watcher, &t);
	/* loads alone changed, and it wants none: that is no message */
	if (!t.count && t.last && watcher->synced && !watcher->fresh) {
		watcher->sent = watcher->base = t.reached;
		return true;
	}
	if (told_send(board, watcher, &t) < 0) {
		err_clear();
		return false;
	}
	watcher->sent = t.reached;
	if (t.at)
		watcher->last = t.at->place;
	watcher->begun = true;
	if (!t.last) {
		tell_soon(board, watcher);
		return true;
	}
	watcher->base = watcher->sent;
	watcher->fresh = watcher->begun = false;
	watcher->synced = true;
	return true;
}

static void tell_timer_start(struct board *board, unsigned int turns)
{
	if (!loop_timer_running(&board->tell_timer))
		loop_timer_start(&board->tell_timer,
				 turns * board->options.tell_after_ns);
}

static void board_on_tell(struct loop_defer *defer)
{
	struct board *board = container_of(defer, struct board, tell);
	struct list *link;

	while ((link = list_pop_front(&board->telling))) {
		struct board_watcher *watcher =
			list_entry(link, struct board_watcher, link);

		if (!watcher_tell(board, watcher)) {
			list_push_back(&board->blocked, &watcher->link);
			tell_timer_start(board, BLOCKED_TURNS);
		}
		if (loop_enough(board->loop))
			break;
	}
	if (!list_empty(&board->telling))
		loop_defer(board->loop, &board->tell);
}

static void on_tell_timer(struct loop_timer *timer)
{
	struct board *board = container_of(timer, struct board, tell_timer);
	struct board_watcher *watcher;
	struct list *link;

	while ((link = list_pop_front(&board->due))) {
		const struct board_group *group =
			list_entry(link, struct board_group, due_link);

		list_foreach(watcher, &group->watchers, of_group)
			tell_soon(board, watcher);
	}
	list_foreach_safe(watcher, &board->blocked, link)
		tell_soon(board, watcher);
}

void board_group_changed(struct board *board, struct board_group *group)
{
	if (list_empty(&group->watchers))
		return;
	list_remove(&group->due_link);
	list_push_back(&board->due, &group->due_link);
	tell_timer_start(board, 1);
}

void board_tell_init(struct board *board)
{
	list_init(&board->due);
	list_init(&board->telling);
	list_init(&board->blocked);
	loop_timer_init(&board->tell_timer, board->loop, on_tell_timer);
	loop_defer_init(&board->tell, board_on_tell);
}

void board_tell_fini(struct board *board)
{
	loop_timer_stop(&board->tell_timer);
	loop_defer_cancel(&board->tell);
}
