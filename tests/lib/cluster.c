/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A node is a struct kvd whose members are built in kvd.c's order, with the
 * doors replaced: virtual loop, inline offload, link_mem, fake transport. There
 * is no control socket: requests are dispatched directly and their answers
 * caught, so every test speaks the public commands.
 */
#include "tests/lib/cluster.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/request/commands.h"
#include "daemon/control/control.h"
#include "daemon/handshake/handshake.h"
#include "daemon/modules.h"
#include "daemon/loop/offload.h"
#include "daemon/room/room.h"
#include "daemon/room/rooms.h"
#include "daemon/memory/copy.h"
#include "daemon/xfer/xfer.h"
#include "proto/json.h"
#include "tests/lib/file.h"
#include "tests/lib/hold_lines.h"

static void must(int r)
{
	if (r < 0)
		fail_msg("%s", err_last()->text);
}

/* No socket: requests are dispatched directly. */
static struct module control_hooks;
static const struct module *without_socket[MODULES + 1];
static const struct module *const *modules = without_socket;

static void (*wrap_events)(struct kvd *kvd, struct handshake_events *events);

static bool short_parts, real_time;
static void (*configure)(struct config *config);
static uint32_t peers_max;
static unsigned int restarts_max;
static const struct cluster_sharing *sharing;
static const char *const *users;
static const struct transport_ops *preferred;

void cluster_prefer(const struct transport_ops *ops)
{
	preferred = ops;
}

void cluster_real_time(void)
{
	real_time = true;
}

void cluster_short_parts(void)
{
	short_parts = true;
}

void cluster_configure(void (*change)(struct config *config))
{
	configure = change;
}

void cluster_peers_max(uint32_t peers)
{
	peers_max = peers;
}

void cluster_restarts_max(unsigned int restarts)
{
	restarts_max = restarts;
}

void cluster_share(const struct cluster_sharing *how)
{
	sharing = how;
}

void cluster_modules(const struct module *const *list)
{
	modules = list ? list : without_socket;
}

void cluster_users(const char *const *names)
{
	users = names;
}

void cluster_wrap_events(void (*wrap)(struct kvd *kvd, struct handshake_events *events))
{
	wrap_events = wrap;
}

static void node_new(struct cluster *c, unsigned int i, const char *endpoint)
{
	static const char *const transports[] = {"shm", NULL};
	const struct config_source source = {.path = "/dev/null",
					     .transports = transports};
	struct node *node = &c->nodes[i];
	struct kvd *kvd = &node->kvd;
	struct handshake_events events = handshake_events_of(kvd);

	must(config_load(&node->config, &source));
	memset(&node->config.transports, 0, sizeof(node->config.transports));
	if (preferred)
		strcpy(node->config.transports.word[node->config.transports.count++],
		       preferred->name);
	strcpy(node->config.transports.word[node->config.transports.count++], "fake");
	snprintf(node->config.name, sizeof(node->config.name), "n%u", i);
	node->config.tombstones_max = 4096; /* rather than 21 MB of them to clear */
	if (short_parts)
		node->config.peer_part_bytes = 16;
	if (peers_max)
		node->config.peers_max = peers_max;
	if (configure)
		configure(&node->config);
	strcpy(node->endpoint, endpoint);
	list_init(&kvd->sessions);
	kvd->accounts.limit = node->config.memory_bytes;
	kvd->accounts.metrics = &kvd->metrics;
	kvd->modules = modules;
	kvd->config = &node->config;
	kvd->loop = c->loop;
	memset(kvd->boot_id, 7, sizeof(kvd->boot_id));
	must(offload_new_inline(c->loop, &kvd->offload));
	must(link_mem_new(c->links, node->endpoint, users ? users[i] : "", &kvd->link));
	if (wrap_events)
		wrap_events(kvd, &events);
	must(handshake_new(kvd, &events, &kvd->handshake));
	if (c->directory)
		kvd->directory = c->sharing->member(c->directory);
	must(modules_new(kvd));
	node->alive = true;
}

