/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a failed command must leave unchanged is all that can be seen of a daemon:
 * the lists that commands show, the figures, and a few counts that have no list
 * (attaches, prepared lists, transfers, what waits). Figures that count attempts,
 * and time itself, are left out by name: everything else is compared as text.
 */
#include "tests/lib/starve.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/hex.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/cluster/groups_impl.h"
#include "daemon/room/rooms_set.h"
#include "daemon/xfer/xfer_impl.h"

static const struct cache geometry = {.layers = 2,
				      .pages = 16,
				      .page_tokens = 4,
				      .units = 2,
				      .total_units = 2,
				      .unit_bytes = 32,
				      .aux_slots = 4,
				      .aux_bytes = 64};

static void *hooked_malloc(size_t size)
{
	return mem_zalloc(size);
}

void starve_word(struct starve *s, const char *name, const char *fmt, ...)
{
	struct starve_word *word = s->words;
	va_list ap;

	while (word < s->words + s->word_count && strcmp(word->name, name) != 0)
		word++;
	assert_true(word < s->words + STARVE_WORDS_MAX);
	if (word == s->words + s->word_count)
		s->word_count++;
	snprintf(word->name, sizeof(word->name), "%s", name);
	va_start(ap, fmt);
	vsnprintf(word->value, sizeof(word->value), fmt, ap);
	va_end(ap);
}

static void know_engine(struct starve *s, char who, const struct cache *cache)
{
	static const char *const names[] = {"pool_", "region_", "base_", "epoch_",
					    "secret_"};
	const struct session *session = who == 'a' ? s->a : s->b;
	const uint64_t values[] = {cache->pool, cache->region, (uintptr_t)cache->base,
				   session->epoch};
	char name[32], hex[33];

	for (size_t i = 0; i < ARRAY_LEN(names); i++) {
		snprintf(name, sizeof(name), "%s%c", names[i], who);
		if (i < ARRAY_LEN(values))
			starve_word(s, name, "%ju", (uintmax_t)values[i]);
	}
	hex_write(session->secret, 16, hex);
	starve_word(s, name, "%s", hex);
}

void starve_new(struct starve *s)
{
	memset(s, 0, sizeof(*s));
	cJSON_InitHooks(&(cJSON_Hooks){.malloc_fn = hooked_malloc, .free_fn = mem_free});
	cluster_new(&s->c, 1, 3);
	for (unsigned int i = 0; i < 3;
	     i++) /* what is kept for rooms to come ends soon */
		s->c.nodes[i].config.early_request_ttl_ns = 250 * LOOP_NS_PER_MS;
	s->a = cluster_engine(&s->c, 0, "engine a");
	s->b = cluster_engine(&s->c, 1, "engine b");
	s->src = s->dst = geometry;
	cluster_cache(&s->c, s->a, "kv", 0, &s->src);
	cluster_cache(&s->c, s->b, "kv", 0, &s->dst);
	know_engine(s, 'a', &s->src);
	know_engine(s, 'b', &s->dst);
	starve_word(s, "ep_a", "%s", s->c.nodes[0].endpoint);
	starve_word(s, "ep_b", "%s", s->c.nodes[1].endpoint);
	starve_word(s, "ep_c", "%s", s->c.nodes[2].endpoint);
}

void starve_free(struct starve *s)
{
	cluster_free(&s->c);
	cache_close(&s->src);
	cache_close(&s->dst);
}

/* ---- lines ---- */

static const char *value_of(const struct starve *s, const char *name, size_t len)
{
	for (unsigned int i = 0; i < s->word_count; i++) {
		if (strlen(s->words[i].name) == len &&
		    strncmp(s->words[i].name, name, len) == 0)
			return s->words[i].value;
	}
	fail_msg("nothing is known as $%.*s", (int)len, name);
	return NULL;
}

