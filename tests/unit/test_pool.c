/* SPDX-License-Identifier: Apache-2.0 */
/* Pools through the control socket: layouts against regions, pins, rooms, ends. */
#include "daemon/session/pool.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/mem.h"
#include "daemon/session/session.h"
#include "tests/lib/control_client.h"

/* Two buffers of 64 KiB: 16 pages of 16 tokens, one head of 256 bytes; k and v. */
#define FIELD(name, buffer)                                                             \
	"{\"name\":\"" name "\",\"buffer\":" buffer                                     \
	",\"offset\":0,\"page_stride\":4096,"                                           \
	"\"token_stride\":256,\"unit_stride\":256,\"unit_bytes\":256,\"first_unit\":0," \
	"\"units\":1,\"total_units\":1}"
#define LAYOUT                                                                          \
	"{\"rank\":3,\"buffers\":[65536,65536],\"views\":{\"kv\":{\"page_tokens\":16,"  \
	"\"pages\":16,\"layers\":[{\"layer\":0,\"fields\":[" FIELD("k", "0") "," FIELD( \
		"v", "1") "]}]}}}"

struct stage {
	struct mini mini;
	struct client client;
	int64_t region; /* 128 KiB */
};

static int64_t register_memory(struct client *client, size_t bytes)
{
	int fd = memfd_filled(bytes, 7);
	cJSON *reply =
		client_call_fd(client, fd,
			       "{\"cmd\":\"region.register\",\"kind\":\"memfd\",\"fd\":0,"
			       "\"length\":%zu}",
			       bytes);
	int64_t id = reply_int(reply, "region");

	cJSON_Delete(reply);
	close(fd);
	return id;
}

static int start(void **state)
{
	struct stage *stage = mem_zalloc(sizeof(*stage));

	mini_config(&stage->mini);
	mini_start(&stage->mini);
	client_open(&stage->client, &stage->mini);
	stage->region = register_memory(&stage->client, 128 << 10);
	*state = stage;
	return 0;
}

static int stop(void **state)
{
	struct stage *stage = *state;

	client_close(&stage->client);
	mini_stop(&stage->mini);
	mem_free(stage);
	return 0;
}

static struct session *first_session(struct stage *stage)
{
	return list_first(&stage->mini.kvd.sessions, struct session, link);
}

static int64_t register_pool(struct stage *stage)
{
	return client_call_int(&stage->client, "pool",
			       "{\"cmd\":\"pool.register\",\"layout\":" LAYOUT
			       ",\"regions\":[{\"region\":%jd},{\"region\":%jd,"
			       "\"offset\":65536}]}",
			       (intmax_t)stage->region, (intmax_t)stage->region);
}

static void pool_registered_is_listed_and_pins(void **state)
{
	struct stage *stage = *state;
	int64_t id = register_pool(stage);
	struct session *session = first_session(stage);
	struct region *region = region_find(session, (uint64_t)stage->region);
	struct pool *pool = pool_find(session, (uint64_t)id);
	cJSON *reply = client_call(&stage->client, "{\"cmd\":\"pool.list\"}");
	const cJSON *entry = cJSON_GetObjectItem(reply, "pools")->child;

	assert_string_equal(cJSON_GetObjectItem(entry, "name")->valuestring, "kv");
	assert_string_equal(cJSON_GetObjectItem(entry, "views")->child->valuestring,
			    "kv");
	assert_int_equal(reply_int(entry, "rank"), 3);
	assert_int_equal(reply_int(entry, "bytes"), 131072);
	assert_int_equal(reply_int(entry, "pool"), id);
	cJSON_Delete(reply);
	assert_int_equal(pool->layout->buffer_count, 2);
	assert_ptr_equal(pool->buffers[1].region, region);
	assert_int_equal(pool->buffers[1].offset, 65536);
	assert_int_equal(region->pins, 2);
	assert_int_equal(region->pools, 1);
	client_call_fails(&stage->client, "EBUSY",
			  "{\"cmd\":\"region.unregister\",\"region\":%jd}",
			  (intmax_t)stage->region);
	client_call_ok(&stage->client, "{\"cmd\":\"pool.unregister\",\"pool\":%jd}",
		       (intmax_t)id);
	assert_int_equal(region->pins, 0);
	assert_int_equal(region->pools, 0);
	client_call_fails(&stage->client, "ENOTFOUND",
			  "{\"cmd\":\"pool.unregister\",\"pool\":%jd}", (intmax_t)id);
	client_call_ok(&stage->client, "{\"cmd\":\"region.unregister\",\"region\":%jd}",
		       (intmax_t)stage->region);
}

