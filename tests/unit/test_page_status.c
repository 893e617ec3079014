/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The page's status of rooms and peers: its bounds, what it leaves out, a daemon that
 * stops, and memory that runs out. In-process cluster, virtual time.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/metrics/page_status.h"
#include "tests/lib/cluster.h"

#define KEY "rq:rM>}U?@Lns47E1+kR.o@n+FcmmsL/@{H8]yf7"
#define TICKET "00112233445566778899aabbccddeeff"

struct scene {
	struct cluster c;
	struct session *prefill, *decode;
	struct cache src, dst;
	struct page_status status; /* of the decode node */
	unsigned int taken;
};

static void on_taken(struct page_status *status)
{
	container_of(status, struct scene, status)->taken++;
}

static int setup(void **state)
{
	struct scene *s = calloc(1, sizeof(*s));

	cluster_new(&s->c, 7, 2);
	s->prefill = cluster_engine(&s->c, 0, "vllm");
	s->decode = cluster_engine(&s->c, 1, "sglang");
	s->src = s->dst = cluster_geometry;
	cluster_cache(&s->c, s->prefill, "kv", 0, &s->src);
	cluster_cache(&s->c, s->decode, "kv", 0, &s->dst);
	s->c.nodes[1].config.metrics_rooms = true;
	page_status_init(&s->status, &s->c.nodes[1].kvd, on_taken);
	*state = s;
	return 0;
}

static int teardown(void **state)
{
	struct scene *s = *state;

	page_status_fini(&s->status);
	cluster_free(&s->c);
	cache_close(&s->src);
	cache_close(&s->dst);
	free(s);
	return 0;
}

static void open_recv(struct scene *s, unsigned int room)
{
	cluster_ok(&s->c, s->decode,
		   "{'cmd':'room.open','room':'%u','role':'recv','pool':%llu,"
		   "'sources':['%s'],'ticket':'" TICKET "','request_id':'chat-17'}",
		   room, (unsigned long long)s->dst.pool, s->c.nodes[0].endpoint);
}

static bool is_taken(void *arg)
{
	return ((struct scene *)arg)->taken > 0;
}

static cJSON *take(struct scene *s, char **text_p)
{
	struct text text = {0};
	cJSON *json;

	s->taken = 0;
	page_status_take(&s->status);
	cluster_until(&s->c, is_taken, s, "the status");
	assert_int_equal(s->taken, 1);
	page_status_json(&s->status, &text);
	assert_false(text.failed);
	json = cJSON_Parse(text.data);
	assert_non_null(json);
	if (text_p)
		*text_p = strdup(text.data);
	text_fini(&text);
	return json;
}

static const cJSON *list(const cJSON *json, const char *reply, const char *name)
{
	return cJSON_GetObjectItem(cJSON_GetObjectItem(json, reply), name);
}

static void status_shows_the_oldest_rooms(void **state)
{
	struct scene *s = *state;
	const cJSON *rooms, *first;
	cJSON *json;

	for (unsigned int i = 1; i <= 30; i++)
		open_recv(s, i);
	cluster_run(&s->c, LOOP_NS_PER_S);
	json = take(s, NULL);
	rooms = list(json, "rooms", "rooms");
	assert_int_equal(cJSON_GetArraySize(rooms), 20);
	first = cJSON_GetArrayItem(rooms, 0);
	assert_string_equal(cJSON_GetObjectItem(first, "room")->valuestring, "1");
	first = cJSON_GetObjectItem(first, "waits_for");
	assert_string_equal(cJSON_GetObjectItem(first, "what")->valuestring,
			    "engine 'sglang' to bind pages");
	assert_true(cJSON_GetObjectItem(first, "since_ms")->valuedouble >= 900);
	assert_int_equal(cJSON_GetArraySize(list(json, "peers", "peers")), 1);
	cJSON_Delete(json);
}

