/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A board is reached by a peering, or by a line of its own when it is this daemon's. Such
 * a site is up or not.
 *
 * Watches are all at one site, `reading`: the first that is up, for as long as it is. A
 * watch has the revision that the site told last, and asks for what changed since when it
 * meets the same board again, which is known by its daemon's instance. Else it is told
 * all; what is not among that has gone, at once, or, of a board that began lately, when
 * its publishers have had the time to come back.
 */
#include "daemon/cluster/board_directory_impl.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"

#define KNOWN_MAX 65536u /* entries of one watch */
#define YOUNG_MS_MAX 600000u
#define ENTRY_MIN 29u /* bytes of one in BOARD_TOLD */

enum { TOLD_RECORD = 1, TOLD_LOAD = 2 }; /* of an entry */
enum { TOLD_ALL = 1, TOLD_LAST = 2 };	 /* of the message */

struct board_reader {
	struct watch *watch; /* NULL: ended, while it is told */
	struct board_directory *directory;
	struct list link;
	char group[PLACE_GROUP_MAX];
	bool loads;
	uint64_t cookie, revision;
	uint8_t instance[16];	 /* of the board that told that */
	struct roster roster;	 /* what its owner was told */
	uint64_t stale_until_ns; /* what is stale goes then; 0: nothing is */
	bool asked, answered;	 /* at `reading` */
	bool telling;
	bool again;   /* there was no memory for an entry: all is asked for once more */
	bool syncing; /* it asked, and was not told the last of it */
};

static const struct directory_ops board_ops;

struct board_directory *board_directory_of(const struct directory *directory)
{
	assert(directory->ops == &board_ops);
	return container_of((struct directory *)(uintptr_t)directory,
			    struct board_directory, base);
}

int board_site_say(struct board_site *site, enum wire_type type, const void *body,
		   size_t len)
{
	if (site->own)
		return err_pass(board_local_say(&site->local, type, body, len));
	return err_pass(peer_send_reliable(site->peer, type, body, len));
}

void board_tick_start(struct board_directory *d)
{
	if (!loop_timer_running(&d->tick))
		loop_timer_start(&d->tick, d->lease_ns / 3 + LOOP_NS_PER_MS);
}

/* ---- reading ---- */

static void reader_ask(struct board_reader *reader)
{
	const struct board_site *site = reader->directory->reading;
	struct wire_board_watch m = {.cookie = reader->cookie, .loads = reader->loads};
	static const uint8_t own[16];
	const uint8_t *instance;
	uint8_t body[WIRE_STR_MAX + 64];
	struct cursor c;

	reader->asked = reader->answered = false;
	reader->syncing = true;
	if (reader->again)
		reader->revision = 0;
	reader->again = false;
	if (!site)
		return;
	instance = site->own ? own : site->peer->instance;
	if (memcmp(reader->instance, instance, sizeof(reader->instance)) != 0)
		reader->revision = 0;
	memcpy(reader->instance, instance, sizeof(reader->instance));
	m.since = reader->revision;
	snprintf(m.group, sizeof(m.group), "%s", reader->group);
	cursor_write(&c, body, sizeof(body));
	if (wire_board_watch_put(&c, &m) < 0 ||
	    board_site_say((struct board_site *)(uintptr_t)site, WIRE_T_BOARD_WATCH, body,
			   c.pos) < 0) {
		err_clear();
		board_tick_start(reader->directory);
		return;
	}
	reader->asked = true;
	board_tick_start(reader->directory); /* it may stay without an answer */
}