void cluster_new(struct cluster *c, uint64_t seed, unsigned int nodes)
{
	memset(c, 0, sizeof(*c));
	control_hooks = (struct module){.id = MODULE_CONTROL,
					.commands = control_module.commands,
					.remote_change = control_module.remote_change};
	for (size_t i = 0; modules_built[i]; i++)
		without_socket[i] = modules_built[i] == &control_module
					    ? &control_hooks
					    : modules_built[i];
	log_set_level(getenv("KVD_TEST_LOG") ? LOG_LEVEL_DEBUG : LOG_LEVEL_ERROR);
	transport_add(&fake_ops);
	if (preferred)
		transport_add(preferred);
	must(real_time ? loop_new(&c->loop) : loop_new_virtual(seed, &c->loop));
	if (sharing)
		c->directory = sharing->new (c->loop);
	c->sharing = sharing;
	must(mem_hub_new(c->loop, &c->links));
	must(fake_hub_new(c->loop, seed, &c->bytes));
	fake_hub_spare(c->bytes, REQUEST_MESSAGE);
	c->count = nodes;
	c->most = nodes + (restarts_max ? restarts_max : 8);
	if (c->most < CLUSTER_NODES_MAX)
		c->most = CLUSTER_NODES_MAX;
	c->nodes = calloc(c->most, sizeof(*c->nodes));
	assert_non_null(c->nodes);
	for (unsigned int i = 0; i < nodes; i++) {
		char endpoint[64];

		snprintf(endpoint, sizeof(endpoint), "tcp://10.0.%u.%u:7400",
			 (i + 1) / 256, (i + 1) % 256);
		node_new(c, i, endpoint);
	}
}

void cluster_crash(struct cluster *c, unsigned int i, enum mem_crash how)
{
	struct node *node = &c->nodes[i];
	struct session *session;

	node->alive = false;
	if (c->directory)
		c->sharing->crash(node->kvd.directory);
	link_mem_crash(node->kvd.link, how);
	for (unsigned int t = 0; t < node->kvd.transport_count; t++)
		fake_node_vanish(node->kvd.transports[t]);
	list_foreach_safe(session, &node->kvd.sessions, link)
		session_end(session, "the daemon died");
}

unsigned int cluster_restart(struct cluster *c, unsigned int i)
{
	assert_true(!c->nodes[i].alive && c->count < c->most);
	node_new(c, c->count, c->nodes[i].endpoint);
	return c->count++;
}

static bool node_quiet(void *arg)
{
	struct node *node = arg;

	struct err why;

	return node->kvd.session_count == 0 && rooms_count(rooms_of(&node->kvd)) == 0 &&
	       modules_drained(&node->kvd, &why);
}

static bool node_drained(void *arg)
{
	struct node *node = arg;

	return handshake_drained(node->kvd.handshake);
}

void cluster_free(struct cluster *c)
{
	for (unsigned int i = 0; i < c->count; i++) {
		struct session *session;
		struct err why;

		list_foreach_safe(session, &c->nodes[i].kvd.sessions, link)
			session_end(session, "the test is over");
		err_set(&why, ERR_DRAIN, "the test is over");
		modules_close(&c->nodes[i].kvd, &why);
	}
	for (unsigned int i = 0; i < c->count; i++)
		cluster_until(c, node_quiet, &c->nodes[i], "sessions drained");
	for (unsigned int i = 0; i < c->count; i++)
		handshake_close(c->nodes[i].kvd.handshake);
	for (unsigned int i = 0; i < c->count; i++)
		cluster_until(c, node_drained, &c->nodes[i], "data lines closed");
	for (unsigned int i = 0; i < c->count; i++) {
		struct kvd *kvd = &c->nodes[i].kvd;

		modules_free(kvd);
		handshake_free(kvd->handshake);
		kvd->link->ops->free(kvd->link);
		offload_free(kvd->offload);
		/* what was charged to anybody was given back */
		assert_true(accounts_idle(&kvd->accounts));
	}
	if (c->directory)
		c->sharing->free(c->directory);
	fake_hub_free(c->bytes);
	mem_hub_free(c->links);
	loop_free(c->loop);
	free(c->nodes);
}