/* Its own session is none of an engine. */
static void status_leaves_no_trace(void **state)
{
	struct scene *s = *state;
	struct kvd *kvd = &s->c.nodes[1].kvd;
	uint64_t opened = metrics_get(&kvd->metrics, METRIC_SESSIONS_OPENED);

	cJSON_Delete(take(s, NULL));
	cluster_run(&s->c, LOOP_NS_PER_S);
	assert_int_equal(kvd->session_count, 1);
	assert_int_equal(metrics_get(&kvd->metrics, METRIC_SESSIONS), 1);
	assert_int_equal(metrics_get(&kvd->metrics, METRIC_SESSIONS_OPENED), opened);
}

static void secrets_and_names_of_requests_are_left_out(void **state)
{
	struct scene *s = *state;
	const cJSON *error;
	char *text;
	cJSON *json;

	open_recv(s, 1);
	open_recv(s, 2);
	cluster_ok(&s->c, s->decode,
		   "{'cmd':'room.abort','room':'2','reason':'" KEY " at tcp://h:1#" KEY
		   ", not " KEY "x <script>'}");
	cluster_run(&s->c, LOOP_NS_PER_S);
	json = take(s, &text);
	error = cJSON_GetObjectItem(cJSON_GetArrayItem(list(json, "failed", "rooms"), 0),
				    "error");
	assert_non_null(strstr(cJSON_GetObjectItem(error, "message")->valuestring,
			       "  at tcp://h:1, not " KEY "x <script>"));
	assert_null(strstr(text, TICKET));
	assert_null(strstr(text, "chat-17"));
	assert_null(strstr(text, "ticket"));
	assert_null(strstr(text, "request_id"));
	assert_null(strstr(text, "\"pid\""));
	assert_null(strstr(text, "\"instance\""));
	cJSON_Delete(json);
	free(text);
}

static void status_is_empty_unless_it_is_enabled(void **state)
{
	struct scene *s = *state;
	char *text;

	open_recv(s, 1);
	s->c.nodes[1].config.metrics_rooms = false;
	cJSON_Delete(take(s, &text));
	assert_string_equal(text, "{\"shown\":false}\n");
	free(text);
}

/* Its session and request end with all others. */
static void daemon_that_stops_takes_no_status(void **state)
{
	struct scene *s = *state;
	struct kvd *kvd = &s->c.nodes[1].kvd;
	cJSON *json;

	kvd->stopping = true;
	json = take(s, NULL);
	assert_null(cJSON_GetObjectItem(json, "rooms"));
	assert_int_equal(kvd->session_count, 1);
	cJSON_Delete(json);
	kvd->stopping = false;
	s->taken = 0;
	page_status_take(&s->status); /* is stopped before its first request */
	kvd->stopping = true;
	session_end(s->status.session, "the daemon is shutting down");
	cluster_until(&s->c, is_taken, s, "the status");
	cluster_run(&s->c, LOOP_NS_PER_S);
	assert_int_equal(kvd->session_count, 1);
	kvd->stopping = false;
}

static void status_survives_want_of_memory(void **state)
{
	struct scene *s = *state;
	int64_t blocks;
	bool all = false;

	open_recv(s, 1);
	cluster_run(&s->c, LOOP_NS_PER_S);
	cJSON_Delete(take(s, NULL));
	cluster_run(&s->c, LOOP_NS_PER_S);
	page_status_fini(&s->status);
	blocks = mem_live();
	for (uint64_t nth = 1; !all; nth++) {
		struct text text = {0};

		s->taken = 0;
		mem_fail_at(nth);
		page_status_take(&s->status);
		cluster_until(&s->c, is_taken, s, "the status");
		page_status_json(&s->status, &text);
		all = mem_count() < nth;
		mem_fail_at(0);
		if (!text.failed) {
			cJSON *json = cJSON_Parse(text.data);

			assert_non_null(json);
			assert_true(!all || list(json, "peers", "peers"));
			cJSON_Delete(json);
		}
		text_fini(&text);
		page_status_fini(&s->status);
		cluster_run(&s->c, LOOP_NS_PER_S);
		assert_true(mem_live() <= blocks);
		assert_true(nth < 5000);
	}
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(status_shows_the_oldest_rooms),
		T(status_leaves_no_trace),
		T(secrets_and_names_of_requests_are_left_out),
		T(status_is_empty_unless_it_is_enabled),
		T(daemon_that_stops_takes_no_status),
		T(status_survives_want_of_memory),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
