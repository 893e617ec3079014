/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libzmq implements CURVE's cryptography. It asks the daemon whether a public key that
 * has proven its secret may connect (ZAP, ZeroMQ RFC 27: a request and a reply over
 * inproc://zeromq.zap.01). The user id in the answer is attached to every message of that
 * connection, so the sender of a frame is bound to a key.
 *
 * The answers are sent by the loop, in any order: a key that may still be found in the
 * cluster's directory waits a little. No thread, no lock on the allow-list. A busy loop
 * only delays new connections.
 *
 * An unlisted key is refused in the same way as a malformed request: 400, then libzmq
 * closes the connection. Public keys are not secret, so their comparison needs no
 * constant time; the secret key is wiped after it was passed to libzmq.
 */
#include "daemon/link/link_curve.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <zmq.h>

#include "daemon/base/err.h"
#include "daemon/base/idmap.h"
#include "daemon/base/lines.h"
#include "daemon/base/list.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/link/link_refused.h"
#include "daemon/loop/loop.h"

#define ZAP_ENDPOINT "inproc://zeromq.zap.01"
#define ZAP_PARTS_MAX 16u
#define ZAP_BUDGET 32u /* requests a turn */
#define LINE_WORDS_MAX 34u

/* ---- keys ---- */

bool curve_key_check(const char *key, size_t len)
{
	static const char alphabet[] =
		"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN"
		"OPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#";

	if (len != CURVE_KEY_CHARS)
		return false;
	for (size_t i = 0; i < len; i++) {
		if (!key[i] || !strchr(alphabet, key[i]))
			return false;
	}
	return true;
}

int curve_keys_load(const char *path, struct curve_keys *keys_p)
{
	struct lines lines;
	unsigned int count = 0;
	char *line, *key;
	int r = lines_load(path, &lines);

	if (r < 0)
		return err_pass(r);
	line = lines_next(&lines);
	if (line)
		count = lines_words(line, &key, 1);
	if (lines.mode & (S_IRWXG | S_IRWXO))
		r = err_raise(ERR_CONFIG,
			      "%s: mode %04o: the secret key must not be accessible to "
			      "others; chmod 600",
			      path, (unsigned int)lines.mode & 07777);
	else if (count != 1 || !curve_key_check(key, strlen(key)))
		r = err_raise(ERR_CONFIG,
			      "%s:%u: expected a secret key of 40 Z85 characters", path,
			      lines.number);
	else if (lines_next(&lines))
		r = err_raise(ERR_CONFIG, "%s:%u: a second key", path, lines.number);
	if (r == 0) {
		/* avoid swapping; if the limit forbids it, nothing changes */
		(void)mlock(keys_p, sizeof(*keys_p));
		memcpy(keys_p->secret_key, key, CURVE_KEY_CHARS);
		keys_p->secret_key[CURVE_KEY_CHARS] = '\0';
		if (zmq_curve_public(keys_p->public_key, keys_p->secret_key) != 0)
			r = err_raise(ERR_CONFIG, "%s: not a CURVE secret key", path);
	}
	lines_fini(&lines);
	return err_pass(r);
}

void curve_keys_wipe(struct curve_keys *keys)
{
	explicit_bzero(keys, sizeof(*keys));
}

/* ---- the allow-list ---- */

struct curve_host {
	struct list link;
	char text[LINK_ENDPOINT_MAX]; /* "host" or "host:port", as endpoint_host_spell()
				       */
};

struct curve_entry {
	struct list link;
	char name[LINK_USER_MAX];
	char key[CURVE_KEY_CHARS + 1];
	struct list hosts;
	unsigned int keys; /* of the name, in its first entry */
};

struct curve_allow {
	struct list entries;
	struct strmap keys, hosts, names; /* of entries; of a name the first one */
};

static struct curve_entry *find_key(const struct curve_allow *allow, const char *key)
{
	return strmap_get(&allow->keys, key);
}

static int add_host(struct curve_allow *allow, struct curve_entry *entry,
		    const char *text)
{
	struct curve_host *host = mem_zalloc(sizeof(*host));
	int r;

	if (!host)
		return err_pass(-ENOMEM);
	list_push_back(&entry->hosts, &host->link);
	r = endpoint_host_spell(text, host->text);
	if (r == 0 && strmap_get(&allow->hosts, host->text))
		r = err_raise(ERR_CONFIG, "host %.100s is already listed", text);
	if (r == 0)
		r = strmap_put(&allow->hosts, host->text, entry);
	return err_pass(r);
}

static int add_entry(struct curve_allow *allow, char *const *words, unsigned int count)
{
	struct curve_entry *entry, *first;
	int r = 0;

	if (count < 2 || strlen(words[0]) >= LINK_USER_MAX ||
	    !curve_key_check(words[1], strlen(words[1])))
		return err_raise(
			ERR_CONFIG,
			"expected: NAME (at most %d characters), a public key of 40 Z85 "
			"characters, hosts",
			LINK_USER_MAX - 1);
	if (find_key(allow, words[1]))
		return err_raise(ERR_CONFIG, "key %s is already listed", words[1]);
	entry = mem_zalloc(sizeof(*entry));
	if (!entry)
		return err_pass(-ENOMEM);
	memcpy(entry->name, words[0], strlen(words[0]) + 1);
	memcpy(entry->key, words[1], CURVE_KEY_CHARS + 1);
	list_init(&entry->hosts);
	list_push_back(&allow->entries, &entry->link);
	r = strmap_put(&allow->keys, entry->key, entry);
	first = strmap_get(&allow->names, entry->name);
	if (r == 0 && !first)
		r = strmap_put(&allow->names, entry->name, entry);
	(first ? first : entry)->keys++;
	for (unsigned int i = 2; i < count && r == 0; i++)
		r = add_host(allow, entry, words[i]);
	return err_pass(r);
}

int curve_allow_add(struct curve_allow *allow, char *line)
{
	char *words[LINE_WORDS_MAX];
	unsigned int count = lines_words(line, words, LINE_WORDS_MAX);

	if (count > LINE_WORDS_MAX)
		return err_raise(ERR_CONFIG, "more than %u hosts", LINE_WORDS_MAX - 2);
	return err_pass(add_entry(allow, words, count));
}

struct curve_allow *curve_allow_new(void)
{
	struct curve_allow *allow = mem_zalloc(sizeof(*allow));

	if (!allow)
		return NULL;
	list_init(&allow->entries);
	strmap_init(&allow->keys);
	strmap_init(&allow->hosts);
	strmap_init(&allow->names);
	return allow;
}

int curve_allow_load(const char *path, struct curve_allow **allow_p)
{
	struct curve_allow *allow = NULL;
	struct lines lines;
	char *line;
	int r = lines_load(path, &lines);

	if (r < 0)
		return err_pass(r);
	r = lines_check_writers(&lines, path);
	if (r == 0)
		allow = curve_allow_new();
	if (r == 0 && !allow)
		r = err_pass(-ENOMEM);
	while (r == 0 && (line = lines_next(&lines))) {
		r = curve_allow_add(allow, line);
		if (r < 0)
			r = err_prefix(r, "%s:%u", path, lines.number);
	}
	lines_fini(&lines);
	if (r < 0) {
		curve_allow_free(allow);
		return err_pass(r);
	}
	*allow_p = allow;
	return 0;
}

void curve_allow_each(const struct curve_allow *allow,
		      void (*each)(void *arg, const char *name, const char *key),
		      void *arg)
{
	const struct curve_entry *entry;

	list_foreach(entry, &allow->entries, link)
		each(arg, entry->name, entry->key);
}

void curve_allow_free(struct curve_allow *allow)
{
	struct curve_entry *entry;
	struct curve_host *host;

	if (!allow)
		return;
	list_foreach_safe(entry, &allow->entries, link) {
		list_foreach_safe(host, &entry->hosts, link)
			mem_free(host);
		mem_free(entry);
	}
	strmap_fini(&allow->keys);
	strmap_fini(&allow->hosts);
	strmap_fini(&allow->names);
	mem_free(allow);
}

const char *curve_allow_name(const struct curve_allow *allow, const char *public_key)
{
	const struct curve_entry *entry = find_key(allow, public_key);

	return entry ? entry->name : NULL;
}

const char *curve_allow_shared(const struct curve_allow *allow, unsigned int *keys_p)
{
	const struct curve_entry *entry;

	list_foreach(entry, &allow->entries, link) {
		*keys_p = entry->keys;
		if (entry->keys > 1)
			return entry->name;
	}
	return NULL;
}

static bool entry_equal(const struct curve_entry *a, const struct curve_entry *b)
{
	const struct list *at = a->hosts.next, *bt = b->hosts.next;

	while (at != &a->hosts && bt != &b->hosts &&
	       strcmp(list_entry(at, const struct curve_host, link)->text,
		      list_entry(bt, const struct curve_host, link)->text) == 0) {
		at = at->next;
		bt = bt->next;
	}
	return at == &a->hosts && bt == &b->hosts && strcmp(a->name, b->name) == 0;
}

void curve_allow_compare(const struct curve_allow *before,
			 const struct curve_allow *after, struct curve_changes *changes_p)
{
	struct curve_changes changes = {0};
	const struct curve_entry *entry, *old;

	list_foreach(entry, &after->entries, link) {
		old = find_key(before, entry->key);
		changes.keys++;
		changes.added += !old;
		changes.changed += old && !entry_equal(old, entry);
	}
	list_foreach(entry, &before->entries, link)
		changes.removed += !find_key(after, entry->key);
	*changes_p = changes;
}

const char *curve_allow_key(const struct curve_allow *allow, const char *host,
			    const char *port)
{
	char both[2 * LINK_ENDPOINT_MAX];
	const struct curve_entry *entry;

	snprintf(both, sizeof(both), "%.127s:%.15s", host, port);
	entry = strmap_get(&allow->hosts, both);
	if (!entry)
		entry = strmap_get(&allow->hosts, host);
	return entry ? entry->key : NULL;
}

bool curve_allow_at(const struct curve_allow *allow, const char *key, const char *host,
		    const char *port)
{
	const struct curve_entry *entry = find_key(allow, key);
	char both[2 * LINK_ENDPOINT_MAX];
	const struct curve_host *it;

	if (!entry || list_empty(&entry->hosts))
		return entry != NULL;
	snprintf(both, sizeof(both), "%.127s:%.15s", host, port);
	list_foreach(it, &entry->hosts, link) {
		if (strcmp(it->text, both) == 0 || strcmp(it->text, host) == 0)
			return true;
	}
	return false;
}

/* ---- ZAP ---- */

#define ZAP_WAITING_MAX 64u
#define ZAP_WAITING_ADDRESS 16u /* of them, from one address */

struct curve_zap {
	struct loop_fd fd;
	struct loop_defer again; /* the budget was used up */
	struct curve_zap_args args;
	void *socket;
	struct list waiting; /* struct zap_waiter */
	unsigned int waiting_count;
	struct loop_timer timer; /* timeout of the oldest */
};

struct zap_part {
	size_t len;
	uint8_t data[256]; /* longer parts are cut: all valid ones fit */
};

/* The first two are the envelope of a ROUTER: requests may be answered in any order. */
enum {
	ZAP_ROUTE,
	ZAP_EMPTY,
	ZAP_VERSION,
	ZAP_ID,
	ZAP_DOMAIN,
	ZAP_ADDRESS,
	ZAP_IDENTITY,
	ZAP_MECHANISM,
	ZAP_KEY
};

static bool part_is(const struct zap_part *part, const char *text)
{
	return part->len == strlen(text) && memcmp(part->data, text, part->len) == 0;
}

/* False when none is queued. */
static bool zap_receive(void *socket, struct zap_part parts[ZAP_PARTS_MAX],
			unsigned int *count_p)
{
	int more = 1;
	size_t size = sizeof(more);

	*count_p = 0;
	while (more) {
		struct zap_part spare;
		struct zap_part *part =
			*count_p < ZAP_PARTS_MAX ? &parts[*count_p] : &spare;
		int n = zmq_recv(socket, part->data, sizeof(part->data), ZMQ_DONTWAIT);

		if (n < 0)
			return false;
		part->len =
			(size_t)n < sizeof(part->data) ? (size_t)n : sizeof(part->data);
		++*count_p;
		if (zmq_getsockopt(socket, ZMQ_RCVMORE, &more, &size) != 0)
			return false;
	}
	return true;
}

/* A property of ZMTP's metadata (RFC 23): name and value, each after its length. */
static size_t put_property(const char *name, const char *value, uint8_t *out)
{
	const uint8_t lens[2] = {(uint8_t)strlen(name), (uint8_t)strlen(value)};
	size_t at = 0;

	assert(lens[0] < 32 && lens[1] <= CURVE_KEY_CHARS);
	out[at++] = lens[0];
	memcpy(out + at, name, lens[0]);
	at += lens[0];
	memset(out + at, 0, 3); /* four bytes, big-endian */
	at += 3;
	out[at++] = lens[1];
	memcpy(out + at, value, lens[1]);
	return at + lens[1];
}

/* `name` NULL: refused. */
static void zap_reply(void *socket, const struct zap_part *route,
		      const struct zap_part *id, const char *key, const char *name,
		      const char *mark)
{
	const char *const texts[] = {name ? "200" : "400", name ? "OK" : "not allowed",
				     name ? name : ""};
	uint8_t metadata[192];
	size_t len = name ? put_property(CURVE_KEY, key, metadata) : 0;

	if (name && mark)
		len += put_property(CURVE_MARK, mark, metadata + len);
	zmq_send(socket, route->data, route->len, ZMQ_SNDMORE | ZMQ_DONTWAIT);
	zmq_send(socket, "", 0, ZMQ_SNDMORE | ZMQ_DONTWAIT);
	zmq_send(socket, "1.0", 3, ZMQ_SNDMORE | ZMQ_DONTWAIT);
	zmq_send(socket, id->data, id->len, ZMQ_SNDMORE | ZMQ_DONTWAIT);
	for (size_t i = 0; i < ARRAY_LEN(texts); i++)
		zmq_send(socket, texts[i], strlen(texts[i]), ZMQ_DONTWAIT | ZMQ_SNDMORE);
	zmq_send(socket, metadata, len, ZMQ_DONTWAIT);
}

static void zap_refused(struct curve_zap *zap, const struct zap_part *address,
			const char *key)
{
	static const char why[] = "its key is not in curve_allow_file";
	struct link_refused *entry;
	char text[64];
	bool log;

	snprintf(text, sizeof(text), "%.*s", (int)(address->len < 60 ? address->len : 60),
		 (const char *)address->data);
	entry = link_refused_note(zap->args.refusals, loop_now_ns(zap->fd.loop), key,
				  text, why, &log);
	if (log)
		log_warn("link", text,
			 "connection refused: its key is not in curve_allow_file",
			 "key='%s' count=%llu", key, (unsigned long long)entry->count);
}

/* A key that who() may know soon. */
struct zap_waiter {
	struct list link;
	struct zap_part route, id, address;
	char key[CURVE_KEY_CHARS + 1];
	uint64_t until_ns;
};

static void zap_judge(struct curve_zap *zap, const struct zap_part *route,
		      const struct zap_part *id, const struct zap_part *address,
		      const char *key)
{
	char name[LINK_USER_MAX];
	const char *mark = NULL;
	bool known = *key && zap->args.who(zap->args.owner, key, name, &mark);

	if (!known)
		zap_refused(zap, address, key);
	zap_reply(zap->socket, route, id, key, known ? name : NULL, mark);
}

static void zap_waiter_end(struct curve_zap *zap, struct zap_waiter *waiter)
{
	zap_judge(zap, &waiter->route, &waiter->id, &waiter->address, waiter->key);
	list_remove(&waiter->link);
	zap->waiting_count--;
	mem_free(waiter);
}

static void zap_timer_start(struct curve_zap *zap)
{
	const struct zap_waiter *first =
		list_first(&zap->waiting, struct zap_waiter, link);
	uint64_t now_ns = loop_now_ns(zap->fd.loop);

	if (first)
		loop_timer_start(&zap->timer,
				 first->until_ns > now_ns ? first->until_ns - now_ns : 0);
}

static void on_zap_timer(struct loop_timer *timer)
{
	struct curve_zap *zap = container_of(timer, struct curve_zap, timer);
	uint64_t now_ns = loop_now_ns(timer->loop);
	struct zap_waiter *waiter;

	while ((waiter = list_first(&zap->waiting, struct zap_waiter, link)) &&
	       waiter->until_ns <= now_ns)
		zap_waiter_end(zap, waiter);
	zap_timer_start(zap);
}

void curve_zap_look(struct curve_zap *zap)
{
	struct zap_waiter *waiter;
	char name[LINK_USER_MAX];
	const char *mark;

	list_foreach_safe(waiter, &zap->waiting, link) {
		if (zap->args.who(zap->args.owner, waiter->key, name, &mark))
			zap_waiter_end(zap, waiter);
	}
}

/* Any host that reaches the port can present any number of keys: the number of waiting
 * ones per address is limited, so that it does not prevent look-ups for other daemons. */
static bool may_wait(const struct curve_zap *zap, const struct zap_part *address)
{
	const struct zap_waiter *waiter;
	unsigned int own = 0;

	list_foreach(waiter, &zap->waiting, link)
		own += waiter->address.len == address->len &&
		       memcmp(waiter->address.data, address->data, address->len) == 0;
	return zap->waiting_count < ZAP_WAITING_MAX && own < ZAP_WAITING_ADDRESS;
}

/* False: it is judged now. */
static bool zap_wait(struct curve_zap *zap, const struct zap_part *parts, const char *key)
{
	struct zap_waiter *waiter;
	char name[LINK_USER_MAX];
	const char *mark;

	if (!zap->args.ask || !may_wait(zap, &parts[ZAP_ADDRESS]) ||
	    zap->args.who(zap->args.owner, key, name, &mark) ||
	    !zap->args.ask(zap->args.owner, key))
		return false;
	waiter = mem_zalloc(sizeof(*waiter));
	if (!waiter) {
		err_clear();
		return false;
	}
	waiter->route = parts[ZAP_ROUTE];
	waiter->id = parts[ZAP_ID];
	waiter->address = parts[ZAP_ADDRESS];
	memcpy(waiter->key, key, sizeof(waiter->key));
	waiter->until_ns = loop_now_ns(zap->fd.loop) + CURVE_WAIT_NS;
	list_push_back(&zap->waiting, &waiter->link);
	zap->waiting_count++;
	zap_timer_start(zap);
	return true;
}

static void zap_answer(struct curve_zap *zap, const struct zap_part *parts,
		       unsigned int count)
{
	static const struct zap_part nowhere;
	char key[CURVE_KEY_CHARS + 1] = "";
	bool whole = count == ZAP_KEY + 1 && part_is(&parts[ZAP_VERSION], "1.0") &&
		     part_is(&parts[ZAP_MECHANISM], "CURVE") &&
		     parts[ZAP_KEY].len == 32 &&
		     zmq_z85_encode(key, parts[ZAP_KEY].data, 32);

	if (whole && zap_wait(zap, parts, key))
		return;
	zap_judge(zap, &parts[ZAP_ROUTE], &parts[ZAP_ID],
		  count > ZAP_ADDRESS ? &parts[ZAP_ADDRESS] : &nowhere, whole ? key : "");
}

static void zap_drain(struct curve_zap *zap)
{
	struct zap_part parts[ZAP_PARTS_MAX];
	unsigned int count;

	for (unsigned int i = 0; i < ZAP_BUDGET; i++) {
		if (!zap_receive(zap->socket, parts, &count))
			return;
		if (count > ZAP_ID)
			zap_answer(zap, parts, count);
	}
	loop_defer(zap->fd.loop, &zap->again);
}

static void on_zap_ready(struct loop_fd *watch, int events)
{
	(void)events;
	zap_drain(container_of(watch, struct curve_zap, fd));
}

static void on_zap_again(struct loop_defer *defer)
{
	zap_drain(container_of(defer, struct curve_zap, again));
}

int curve_zap_new(const struct curve_zap_args *args, struct curve_zap **zap_p)
{
	struct curve_zap *zap = mem_zalloc(sizeof(*zap));
	int fd = -1, linger = 0, r = 0;
	size_t size = sizeof(fd);

	if (!zap)
		return err_pass(-ENOMEM);
	zap->args = *args;
	loop_defer_init(&zap->again, on_zap_again);
	list_init(&zap->waiting);
	loop_timer_init(&zap->timer, args->loop, on_zap_timer);
	zap->socket = zmq_socket(args->context, ZMQ_ROUTER);
	if (!zap->socket ||
	    zmq_setsockopt(zap->socket, ZMQ_LINGER, &linger, sizeof(linger)) ||
	    zmq_bind(zap->socket, ZAP_ENDPOINT) ||
	    zmq_getsockopt(zap->socket, ZMQ_FD, &fd, &size))
		r = err_raise(ERR_IO, "the CURVE key checker: %s", zmq_strerror(errno));
	loop_fd_init(&zap->fd, args->loop, fd, on_zap_ready);
	if (r == 0)
		r = loop_fd_set(&zap->fd, LOOP_READ);
	if (r < 0) {
		curve_zap_free(zap);
		return err_pass(r);
	}
	*zap_p = zap;
	return 0;
}

void curve_zap_free(struct curve_zap *zap)
{
	struct list *link;

	if (!zap)
		return;
	while ((link = list_pop_front(&zap->waiting)))
		mem_free(list_entry(link, struct zap_waiter, link));
	loop_timer_stop(&zap->timer);
	loop_defer_cancel(&zap->again);
	loop_fd_stop(&zap->fd);
	if (zap->socket)
		zmq_close(zap->socket);
	mem_free(zap);
}