static int board_watch(struct directory *directory, struct watch *watch,
		       const char *group, bool loads)
{
	struct board_directory *d = board_directory_of(directory);
	struct board_reader *reader;

	assert(!watch->impl);
	if (!*group || strlen(group) >= sizeof(reader->group))
		return err_raise(ERR_INVAL, "group: 1 to %u bytes", PLACE_GROUP_MAX - 1);
	reader = mem_zalloc(sizeof(*reader));
	if (!reader)
		return err_pass(-ENOMEM);
	reader->watch = watch;
	reader->directory = d;
	reader->loads = loads;
	reader->cookie = ++d->cookies;
	snprintf(reader->group, sizeof(reader->group), "%s", group);
	roster_init(&reader->roster, 1);
	watch->impl = reader;
	list_push_back(&d->readers, &reader->link);
	reader_ask(reader);
	return 0;
}

static void reader_free(struct board_reader *reader)
{
	struct wire_board_unwatch m = {.cookie = reader->cookie};
	struct board_site *site = reader->directory->reading;
	uint8_t body[16];
	struct cursor c;

	cursor_write(&c, body, sizeof(body));
	if (site && reader->asked &&
	    (wire_board_unwatch_put(&c, &m) < 0 ||
	     board_site_say(site, WIRE_T_BOARD_UNWATCH, body, c.pos) < 0))
		err_clear(); /* it ends with the peering */
	if (reader->watch)
		reader->watch->impl = NULL;
	roster_fini(&reader->roster);
	list_remove(&reader->link);
	mem_free(reader);
}

/* Not under way, where it is being told: its owner may end it in any call. */
static void board_unwatch(struct watch *watch)
{
	struct board_reader *reader = watch->impl;

	if (!reader)
		return;
	watch->impl = NULL;
	reader->watch = NULL;
	if (!reader->telling)
		reader_free(reader);
}

/* ---- what a board tells ---- */

static void reader_tell(struct board_reader *reader, const struct roster_entry *entry)
{
	reader->directory->state.events++;
	if (reader->watch)
		reader->watch->on_entry(reader->watch, &entry->place, entry->record,
					entry->load);
}

static void reader_on_gone(void *arg, const struct place *place)
{
	struct board_reader *reader = arg;

	reader->directory->state.events++;
	if (reader->watch)
		reader->watch->on_entry(reader->watch, place, NULL, NULL);
}

/* What was there before, and was not told again. */
static void reader_sweep(struct board_reader *reader)
{
	reader->stale_until_ns = 0;
	roster_sweep(&reader->roster, reader_on_gone, reader);
}

struct told_entry {
	struct place place;
	unsigned int what;
	char record[DIRECTORY_RECORD_MAX + 1], load[DIRECTORY_LOAD_MAX + 1];
};

static bool told_text(struct cursor *c, size_t max, char *text)
{
	size_t len;
	const void *bytes = cursor_get_blob(c, UINT16_MAX, &len);

	*text = '\0';
	if (c->bad || len >= max || (len && memchr(bytes, '\0', len)))
		return false;
	memcpy(text, bytes, len);
	text[len] = '\0';
	return true;
}

/* False: it is none that could be used. A message that is too short is `in->bad`. */
static bool told_get(struct cursor *in, const char *group, struct told_entry *entry)
{
	size_t len = cursor_get_u16(in);
	const void *bytes = cursor_get_bytes(in, len);
	char worker[WIRE_STR_MAX];
	bool good;
	struct cursor c;

	if (!bytes)
		return false;
	cursor_read(&c, bytes, len);
	entry->what = cursor_get_u8(&c);
	cursor_get_str(&c, worker, sizeof(worker));
	for (unsigned int i = 0; i < PLACE_AXES; i++)
		entry->place.rank[i] = cursor_get_u32(&c);
	good = told_text(&c, sizeof(entry->record), entry->record);
	good = told_text(&c, sizeof(entry->load), entry->load) && good;
	in->bad |= c.bad;
	snprintf(entry->place.group, sizeof(entry->place.group), "%s", group);
	snprintf(entry->place.worker, sizeof(entry->place.worker), "%.*s",
		 (int)sizeof(entry->place.worker) - 1,
		 strlen(worker) < sizeof(entry->place.worker) ? worker : "-");
	if (c.bad || !good || place_check(&entry->place) < 0 ||
	    (entry->what & TOLD_RECORD && !*entry->record)) {
		err_clear();
		return false;
	}
	return true;
}