static void spell(const struct starve *s, const char *line, char *text, size_t size)
{
	size_t n = 0;

	while (*line) {
		const char *value = line;
		size_t len = 1;

		if (*line == '$') {
			line++;
			for (len = 0;
			     isalnum((unsigned char)line[len]) || line[len] == '_';)
				len++;
			value = value_of(s, line, len);
			line += len;
			len = strlen(value);
		} else {
			line++;
		}
		assert_true(n + len < size);
		memcpy(text + n, value, len);
		for (; len; len--, n++)
			text[n] = text[n] == '\'' ? '"' : text[n];
	}
	text[n] = '\0';
}

const char *starve_code(const cJSON *answer)
{
	const cJSON *error = cJSON_GetObjectItemCaseSensitive(answer, "error");

	if (cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(answer, "ok")))
		return "ok"; /* the record of a failed room has an "error", too */
	return cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(error, "code"));
}

static void learn(struct starve *s, const cJSON *answer)
{
	const cJSON *it;

	cJSON_ArrayForEach(it, answer) {
		if (cJSON_IsNumber(it))
			starve_word(s, it->string, "%.0f", it->valuedouble);
		else if (cJSON_IsString(it) && strlen(it->valuestring) < 100)
			starve_word(s, it->string, "%s", it->valuestring);
	}
}

cJSON *starve_try(struct starve *s, const char *line, bool fd, struct cluster_lack *lack)
{
	char text[4096];
	cJSON *answer;

	spell(s, line + 1, text, sizeof(text));
	answer = cluster_call_fd(&s->c, *line == 'a' ? s->a : s->b,
				 fd ? dup(s->src.fd) : -1, lack, text);
	if (strcmp(starve_code(answer), "ok") == 0)
		learn(s, answer);
	return answer;
}

void starve_say(struct starve *s, const char *line)
{
	bool may_fail = *line == '?';
	cJSON *answer;

	if (*line == '~') {
		cluster_run(&s->c, strtoull(line + 1, NULL, 10) * LOOP_NS_PER_MS);
		return;
	}
	if (*line == '=') {
		starve_word(s, "kept", "%s", value_of(s, line + 1, strlen(line + 1)));
		return;
	}
	line += may_fail;
	answer = starve_try(s, line, false, NULL);
	if (!may_fail && strcmp(starve_code(answer), "ok") != 0)
		fail_msg("%s: %s", line, cJSON_PrintUnformatted(answer));
	cJSON_Delete(answer);
}

/* ---- what can be seen ---- */

static bool is_volatile(const char *name, bool counters)
{
	static const char *const names[] = {
		"age_ms", "rtt_us",	  "messages_in",    "messages_out", "timings_ms",
		"help",	  "waits_for",	  "since_ms",	    "lost",	    "last_error",
		"downs",  "rooms_failed", "disk_free_bytes"};
	static const char *const totals[] = {
		"rooms_ended", "bytes_in", "bytes_out",	    "found",
		"missed",      "evicted",  "put_bytes",	    "fetched_bytes",
		"written",     "read",	   "written_bytes", "read_bytes"};

	for (size_t i = 0; i < ARRAY_LEN(names); i++) {
		if (strcmp(names[i], name) == 0)
			return true;
	}
	for (size_t i = 0; !counters && i < ARRAY_LEN(totals); i++) {
		if (strcmp(totals[i], name) == 0)
			return true;
	}
	/* prepared lists keep their regions pinned from their first use on */
	return !counters && strcmp(name, "pins") == 0;
}

/* Counts of attempts, which a failed command makes too; and what is charged, which is
 * more from the first use of some objects on. */
static bool is_attempt(const cJSON *metric)
{
	static const char *const names[] = {
		"commands_total", "regions_refused_total", "xfer_refused_total",
		"room_messages_refused_total", "account_bytes"};
	const char *name = cJSON_GetStringValue(cJSON_GetObjectItem(metric, "name"));

	for (size_t i = 0; name && i < ARRAY_LEN(names); i++) {
		if (strcmp(names[i], name) == 0)
			return true;
	}
	return false;
}