static void pool_wrong_refused_and_unpinned(void **state)
{
	static const struct {
		const char *layout, *regions, *code;
	} wrong[] = {
		{LAYOUT, "[]", "ERANGE"},
		{LAYOUT, "[{\"region\":1}]", "EINVAL"},
		{LAYOUT, "[{\"region\":1},{\"region\":1},{\"region\":1}]", "EINVAL"},
		{LAYOUT, "[{\"region\":1},{\"region\":99}]", "ENOTFOUND"},
		{LAYOUT, "[{\"region\":1},1]", "EINVAL"},
		{LAYOUT, "[{\"region\":1},{\"region\":1.5}]", "EINVAL"},
		{LAYOUT, "[{\"region\":1},{\"region\":-1}]", "ERANGE"},
		{LAYOUT, "[{\"region\":1},{\"offset\":0}]", "EINVAL"},
		{LAYOUT, "[{\"region\":1},{\"region\":1,\"more\":0}]", "EINVAL"},
		{LAYOUT, "[{\"region\":1},{\"region\":1,\"offset\":-1}]", "EINVAL"},
		{LAYOUT, "[{\"region\":1},{\"region\":1,\"offset\":65537}]", "ERANGE"},
		{LAYOUT,
		 "[{\"region\":1},{\"region\":1,\"offset\":\"18446744073709551615\"}]",
		 "ERANGE"},
		{"{}", "[{\"region\":1}]", "EINVAL"},
		{"{\"rank\":0,\"buffers\":[131073],\"views\":{}}", "[{\"region\":1}]",
		 ""},
		{"[]", "[{\"region\":1}]", "EINVAL"},
	};
	struct stage *stage = *state;
	struct region *region =
		region_find(first_session(stage), (uint64_t)stage->region);

	for (size_t i = 0; i < ARRAY_LEN(wrong); i++) {
		cJSON *reply = client_call(&stage->client,
					   "{\"cmd\":\"pool.register\",\"layout\":%s,"
					   "\"regions\":%s}",
					   wrong[i].layout, wrong[i].regions);

		assert_true(reply_code(reply)[0] != '\0');
		if (*wrong[i].code)
			expect_code(reply, wrong[i].code);
		else
			cJSON_Delete(reply);
		assert_int_equal(region->pins, 0);
		assert_int_equal(region->pools, 0);
	}
	client_call_fails(&stage->client, "EINVAL",
			  "{\"cmd\":\"pool.register\",\"name\":\"\",\"layout\":" LAYOUT
			  ",\"regions\":[{\"region\":1}]}");
	assert_int_equal(idmap_count(&first_session(stage)->pools), 0);
}

/* A region that is closing cannot be built upon. */
static void pool_on_closing_region_refused(void **state)
{
	struct stage *stage = *state;
	struct region *region =
		region_find(first_session(stage), (uint64_t)stage->region);

	region_pin(region);
	client_send_fds(&stage->client,
			"{\"id\":1,\"cmd\":\"region.unregister\",\"region\":1}\n", NULL,
			0);
	client_call_fails(
		&stage->client, "ENOTFOUND",
		"{\"cmd\":\"pool.register\",\"layout\":" LAYOUT
		",\"regions\":[{\"region\":1},{\"region\":1,\"offset\":65536}]}");
	region_unpin(region);
	expect_ok(client_reply(&stage->client));
}