static void reader_take(struct board_reader *reader, const struct told_entry *told)
{
	struct roster_entry *entry = roster_find(&reader->roster, &told->place);
	int r;

	if (!told->what) {
		if (entry) {
			roster_drop(&reader->roster, entry);
			reader_on_gone(reader, &told->place);
		}
		return;
	}
	/* a load of what is not known, or one too many */
	if (!entry &&
	    (!(told->what & TOLD_RECORD) || reader->roster.count >= KNOWN_MAX)) {
		reader->directory->state.refused++;
		return;
	}
	r = roster_put(&reader->roster, &told->place,
		       told->what & TOLD_RECORD ? told->record : NULL,
		       told->what & TOLD_LOAD ? told->load : NULL, &entry);
	if (r < 0) {
		err_clear();
		reader->again = true;
		return;
	}
	if (r > 0)
		reader_tell(reader, entry);
}

static void reader_end_round(struct board_reader *reader, uint64_t young_ms)
{
	struct board_directory *d = reader->directory;
	bool stale = roster_has_stale(&reader->roster);

	if (stale && young_ms) {
		if (young_ms > YOUNG_MS_MAX)
			young_ms = YOUNG_MS_MAX;
		reader->stale_until_ns = loop_now_ns(d->loop) + young_ms * LOOP_NS_PER_MS;
		board_tick_start(d);
	} else if (stale) {
		reader_sweep(reader);
	}
	if (!reader->syncing)
		return;
	reader->syncing = false;
	if (reader->watch && reader->watch->on_synced)
		reader->watch->on_synced(reader->watch);
}

/* Its owner may have ended it in a call. */
static void reader_told(struct board_reader *reader)
{
	reader->telling = false;
	if (!reader->watch)
		reader_free(reader);
}

static int reader_hear(struct board_reader *reader, const struct wire_board_told *m)
{
	static struct told_entry entry; /* loop's thread; on_entry() hears nothing */
	struct cursor c;
	uint32_t count;

	cursor_read(&c, m->entries.data, m->entries.len);
	count = cursor_get_count(&c, KNOWN_MAX, ENTRY_MIN);
	if (m->flags & TOLD_ALL)
		roster_mark(&reader->roster);
	for (uint32_t i = 0; i < count && !c.bad && reader->watch; i++) {
		if (told_get(&c, reader->group, &entry))
			reader_take(reader, &entry);
		else
			reader->directory->state.refused++;
	}
	if (c.bad)
		return err_pass(cursor_check(&c, "BOARD_TOLD: field entries"));
	if (reader->again)
		board_tick_start(reader->directory); /* the next round has it */
	if (!(m->flags & TOLD_LAST) || reader->again)
		return 0;
	/* not before: what is told later may have a record from before what was told */
	reader->revision = m->revision;
	if (reader->watch)
		reader_end_round(reader, m->young_ms);
	return 0;
}

static int on_told(struct board_site *site, struct cursor *body)
{
	struct board_directory *d = site->directory;
	struct board_reader *reader, *found = NULL;
	struct wire_board_told m;
	int r = wire_board_told_get(body, &m);

	if (r < 0)
		return err_pass(r);
	list_foreach(reader, &d->readers, link) {
		if (reader->cookie == m.cookie)
			found = reader;
	}
	if (!found || site != d->reading || !found->watch)
		return 0; /* of a watch that has ended, or from where it was */
	if (m.code) {
		log_warn("cluster", site->endpoint, "a group is not told",
			 "group='%s' why='%s'", found->group, m.text);
		found->asked = false;
		board_tick_start(d);
		return 0;
	}
	found->answered = true;
	found->telling = true;
	r = reader_hear(found, &m);
	reader_told(found);
	return r < 0 ? err_pass(r) : 0;
}

/* ---- sites come and go ---- */