void cluster_run(struct cluster *c, uint64_t ns)
{
	uint64_t end = loop_now_ns(c->loop) + ns;

	while (loop_now_ns(c->loop) < end)
		loop_turn(c->loop, end - loop_now_ns(c->loop));
}

void cluster_until(struct cluster *c, bool (*holds)(void *arg), void *arg,
		   const char *what)
{
	uint64_t end = loop_now_ns(c->loop) + 1000 * LOOP_NS_PER_S;

	while (!holds(arg)) {
		if (loop_now_ns(c->loop) > end)
			fail_msg("not within 1000 virtual seconds: %s", what);
		loop_turn(c->loop, LOOP_NS_PER_S);
	}
}

struct session *cluster_engine_of(struct cluster *c, unsigned int node, const char *name,
				  uid_t uid)
{
	struct session *session;

	must(session_new(&c->nodes[node].kvd,
			 &(struct session_peer){.fd = -1, .uid = uid}, NULL, &session));
	must(session_greet(session, name, ""));
	return session;
}

struct session *cluster_engine(struct cluster *c, unsigned int node, const char *name)
{
	return cluster_engine_of(c, node, name, 0);
}

void cluster_engine_dies(struct cluster *c, struct session *session)
{
	(void)c;
	session_end(session, "killed by the test");
}

/* ---- commands ---- */

struct answer {
	char *text;
	bool here;
};

static void on_answer(void *arg, const char *text, size_t len)
{
	struct answer *answer = arg;

	answer->text = strndup(text, len);
	answer->here = true;
}

static bool is_here(void *arg)
{
	return ((struct answer *)arg)->here;
}

static void starve(const struct cluster_lack *lack)
{
	if (lack->lasting)
		mem_fail_from(lack->nth);
	else
		mem_fail_at(lack->nth);
}

/* Rows of a dlist.prep, "descs", which tests write as [["address", bytes, stride,
 * count]…]: a memfd has them. */