/* An unregister that comes while the layout is parsed finds the region in use. */
static void region_unregistered_while_its_pool_is_made_is_busy(void **state)
{
	struct stage *stage = *state;

	client_send_fds(&stage->client,
			"{\"cmd\":\"pool.register\",\"layout\":" LAYOUT
			",\"regions\":[{\"region\":1},{\"region\":1,\"offset\":65536}]}\n"
			"{\"id\":2,\"cmd\":\"region.unregister\",\"region\":1}\n",
			NULL, 0);
	for (int i = 0; i < 2; i++) {
		cJSON *reply = client_reply(&stage->client);

		if (cJSON_IsNumber(cJSON_GetObjectItem(reply, "id")))
			expect_code(reply, "EBUSY");
		else
			expect_ok(reply);
	}
}

static void pool_in_use_is_busy_and_outlives_its_session(void **state)
{
	struct stage *stage = *state;
	int64_t id = register_pool(stage);
	struct session *session = first_session(stage);
	struct pool *pool = pool_find(session, (uint64_t)id);
	struct region *region = pool->buffers[0].region;

	pool_use(pool);
	client_call_fails(&stage->client, "EBUSY",
			  "{\"cmd\":\"pool.unregister\",\"pool\":%jd}", (intmax_t)id);
	client_close(&stage->client);
	while (!session->ending)
		mini_turn(&stage->mini);
	for (int i = 0; i < 5; i++)
		mini_turn(&stage->mini);
	assert_null(pool_find(session, (uint64_t)id));
	assert_int_equal(sm_state(&region->sm), REGION_CLOSING);
	assert_int_equal(region->memory->base[70000], 7); /* still mapped for the room */
	assert_int_equal(stage->mini.kvd.session_count, 1);
	pool_unuse(pool);
	mini_until_sessions(&stage->mini, 0);
}

static void pools_over_the_cap_refused(void **state)
{
	struct stage *stage = *state;

	stage->mini.config.session_pools_max = 2;
	register_pool(stage);
	register_pool(stage);
	client_call_fails(
		&stage->client, "ELIMIT",
		"{\"cmd\":\"pool.register\",\"layout\":" LAYOUT
		",\"regions\":[{\"region\":1},{\"region\":1,\"offset\":65536}]}");
}

/* The ids of pools are the daemon's, not the session's: they go on the wire. */
static void pool_ids_are_unique_in_the_daemon(void **state)
{
	struct stage *stage = *state;
	int64_t mine = register_pool(stage), theirs, region;
	struct client other;

	client_open(&other, &stage->mini);
	region = register_memory(&other, 128 << 10);
	theirs = client_call_int(&other, "pool",
				 "{\"cmd\":\"pool.register\",\"layout\":" LAYOUT
				 ",\"regions\":[{\"region\":%jd},{\"region\":%jd}]}",
				 (intmax_t)region, (intmax_t)region);
	assert_int_not_equal(mine, theirs);
	client_call_fails(&other, "ENOTFOUND",
			  "{\"cmd\":\"pool.unregister\",\"pool\":%jd}", (intmax_t)mine);
	client_close(&other);
	mini_until_sessions(&stage->mini, 1);
}

static void session_ends_while_pool_is_made(void **state)
{
	struct stage *stage = *state;

	for (int turns = 0; turns < 5; turns++) {
		struct client client;
		int64_t region;

		client_open(&client, &stage->mini);
		region = register_memory(&client, 128 << 10);
		char line[2048];

		snprintf(line, sizeof(line),
			 "{\"cmd\":\"pool.register\",\"layout\":" LAYOUT
			 ",\"regions\":[{\"region\":%jd},{\"region\":%jd}]}\n",
			 (intmax_t)region, (intmax_t)region);
		client_send(&client, line, strlen(line));
		for (int i = 0; i < turns; i++)
			mini_turn(&stage->mini);
		client_close(&client);
		mini_until_sessions(&stage->mini, 1);
	}
	assert_int_equal(metrics_get(&stage->mini.kvd.metrics, METRIC_POOLS), 0);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, start, stop)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(pool_registered_is_listed_and_pins),
		CASE(pool_wrong_refused_and_unpinned),
		CASE(pool_on_closing_region_refused),
		CASE(region_unregistered_while_its_pool_is_made_is_busy),
		CASE(pool_in_use_is_busy_and_outlives_its_session),
		CASE(pools_over_the_cap_refused),
		CASE(pool_ids_are_unique_in_the_daemon),
		CASE(session_ends_while_pool_is_made),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