static void state_set(struct board_directory *d)
{
	bool up = d->reading != NULL;

	if (d->state.up == up)
		return;
	d->state.up = up;
	d->state.since_ns = loop_now_ns(d->loop);
	d->state.reconnects += up;
	if (d->base.on_state)
		d->base.on_state(d->base.arg);
}

static void reading_choose(struct board_directory *d)
{
	struct board_reader *reader;

	if (d->reading && d->reading->up)
		return;
	d->reading = NULL;
	for (unsigned int i = 0; i < d->count && !d->reading; i++)
		d->reading = d->sites[i].up ? &d->sites[i] : NULL;
	list_foreach(reader, &d->readers, link)
		reader_ask(reader);
}

static void site_up(struct board_site *site)
{
	struct board_directory *d = site->directory;

	site->up = true;
	site->why.code = ERR_OK;
	board_said_site_up(site);
	reading_choose(d);
	state_set(d);
}

static void site_down(struct board_site *site, const struct err *why)
{
	struct board_directory *d = site->directory;

	site->why = *why;
	d->state.why = *why;
	if (!site->up)
		return;
	site->up = false;
	board_said_site_down(site);
	reading_choose(d);
	state_set(d);
}

static void site_peer_up(struct board_site *site)
{
	struct err why;

	if (site->peer->features & PEER_FEATURE_BOARD) {
		site_up(site);
		return;
	}
	err_set(&why, ERR_VERSION,
		"the daemon at %.100s (%s) is older, and keeps no such board: upgrade it "
		"first",
		site->endpoint, site->peer->product);
	log_warn("cluster", site->endpoint, "the directory's daemon is too old",
		 "version='%s'", site->peer->product);
	site_down(site, &why);
}

static struct board_site *site_of(struct board_directory *d, const struct peer *peer)
{
	for (unsigned int i = 0; i < d->count; i++) {
		if (d->sites[i].peer == peer)
			return &d->sites[i];
	}
	return NULL;
}

void board_directory_peer_up(struct directory *directory, struct peer *peer)
{
	struct board_site *site = site_of(board_directory_of(directory), peer);

	if (site)
		site_peer_up(site);
}

void board_directory_peer_down(struct directory *directory, const struct peer *peer)
{
	struct board_site *site = site_of(board_directory_of(directory), peer);

	if (site)
		site_down(site, &peer->why);
}

void board_directory_peer_refused(struct directory *directory, const struct peer *peer)
{
	board_directory_peer_down(directory, peer);
}

int board_directory_on_message(struct directory *directory, const struct peer *peer,
			       unsigned int type, struct cursor *body)
{
	struct board_site *site = site_of(board_directory_of(directory), peer);

	if (!site)
		return 0;
	return err_pass(type == WIRE_T_BOARD_ACK ? board_said_on_ack(site, body)
						 : on_told(site, body));
}

static void on_hear(struct board_local *local, unsigned int type, struct cursor *body)
{
	struct board_site *site = container_of(local, struct board_site, local);
	int r = 0;

	if (type == WIRE_T_BOARD_ACK)
		r = board_said_on_ack(site, body);
	else if (type == WIRE_T_BOARD_TOLD)
		r = on_told(site, body);
	if (r < 0)
		err_clear(); /* this daemon wrote it: no memory, or a bad entry */
}

static void board_on_tick(struct loop_timer *timer)
{
	struct board_directory *d = container_of(timer, struct board_directory, tick);
	uint64_t now_ns = loop_now_ns(d->loop);
	struct board_reader *reader;
	bool more = board_said_again(d);

	list_foreach_safe(reader, &d->readers, link) {
		if (reader->stale_until_ns && reader->stale_until_ns <= now_ns) {
			reader->telling = true;
			reader_sweep(reader);
			reader_told(reader);
			continue;
		}
		more |= reader->stale_until_ns != 0;
		if (d->reading &&
		    (!reader->asked || !reader->answered || reader->again)) {
			reader_ask(reader);
			more = true;
		}
	}
	if (more)
		board_tick_start(d);
}