/* Times pass, and the process is that of the test. */
static bool is_time(const cJSON *metric)
{
	const char *unit = cJSON_GetStringValue(cJSON_GetObjectItem(metric, "unit"));
	const char *name = cJSON_GetStringValue(cJSON_GetObjectItem(metric, "name"));

	/* a file system's room is looked at, and loads are published, from time to time
	 */
	return (unit && strcmp(unit, "seconds") == 0) ||
	       (name && (strncmp(name, "process_", 8) == 0 ||
			 strcmp(name, "cluster_puts_total") == 0 ||
			 strcmp(name, "cluster_events_total") == 0 ||
			 strcmp(name, "chunk_file_system_free_bytes") == 0));
}

static bool is_counter(const cJSON *metric)
{
	const char *type = cJSON_GetStringValue(cJSON_GetObjectItem(metric, "type"));

	return type && (strcmp(type, "counter") == 0 || strcmp(type, "histogram") == 0);
}

static void strip(cJSON *json, bool counters)
{
	cJSON *it = json->child;

	while (it) {
		cJSON *next = it->next;

		if ((it->string && is_volatile(it->string, counters)) || is_attempt(it) ||
		    is_time(it) || (!counters && is_counter(it)))
			cJSON_Delete(cJSON_DetachItemViaPointer(json, it));
		else
			strip(it, counters);
		it = next;
	}
}

static void look_xfers(FILE *out, const struct session *session)
{
	const struct xfer_session *xs = session->part[MODULE_XFER];
	const struct xfers *xfers = xfers_of(session->kvd);
	unsigned int shadows = 0, serving = 0;
	const struct list *at;

	for (at = xfers->shadows.next; at != &xfers->shadows; at = at->next)
		shadows++;
	for (at = xfers->serving.next; at != &xfers->serving; at = at->next)
		serving++;
	fprintf(out, "shadows %u serving %u live %u orphans %u ranks %u\n", shadows,
		serving, xfers->live, rooms_of(session->kvd)->orphan_count,
		groups_of(session->kvd)->place_count);
	if (xs)
		fprintf(out,
			"attaches %zu dlists %zu transfers %zu notifs %zu notes %u\n",
			idmap_count(&xs->attaches), idmap_count(&xs->dlists),
			idmap_count(&xs->transfers), xs->notif_bytes, xs->notes);
}

char *starve_look(struct starve *s, bool counters)
{
	static const char *const lists[] = {
		"{'cmd':'session.list','all':true}",
		"{'cmd':'region.list','all':true}",
		"{'cmd':'pool.list','all':true}",
		"{'cmd':'room.list','all':true}",
		"{'cmd':'peer.list'}",
		"{'cmd':'stats'}",
		"{'cmd':'chunk.list','all':true}",
	};
	char *text = NULL;
	size_t len = 0;
	FILE *out = open_memstream(&text, &len);

	assert_non_null(out);
	for (int who = 0; who < 2; who++) {
		struct session *session = who ? s->b : s->a;

		for (size_t i = 0; i < ARRAY_LEN(lists); i++) {
			cJSON *answer = cluster_call(&s->c, session, "%s", lists[i]);
			char *line;

			strip(answer, counters);
			line = cJSON_Print(answer);
			fprintf(out, "%c %s\n%s\n", who ? 'b' : 'a', lists[i], line);
			cJSON_free(line);
			cJSON_Delete(answer);
		}
		look_xfers(out, session);
	}
	fprintf(out, "log %d\n", log_threshold);
	fclose(out);
	return text;
}

int64_t starve_blocks(struct starve *s)
{
	int64_t least = mem_live();

	for (int i = 0; i < 60; i++) { /* beats come every 200 ms */
		cluster_run(&s->c, 7 * LOOP_NS_PER_MS);
		least = mem_live() < least ? mem_live() : least;
	}
	return least;
}

/* The first line that differs is the message. */
void starve_same(const char *before, const char *after, const char *what)
{
	const char *a = before, *b = after;

	if (strcmp(before, after) == 0)
		return;
	while (*a && *a == *b) {
		a++;
		b++;
	}
	while (a > before && a[-1] != '\n') {
		a--;
		b--;
	}
	fail_msg("%s\n  before: ...%.*s\n  after:  %.*s", what,
		 (int)strcspn(a, "\n") + 80, a - (a - before > 80 ? 80 : a - before),
		 (int)strcspn(b, "\n"), b);
}