static void descs_write(cJSON *args, int *fd_p)
{
	cJSON *descs = cJSON_DetachItemFromObject(args, "descs");
	const cJSON *row;

	if (!descs)
		return;
	*fd_p = memfd_create("descs", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	cJSON_ArrayForEach(row, descs) {
		uint64_t entry[4] = {strtoull(row->child->valuestring, NULL, 10),
				     (uint64_t)row->child->next->valuedouble, 0, 1};

		for (int i = 2; i < cJSON_GetArraySize(row); i++)
			entry[i] = (uint64_t)cJSON_GetArrayItem(row, i)->valuedouble;
		assert_int_equal(write(*fd_p, entry, sizeof(entry)), sizeof(entry));
	}
	cJSON_AddNumberToObject(args, "fd", 0);
	cJSON_AddNumberToObject(args, "count", cJSON_GetArraySize(descs));
	cJSON_Delete(descs);
}

/* The text of its error; then its slot is free again. */
static void hold_refused(struct cluster *c, const struct hold_line *hold, cJSON *answer)
{
	unsigned long long id = KVD_RING_IDS + hold->entry.slot;
	cJSON *state =
		cluster_call(c, hold->session, "{'cmd':'xfer.state','xfer':%llu}", id);

	if (cJSON_HasObjectItem(state, "state"))
		cJSON_ReplaceItemInObject(answer, "error",
					  cJSON_DetachItemFromObject(state, "error"));
	cJSON_Delete(state);
	cluster_ok(c, hold->session, "{'cmd':'chunk.release','hold':%llu}", id);
}

/* The line is read and the answer is looked at outside of the hunger: they are
 * the connection's and the client's. */
static cJSON *call(struct cluster *c, struct session *session, int fd, const char *text,
		   struct cluster_lack *lack)
{
	struct answer answer = {0};
	cJSON *args = cJSON_Parse(text), *json;
	struct hold_line hold;
	struct request *req;

	if (!args)
		fail_msg("not JSON: %s", text);
	hold_line_begin(&hold, session, &args);
	if (strlen(text) > REQUEST_INLINE_BYTES)
		json_pack_lists(args);
	descs_write(args, &fd);
	if (lack)
		starve(lack);
	req = request_new(session, strlen(text), &fd, fd >= 0 ? 1 : 0);
	if (req) {
		req->on_answer = on_answer;
		req->on_answer_arg = &answer;
		req->line = args;
		commands_dispatch(req);
		cluster_until(c, is_here, &answer, text);
		if (hold.entry.op && !strstr(answer.text, "\"error\""))
			cluster_until(c, hold_line_is_over, &hold, text);
	}
	if (lack) {
		cluster_run(c, lack->after_ns);
		lack->used = mem_count();
		mem_fail_at(0);
	}
	if (!req) { /* a test lets memory fail: the connection answers so */
		cJSON_Delete(args);
		mem_closep(&fd);
		return cJSON_Parse("{\"error\":{\"code\":\"ENOMEM\"}}");
	}
	json = cJSON_Parse(answer.text);
	assert_non_null(json);
	free(answer.text);
	if (!hold.entry.op || cJSON_HasObjectItem(json, "error"))
		return json;
	if (!hold_line_answer(&hold, json))
		hold_refused(c, &hold, json);
	return json;
}

cJSON *cluster_call_fd(struct cluster *c, struct session *session, int fd,
		       struct cluster_lack *lack, const char *text)
{
	return call(c, session, fd, text, lack);
}

static char *format(const char *fmt, va_list ap)
{
	char *text = NULL;

	assert_true(vasprintf(&text, fmt, ap) > 0);
	for (char *p = text; *p; p++) /* tests write ' for " */
		*p = *p == '\'' ? '"' : *p;
	return text;
}

cJSON *cluster_call(struct cluster *c, struct session *session, const char *fmt, ...)
{
	va_list ap;
	char *text;
	cJSON *answer;

	va_start(ap, fmt);
	text = format(fmt, ap);
	va_end(ap);
	answer = call(c, session, -1, text, NULL);
	free(text);
	return answer;
}

uint64_t cluster_number(cJSON *answer, const char *name)
{
	const cJSON *n = cJSON_GetObjectItemCaseSensitive(answer, name);
	uint64_t value;

	if (!cJSON_IsNumber(n))
		fail_msg("no %s in %s", name, cJSON_PrintUnformatted(answer));
	value = (uint64_t)n->valuedouble;
	cJSON_Delete(answer);
	return value;
}

uint64_t cluster_space(struct cluster *c, struct session *engine, uint64_t pool,
		       unsigned int tokens)
{
	return cluster_number(cluster_call(c, engine,
					   "{'cmd':'space.open','pool':%llu,'model':'m',"
					   "'scheme':'s','tokens':%u}",
					   (unsigned long long)pool, tokens),
			      "space");
}

static const char *code_of(const cJSON *answer)
{
	const cJSON *error = cJSON_GetObjectItemCaseSensitive(answer, "error");

	return error ? cJSON_GetStringValue(
			       cJSON_GetObjectItemCaseSensitive(error, "code"))
		     : "ok";
}

static void expect(struct cluster *c, struct session *session, const char *code,
		   const char *text)
{
	cJSON *answer = call(c, session, -1, text, NULL);

	if (strcmp(code_of(answer), code) != 0)
		fail_msg("%s\n  wanted %s, got %s", text, code,
			 cJSON_PrintUnformatted(answer));
	cJSON_Delete(answer);
}

void cluster_ok(struct cluster *c, struct session *session, const char *fmt, ...)
{
	va_list ap;
	char *text;

	va_start(ap, fmt);
	text = format(fmt, ap);
	va_end(ap);
	expect(c, session, "ok", text);
	free(text);
}

void cluster_refused(struct cluster *c, struct session *session, const char *code,
		     const char *fmt, ...)
{
	va_list ap;
	char *text;

	va_start(ap, fmt);
	text = format(fmt, ap);
	va_end(ap);
	expect(c, session, code, text);
	free(text);
}

/* ---- caches ---- */

const struct cache cluster_geometry = {.layers = 4,
				       .pages = 16,
				       .page_tokens = 4,
				       .units = 4,
				       .total_units = 4,
				       .unit_bytes = 32};

static uint64_t field_bytes(const struct cache *k)
{
	return (uint64_t)k->pages * k->page_tokens * k->units * k->unit_bytes;
}

static void add_field(cJSON *fields, const struct cache *k, const char *name,
		      uint64_t offset, unsigned int bytes)
{
	cJSON *f = cJSON_CreateObject();
	double token = (double)k->units * k->unit_bytes;

	cJSON_AddItemToArray(fields, f);
	cJSON_AddStringToObject(f, "name", name);
	cJSON_AddNumberToObject(f, "buffer", 0);
	cJSON_AddNumberToObject(f, "offset", (double)offset);
	cJSON_AddNumberToObject(f, "page_stride", token * k->page_tokens);
	cJSON_AddNumberToObject(f, "token_stride", token);
	cJSON_AddNumberToObject(f, "unit_stride", k->unit_bytes);
	cJSON_AddNumberToObject(f, "unit_bytes", bytes);
	cJSON_AddNumberToObject(f, "first_unit", k->first_unit);
	cJSON_AddNumberToObject(f, "units", k->units);
	cJSON_AddNumberToObject(f, "total_units", k->total_units);
}

static void add_aux(cJSON *views, const struct cache *k)
{
	cJSON *view = cJSON_AddObjectToObject(views, "aux");
	cJSON *layer = cJSON_CreateObject();
	struct cache aux = *k;

	aux.page_tokens = aux.units = aux.total_units = 1;
	aux.first_unit = 0;
	aux.unit_bytes = k->aux_bytes;
	cJSON_AddNumberToObject(view, "page_tokens", 1);
	cJSON_AddNumberToObject(view, "pages", k->aux_slots);
	cJSON_AddItemToArray(cJSON_AddArrayToObject(view, "layers"), layer);
	cJSON_AddNumberToObject(layer, "layer", 0);
	add_field(cJSON_AddArrayToObject(layer, "fields"), &aux, "bytes",
		  2 * k->layers * field_bytes(k), aux.unit_bytes);
}

/* K and V of a layer. */
static void add_fields(cJSON *fields, const struct cache *k, unsigned int layer)
{
	const unsigned int bytes = k->scaled ? k->unit_bytes / 2 : k->unit_bytes;

	for (unsigned int i = 0; i < 2; i++) {
		uint64_t offset = (2 * layer + i) * field_bytes(k);

		add_field(fields, k, i ? "v" : "k", offset, bytes);
		if (k->scaled)
			add_field(fields, k, i ? "v_scale" : "k_scale", offset + bytes,
				  4);
	}
}

static cJSON *layout_of(const struct cache *k, unsigned int rank)
{
	cJSON *layout = cJSON_CreateObject(), *views, *view, *layers;

	cJSON_AddNumberToObject(layout, "rank", rank);
	cJSON_AddItemToArray(cJSON_AddArrayToObject(layout, "buffers"),
			     cJSON_CreateNumber((double)k->bytes));
	views = cJSON_AddObjectToObject(layout, "views");
	view = cJSON_AddObjectToObject(views, "kv");
	cJSON_AddNumberToObject(view, "page_tokens", k->page_tokens);
	cJSON_AddNumberToObject(view, "pages", k->pages);
	if (k->shard_size) {
		cJSON *shard = cJSON_AddObjectToObject(view, "shard");

		cJSON_AddNumberToObject(shard, "size", k->shard_size);
		cJSON_AddNumberToObject(shard, "rank", k->shard_rank);
		cJSON_AddNumberToObject(shard, "run", k->shard_run);
	}
	layers = cJSON_AddArrayToObject(view, "layers");
	for (unsigned int l = 0; l < k->layers; l++) {
		cJSON *layer = cJSON_CreateObject();

		cJSON_AddItemToArray(layers, layer);
		cJSON_AddNumberToObject(layer, "layer", l);
		add_fields(cJSON_AddArrayToObject(layer, "fields"), k, l);
	}
	if (k->aux_slots)
		add_aux(views, k);
	return layout;
}

static uint64_t number(const cJSON *answer, const char *name)
{
	const cJSON *n = cJSON_GetObjectItemCaseSensitive(answer, name);

	if (!cJSON_IsNumber(n))
		fail_msg("no %s in %s", name, cJSON_PrintUnformatted(answer));
	return (uint64_t)n->valuedouble;
}

void cluster_cache(struct cluster *c, struct session *session, const char *pool,
		   unsigned int rank, struct cache *k)
{
	char text[256], *layout;
	cJSON *answer, *json;

	k->session = session;
	k->bytes = 2 * k->layers * field_bytes(k) + (uint64_t)k->aux_slots * k->aux_bytes;
	k->fd = memfd_create("cache", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	assert_true(k->fd >= 0 && file_fill(k->fd, k->bytes) == 0);
	k->base = mmap(NULL, k->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, k->fd, 0);
	assert_ptr_not_equal(k->base, MAP_FAILED);
	snprintf(text, sizeof(text),
		 "{\"cmd\":\"region.register\",\"kind\":\"memfd\",\"fd\":0,\"length\":%"
		 "llu,"
		 "\"address\":\"%llu\"}",
		 (unsigned long long)k->bytes, (unsigned long long)(uintptr_t)k->base);
	answer = call(c, session, dup(k->fd), text, NULL);
	k->region = number(answer, "region");
	cJSON_Delete(answer);
	json = layout_of(k, rank);
	layout = cJSON_PrintUnformatted(json);
	cJSON_Delete(json);
	answer = cluster_call(c, session,
			      "{'cmd':'pool.register','name':'%s','layout':%s,'regions':"
			      "[{'region':%llu}]}",
			      pool, layout, (unsigned long long)k->region);
	k->pool = number(answer, "pool");
	cJSON_Delete(answer);
	cJSON_free(layout);
}

void cache_close(struct cache *k)
{
	munmap(k->base, k->bytes);
	close(k->fd);
}

uint8_t *cache_at(const struct cache *k, unsigned int layer, unsigned int field,
		  unsigned int page, unsigned int token, unsigned int unit,
		  unsigned int b)
{
	uint64_t at = (2ull * layer + field) * field_bytes(k);

	at += (((uint64_t)page * k->page_tokens + token) * k->units + unit -
	       k->first_unit) *
	      k->unit_bytes;
	return k->base + at + b;
}

uint8_t *cache_aux(const struct cache *k, unsigned int slot)
{
	return k->base + 2 * k->layers * field_bytes(k) + (uint64_t)slot * k->aux_bytes;
}

/* ---- rooms ---- */

void room_failed_with(const struct room *room, enum err_code code, const char *words)
{
	assert_non_null(room);
	assert_false(room_live(room));
	if (room->error->code != code || !strstr(room->error->text, words))
		fail_msg("room %ju: %s: %s; not %s: %s", (uintmax_t)room->number,
			 err_name(room->error->code), room->error->text, err_name(code),
			 words);
}

int cluster_state(struct cluster *c, struct session *session, const char *role,
		  uint64_t room)
{
	static const char *const names[] = {"send", "recv", "offer", "pull"};
	unsigned int i = 0;
	struct room *found;

	(void)c;
	while (strcmp(names[i], role) != 0)
		i++;
	found = rooms_find(rooms_of(session->kvd), session, (enum room_role)i, room);
	return found ? (int)room_poll_state(found) : -1;
}

struct state_goal {
	struct cluster *c;
	struct session *session;
	const char *role;
	uint64_t room;
	int state;
};

static bool has_state(void *arg)
{
	const struct state_goal *g = arg;

	return cluster_state(g->c, g->session, g->role, g->room) == g->state;
}

void cluster_until_state(struct cluster *c, struct session *session, const char *role,
			 uint64_t room, int state)
{
	struct state_goal goal = {c, session, role, room, state};
	char what[80];

	snprintf(what, sizeof(what), "%s room %llu in state %d", role,
		 (unsigned long long)room, state);
	cluster_until(c, has_state, &goal, what);
}