/* ---- the whole ---- */

static void on_start(struct loop_defer *defer)
{
	struct board_directory *d = container_of(defer, struct board_directory, start);

	for (unsigned int i = 0; i < d->count; i++) {
		struct board_site *site = &d->sites[i];

		if (site->own)
			site_up(site);
		else if (sm_state(&site->peer->sm) == PEER_UP)
			site_peer_up(site);
	}
}

static int site_open(struct board_directory *d, const struct board_directory_args *args,
		     const char *endpoint)
{
	struct board_site *site = &d->sites[d->count];

	site->directory = d;
	site->index = d->count;
	site->own = !*endpoint || endpoint_same(endpoint, args->own);
	snprintf(site->endpoint, sizeof(site->endpoint), "%s",
		 site->own ? args->own : endpoint);
	d->count++;
	if (site->own) {
		board_local_open(&site->local, args->board, on_hear);
		return 0;
	}
	err_set(&site->why, ERR_PEER, "%s is not connected yet", site->endpoint);
	site->why.retryable = true;
	return err_pass(peers_dial(args->peers, endpoint, &site->peer));
}

static void board_directory_free(struct directory *directory)
{
	struct board_directory *d = board_directory_of(directory);
	struct board_reader *reader;

	list_foreach_safe(reader, &d->readers, link)
		reader_free(reader);
	board_said_fini(d);
	for (unsigned int i = 0; i < d->count; i++) {
		if (d->sites[i].own)
			board_local_close(&d->sites[i].local);
		else if (d->sites[i].peer)
			peer_release(d->sites[i].peer);
	}
	loop_timer_stop(&d->tick);
	loop_defer_cancel(&d->start);
	mem_free(d);
}

static void board_state(const struct directory *directory,
			struct directory_state *state_p)
{
	const struct board_directory *d = board_directory_of(directory);

	*state_p = d->state;
	if (d->state.up)
		state_p->why.code = ERR_OK;
	/* as long as one may yet be reached, that is why it is waited for */
	for (unsigned int i = 0; !d->state.up && i < d->count; i++) {
		const struct board_site *site = &d->sites[i];
		const struct err *why = site->peer && site->peer->why.code != ERR_OK
						? &site->peer->why
						: &site->why;

		if (i == 0 || why->retryable)
			state_p->why = *why;
	}
}

static const struct directory_ops board_ops = {
	.name = "board",
	.publish = board_publish,
	.update = board_update,
	.withdraw = board_withdraw,
	.watch = board_watch,
	.unwatch = board_unwatch,
	.state = board_state,
	.free = board_directory_free,
};

int board_directory_new(const struct board_directory_args *args,
			struct directory **directory_p)
{
	struct board_directory *d = mem_zalloc(sizeof(*d));
	int r = 0;

	assert(args->count >= 1 && args->count <= BOARD_SITES_MAX);
	*directory_p = NULL;
	if (!d)
		return err_pass(-ENOMEM);
	d->base = (struct directory){
		.ops = &board_ops, .on_state = args->on_state, .arg = args->arg};
	d->loop = args->loop;
	d->peers = args->peers;
	d->lease_ns = args->lease_ns;
	d->cookies = loop_random_u64(d->loop) >> 1;
	d->state.since_ns = loop_now_ns(d->loop);
	board_said_init(d);
	list_init(&d->readers);
	loop_timer_init(&d->tick, d->loop, board_on_tick);
	loop_defer_init(&d->start, on_start);
	for (unsigned int i = 0; i < args->count && r == 0; i++)
		r = site_open(d, args, args->endpoints[i]);
	if (r < 0) {
		board_directory_free(&d->base);
		return err_pass(r);
	}
	d->state.why = d->sites[0].why;
	loop_defer(d->loop, &d->start);
	*directory_p = &d->base;
	return 0;
}
